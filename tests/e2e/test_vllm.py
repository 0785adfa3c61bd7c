"""A generation archive on vLLM, built and served as any other, whose processes end with it; skipped without vllm."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

pytest.importorskip("vllm")

from scripts.lib.server import TorchServe
from tests.e2e.conftest import CLI, serving_mapping, start_server
from tests.e2e.generation.conftest import NAME, rests, running, url
from tests.generation_models import Oracle, tiny_llama

pytestmark = pytest.mark.timeout(1800)
OPTIONS = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 64 * 2**15}
CHAT: Any = [{"role": "user", "content": "the cat plays"}]
ASKED: Any = {"model": NAME, "messages": CHAT, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama", head_dim=32)


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    store = tmp_path_factory.mktemp("store")
    subprocess.run(
        [*CLI, "build", str(directory), "--name", NAME, "--store", str(store), "--engine", "vllm",
         "--engine-options", json.dumps(OPTIONS)],
        check=True,
    )  # fmt: skip
    model = {"archive": f"{NAME}.mar", "version": "1.0", "batch_size": 4, "max_batch_delay": 1, "queue": 6}
    with start_server(tmp_path_factory.mktemp(NAME), serving_mapping(store, {NAME: model}), timeout=900) as server:
        yield server


def engines(server: TorchServe) -> list[psutil.Process]:
    """The processes of the worker."""
    return psutil.Process(server.management.describe(NAME, "1.0").workers[0].pid).children(recursive=True)


def end(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether they end within some seconds; what nobody has waited for has ended too."""
    deadline = time.monotonic() + seconds
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_it_serves_forgets_and_comes_back(server: TorchServe, directory: Path) -> None:
    oracle = Oracle(directory)
    expected = oracle.tokenizer.decode(oracle.ids(oracle.chat(CHAT), 24), skip_special_tokens=True)
    key = server.headers()["Authorization"].removeprefix("Bearer ")
    client = openai.OpenAI(base_url=f"{url(server)}/v1", api_key=key, max_retries=0, timeout=120)
    assert client.chat.completions.create(**ASKED).choices[0].message.content == expected
    stream = client.chat.completions.create(**ASKED, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == expected
    with pytest.raises(openai.BadRequestError, match="512"):
        client.chat.completions.create(**{**ASKED, "max_tokens": 512})

    endless: Any = {"model": NAME, "prompt": "a", "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    left = client.completions.create(**endless, stream=True)
    next(iter(left))
    left.close()
    assert rests(server, 10)

    broken = client.completions.create(**endless, stream=True)
    running(server, 1)
    before = engines(server)
    assert any(process.name().startswith("VLLM::Engine") for process in before)
    os.kill(server.management.describe(NAME, "1.0").workers[0].pid, signal.SIGKILL)
    assert end(before, 60)
    broken.close()
    deadline = time.monotonic() + 900
    while True:
        assert time.monotonic() < deadline
        try:
            again = client.chat.completions.create(**ASKED)
            break
        except openai.APIError:
            time.sleep(1)
    assert again.choices[0].message.content == expected

    last = engines(server)
    server.stop()
    assert end(last, 60)
