"""What the engine on transformers does to its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from handlers.cores import BOUNDS, spinning
from tests.generation_models import tiny_llama

ENGINE = """
import os, sys, threading
from pathlib import Path
import torch
from handlers.generation.continuous import ContinuousEngine
from handlers.generation.engine import Sampling, Sequence
from handlers.generation.settings import GenerationConfig

def helpers():  # threads that are not Python's
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())

torch.set_num_threads(4)
before = helpers()
settings = {"task": "generation", "page_size": 16, "num_blocks": 64, "max_batch_tokens": 48}
engine = ContinuousEngine(Path(sys.argv[1]), GenerationConfig.from_mapping(settings), None, 8)
for _ in range(2):
    engine.submit(Sequence("a", (5, 6, 7, 8) * 8, 8, Sampling(temperature=0.0)))
    while not any(output.finish for output in engine.collect(30.0)):
        pass
    print(helpers() - before)
    engine._manager.end(30.0)  # as after a failure: another thread takes over
"""


@pytest.mark.parametrize(("bounded", "helpers"), [(True, ["3", "3"]), (False, ["6", "6"])])
def test_only_the_thread_that_generates_has_helpers(tmp_path: Path, bounded: bool, helpers: list[str]) -> None:
    """With helpers of others beside them, GNU OpenMP lets all of them sleep between two loops: right where nothing else
    bounds how long they wait."""
    model = tiny_llama(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=1)
    environment = {name: value for name, value in os.environ.items() if name not in BOUNDS}
    told = subprocess.run(
        [sys.executable, "-c", ENGINE, str(model)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment | spinning(environment) if bounded else environment,
    )
    assert told.stdout.split() == helpers, told.stderr
