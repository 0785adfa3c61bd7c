"""A tiny decoder behind a real TorchServe, spoken to as clients speak. Oracle: transformers' generate on its own."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.lib import archive
from scripts.lib.recipe import Order, prepare
from scripts.lib.scrape import Snapshot
from scripts.lib.server import TorchServe
from scripts.lib.source import Source
from tests.e2e.conftest import CLI, serving_mapping, start_server
from tests.generation_models import tiny_llama

SLOTS, QUEUE = 4, 6
CHAT = [{"role": "user", "content": "the cat plays"}]
LONG = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama", positions=4096)


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    store = tmp_path_factory.mktemp("store")
    order = Order(source=Source(directory, "tiny"), name="tiny", version="1.0", overrides={"cache_gib": 0.01})
    recipe = prepare(order, tmp_path_factory.mktemp("work"))
    archive.write(store / "tiny.mar", recipe.contents, recipe.members)
    model = {"archive": "tiny.mar", "version": "1.0", "batch_size": SLOTS, "max_batch_delay": 1, "queue": QUEUE}
    with start_server(tmp_path_factory.mktemp("tiny"), serving_mapping(store, {"tiny": model})) as server:
        yield server


def url(server: TorchServe) -> str:
    return f"{server.urls.inference}/predictions/tiny/1.0"


@pytest.fixture
def client(server: TorchServe) -> openai.OpenAI:
    key = server.headers()["Authorization"].removeprefix("Bearer ")
    return openai.OpenAI(base_url=f"{url(server)}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected(directory: Path) -> str:
    """What the model says to CHAT, 24 tokens at most."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def stats(server: TorchServe) -> dict[str, Any]:
    answer = requests.get(f"{url(server)}/describe", headers=server.headers(), timeout=30)
    found: dict[str, Any] = answer.json()["stats"]
    return found


def rests(server: TorchServe, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = stats(server)
        if found["running"] == found["waiting"] == found["used_blocks"] == 0:
            return True
        time.sleep(0.1)
    return False


def test_the_openai_client(client: openai.OpenAI, expected: str) -> None:
    whole = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=24, temperature=0)
    assert whole.choices[0].message.content == expected
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == expected
    assert events[-1].usage == whole.usage
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    completion = client.completions.create(model="tiny", prompt="hello", max_tokens=5, temperature=0, logprobs=1)
    assert completion.choices[0].logprobs is not None


def test_the_async_openai_client(server: TorchServe, client: openai.OpenAI, expected: str) -> None:
    async def ask() -> None:
        made = openai.AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key, max_retries=0, timeout=60)
        async with made:
            options: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 24, "temperature": 0}

            async def streamed() -> str:
                stream = await made.chat.completions.create(**options, stream=True)
                return "".join([event.choices[0].delta.content or "" async for event in stream])

            async def whole() -> str:
                return (await made.chat.completions.create(**options)).choices[0].message.content or ""

            assert await asyncio.gather(*(streamed() for _ in range(3)), *(whole() for _ in range(3))) == [expected] * 6

    asyncio.run(ask())


def test_curl_shows_the_stream_as_it_comes(server: TorchServe, expected: str) -> None:
    body = {"messages": CHAT, "max_tokens": 24, "temperature": 0, "stream": True}
    out = subprocess.run(
        ["curl", "-sN", "-H", f"Authorization: {server.headers()['Authorization']}", "-H",
         "Content-Type: application/json", "-d", json.dumps(body), f"{url(server)}/v1/chat/completions"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert out.endswith("data: [DONE]\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in out.split("\n\n")[:-2]]
    assert len(events) > 3
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == expected


def test_errors_are_openais_before_the_first_byte(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4096") as caught:
        client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=4096, stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_plain_bodies(server: TorchServe) -> None:
    where = f"{server.urls.inference}/predictions/tiny"
    asked = {"text": "the cat", "parameters": {"max_tokens": 5, "temperature": 0}}
    whole = requests.post(where, json=asked, headers=server.headers(), timeout=60)
    assert whole.status_code == 200
    raw = requests.post(where, data=b"\xff\xfe", headers={**server.headers(), "Content-Type": "application/json"})
    assert raw.status_code == 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_blocks(server: TorchServe, stream: bool) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3500, "ignore_eos": True, "stream": stream}).encode()
    port = int(server.urls.inference.rpartition(":")[2])
    gone = []
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        head = f"POST /predictions/tiny/1.0/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        head += f"Content-Type: application/json\r\nAuthorization: {server.headers()['Authorization']}\r\n\r\n"
        connection.sendall(head.encode() + body)
        gone.append(connection)
    deadline = time.monotonic() + 10
    while stats(server)["running"] < 3:
        assert time.monotonic() < deadline
    for connection in gone:
        connection.close()
    assert rests(server, 4)  # two seconds, and a busy machine


def test_more_than_slots_and_queue_are_refused_at_once(server: TorchServe, client: openai.OpenAI) -> None:
    def ask(_: int) -> tuple[int, float]:
        start = time.monotonic()
        answer = requests.post(
            f"{url(server)}/v1/completions", headers=server.headers(), timeout=120,
            json={"prompt": "a", "max_tokens": 300, "ignore_eos": True, "temperature": 0},
        )  # fmt: skip
        return answer.status_code, time.monotonic() - start

    with ThreadPoolExecutor(3 * (SLOTS + QUEUE)) as pool:
        found = list(pool.map(ask, range(3 * (SLOTS + QUEUE))))
    refused = [took for status, took in found if status == 503]
    served = [took for status, took in found if status == 200]
    assert len(refused) + len(served) == len(found)
    assert len(served) >= SLOTS + QUEUE - 1
    assert refused
    assert sorted(refused)[len(refused) // 2] < max(served)
    assert rests(server, 4)


def test_metrics(server: TorchServe, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, temperature=0)
    time.sleep(2.5)
    text = requests.get(f"{server.urls.metrics}/metrics", timeout=10).text
    Snapshot.parse(text)
    for name in ("requests_total", "prompt_tokens_total", "generated_tokens_total", "cancelled_total", "running",
                 "waiting", "cache_used_ratio", "time_to_first_token_seconds_bucket"):  # fmt: skip
        assert f"batchserve_{name}{{" in text, name


def test_a_killed_worker_is_told_and_comes_back(server: TorchServe, client: openai.OpenAI, expected: str) -> None:
    worker = server.management.describe("tiny", "1.0").workers[0].pid
    failed: list[float] = []

    def ask(stream: bool) -> None:
        try:
            answer = client.completions.create(model="tiny", prompt="a", stream=stream, **LONG)
            for _ in answer if stream else ():
                pass
            failed.append(float("inf"))
        except Exception:  # noqa: BLE001 - however a client is told: before the head by status, after it by the connection
            failed.append(time.monotonic())

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while stats(server)["running"] < 2:
        assert time.monotonic() < deadline
    killed = time.monotonic()
    assert psutil.Process(worker).is_running()
    os.kill(worker, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert len(failed) == 2
    assert max(failed) - killed < 5
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            again = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=24, temperature=0)
            break
        except openai.APIError:
            time.sleep(0.5)
    assert again.choices[0].message.content == expected


def test_scale_refuses_another_count(server: TorchServe) -> None:
    done = subprocess.run(
        [*CLI, "scale", "tiny", "2", "--management", server.urls.management, "--token",
         server.headers("management")["Authorization"].removeprefix("Bearer ")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "1 worker" in done.stdout + done.stderr
