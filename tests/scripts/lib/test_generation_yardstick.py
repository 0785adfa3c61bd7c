"""The yardsticks of generation answer in processes of their own, with the same tokens. Oracle: each other."""

import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.lib.generation_yardstick import STATIC, UNSHARED, VLLM, Yardstick
from scripts.lib.offline import OfflineError
from tests.generation_models import tiny_llama

REPOSITORY = Path(__file__).resolve().parents[3]
SETTINGS = {"task": "generation", "model": "model", "cache_gib": 0.01}
REQUESTS = [([5, 6, 7], 4), ([8] * 40, 9), ([9, 10], 1), ([11] * 20, 6), ([12, 5], 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = tmp_path_factory.mktemp("archive")
    shutil.copytree(REPOSITORY / "handlers", archive / "handlers", ignore=shutil.ignore_patterns("__pycache__"))
    return tiny_llama(archive / "model")


def test_all_sides_generate_the_same(model: Path) -> None:
    """With prefix sharing the engine is a side of e2e/test_bench_and_demo.py's benchmark, and equals STATIC there."""
    found = {}
    for kind in (STATIC, UNSHARED):
        with Yardstick(model, "float32", 1, kind, SETTINGS, 2) as side:
            found[kind] = side.generate(REQUESTS, at_once=2)
    for kind, done in found.items():
        assert [len(tokens) for tokens in done.tokens] == [new for _, new in REQUESTS], kind
        assert done.tokens == found[STATIC].tokens, kind
        assert all(0 < first <= last <= done.seconds for first, last in zip(done.first_s, done.latency_s, strict=True))
    batches = found[STATIC].latency_s
    assert batches[0] == batches[1] != batches[2]
    assert found[UNSHARED].first_s[1] < found[UNSHARED].latency_s[1]


def test_a_failure_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OfflineError, match="could not load"), Yardstick(tmp_path, "float32", 1, STATIC, SETTINGS, 2):
        pytest.fail("entered without a model")


# Of vllm, what its side uses: an engine that writes ever the same token, a step of all of them at a time, and a process
# that it has started.
FAKE = {
    "__init__.py": """
from types import SimpleNamespace as SamplingParams
""",
    "inputs.py": """
tokens_input = list
""",
    "sampling_params.py": """
class RequestOutputKind:
    DELTA = 1
""",
    "platforms.py": """
class current_platform:
    is_cpu = staticmethod(lambda: True)
""",
    "engine/__init__.py": "",
    "engine/arg_utils.py": """
AsyncEngineArgs = dict
""",
    "v1/__init__.py": "",
    "v1/engine/__init__.py": "",
    "v1/engine/async_llm.py": """
import asyncio, os, subprocess, sys
from types import SimpleNamespace

class AsyncLLM:
    @classmethod
    def from_engine_args(cls, options):
        asyncio.get_running_loop()
        assert options["kv_cache_memory_bytes"] == int(0.01 * 2**30), options
        assert (options["dtype"], options["max_model_len"]) == ("float32", 64)
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and os.environ["OMP_NUM_THREADS"] == "1"
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        print("this goes to the log, not to whoever asks")
        with open(os.environ["FAKE_PID"], "w") as file:
            file.write(str(child.pid))
        return cls()

    running = most = 0

    async def generate(self, prompt, asked, request_id):
        assert asked.ignore_eos and asked.temperature == 0
        self.running += 1
        assert self.running <= 2
        for number in range(asked.max_tokens):
            await asyncio.sleep(0.002)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[len(prompt) + number])])
        self.running -= 1
""",
}


def test_vllm_answers_in_the_named_interpreter(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FAKE.items():
        path = tmp_path / "fakes" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python = tmp_path / "python"  # one that has vllm, as an isolated interpreter needs it
    loader = tmp_path / "loader.py"
    loader.write_text(
        f"import sys, runpy; sys.path.insert(0, {str(tmp_path / 'fakes')!r}); del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} {loader} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("FAKE_PID", str(tmp_path / "pid"))
    with Yardstick(model, "float32", 1, VLLM, {**SETTINGS, "max_model_len": 64}, 2, python) as side:
        done = side.generate(REQUESTS, at_once=2)
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        assert child.is_running()
    assert done.tokens == tuple(tuple(range(len(prompt), len(prompt) + new)) for prompt, new in REQUESTS)
    assert all(0 < first <= last <= done.seconds for first, last in zip(done.first_s, done.latency_s, strict=True))
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:  # its processes end with it
        assert time.monotonic() < deadline
        time.sleep(0.05)
