"""Crowds, clients that leave, a worker that is killed. Oracle: transformers' generate on its own."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from scripts.lib.server import TorchServe
from tests.e2e.generation.conftest import NAME, Start, metrics, rests, running, url
from tests.generation_models import Oracle, prompts

SLOTS, QUEUE = 4, 200
GREEDY = {"temperature": 0}
LEAVE = ("leaves", "reads and leaves")


@pytest.fixture(scope="module")
def server(start: Start) -> TorchServe:
    """Its cache holds one of the longest sequences here at a time."""
    return start(SLOTS, QUEUE, page_size=16, num_blocks=40)


@dataclass(frozen=True)
class Asked:
    """One of many requests: what it is, its status and its text; None of what a client that left has not seen."""

    kind: str
    prompt: str
    count: int
    status: int | None
    text: str | None


async def crowd(server: TorchServe, count: int) -> list[Asked]:
    """So many clients at once: a third leaves, some send what is refused, the others read to the end.

    Of those that leave, half do it when they have read a part, the others at any time: in the queue or while they run.
    """
    chosen, pool = random.Random(1), prompts(20, seed=5)
    kinds = ["reads and leaves", "leaves"] * (count // 6) + ["bad"] * (count // 10)
    kinds += [chosen.choice(["whole", "stream"]) for _ in range(count - len(kinds))]
    chosen.shuffle(kinds)
    connector = aiohttp.TCPConnector(limit=0)

    async def one(kind: str, prompt: str, tokens: int, patience: float) -> Asked:
        stream = kind in ("stream", "reads and leaves")
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "stream": stream, **GREEDY}
        if kind == "bad":
            body["temperature"] = -1
        if kind in LEAVE:
            body |= {"max_tokens": 500, "ignore_eos": True}
        post = session.post(f"{url(server)}/v1/completions", json=body)
        if kind == "leaves":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience), post as response:
                    await response.read()
                raise AssertionError("it was to leave before its answer")
            return Asked(kind, prompt, tokens, None, None)
        async with post as response:
            if kind == "reads and leaves":
                assert await response.content.readany()
                response.close()
                return Asked(kind, prompt, tokens, response.status, None)
            content = await response.read()
        if kind == "bad":
            return Asked(kind, prompt, tokens, response.status, json.loads(content)["error"]["param"])
        return Asked(kind, prompt, tokens, response.status, _text(content, stream))

    async with aiohttp.ClientSession(connector=connector, headers=server.headers()) as session:
        return await asyncio.gather(*(one(kind, *chosen.choice(pool), 0.2 + chosen.random()) for kind in kinds))


def _text(content: bytes, stream: bool) -> str:
    if not stream:
        return str(json.loads(content)["choices"][0]["text"])
    *events, done, rest = content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


def test_two_hundred_mixed_requests_a_third_of_which_leave(
    server: TorchServe, client: openai.OpenAI, oracle: Oracle
) -> None:
    found = asyncio.run(crowd(server, 200))
    assert rests(server, 4)
    assert {(each.kind, each.status) for each in found} == {
        ("leaves", None), ("reads and leaves", 200), ("bad", 400), ("whole", 200), ("stream", 200)
    }  # fmt: skip
    texts: dict[tuple[str, int], str] = {}
    for each in found:
        if each.kind == "bad":
            assert each.text == "temperature"
        elif each.kind not in LEAVE:
            asked = each.prompt, each.count
            if asked not in texts:
                texts[asked] = oracle.text(*asked)
            assert each.text == texts[asked], each
    read, left = (sum(each.kind in kinds for each in found) for kinds in (LEAVE[1:], LEAVE))
    both = client.completions.create(  # two that the cache cannot hold to their end
        model=NAME, prompt=["a", "the cat"], max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in both.choices] == [
        oracle.text(prompt, 400, eos_token_id=-1) for prompt in ("a", "the cat")
    ]
    assert rests(server, 4)
    time.sleep(1.5)  # until the metrics are handed over
    now = metrics(server)
    values = {
        name: now.total(f"batchserve_{name}", NAME)
        for name in (
            "running", "waiting", "cache_used_ratio", "requests_total", "prompt_tokens_total", "generated_tokens_total",
            "preemptions_total", "prefix_tokens_total", "cancelled_total", "time_to_first_token_seconds_count",
            "time_per_token_seconds_count",
        )
    }  # fmt: skip
    assert values["running"] == values["waiting"] == values["cache_used_ratio"] == 0
    assert values["requests_total"] >= 200 - left + read  # of those that leave early the frontend forgets some
    assert values["prompt_tokens_total"] > 200
    assert values["generated_tokens_total"] > 1000
    assert values["preemptions_total"] > 0
    assert values["prefix_tokens_total"] > 0
    assert read <= values["cancelled_total"] <= left
    assert values["time_to_first_token_seconds_count"] > 100
    assert values["time_per_token_seconds_count"] > 100
    rebuilds = list(now.series("batchserve_engine_rebuilds_total", NAME))
    assert [value for _, value in rebuilds] == [0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_blocks(server: TorchServe, stream: bool) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": stream}).encode()
    port = int(server.urls.inference.rpartition(":")[2])
    gone = []
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        head = f"POST /predictions/{NAME}/1.0/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        head += f"Content-Type: application/json\r\nAuthorization: {server.headers()['Authorization']}\r\n\r\n"
        connection.sendall(head.encode() + body)
        gone.append(connection)
    running(server, 3)
    for connection in gone:
        connection.close()
    assert rests(server, 4)  # two seconds, and a busy machine


def test_a_killed_worker_is_told_and_comes_back(server: TorchServe, client: openai.OpenAI, oracle: Oracle) -> None:
    worker = server.management.describe(NAME, "1.0").workers[0].pid
    failed: list[float] = []

    def ask(stream: bool) -> None:
        try:
            answer = client.completions.create(
                model=NAME, prompt="a", stream=stream, max_tokens=600, extra_body={"ignore_eos": True}
            )
            for _ in answer if stream else ():
                pass
            failed.append(float("inf"))
        except Exception:  # noqa: BLE001 - however a client is told: before the head by status, after it by the connection
            failed.append(time.monotonic())

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    running(server, 2)
    killed = time.monotonic()
    assert psutil.Process(worker).is_running()
    os.kill(worker, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert len(failed) == 2
    assert max(failed) - killed < 5
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            again = client.completions.create(model=NAME, prompt="the cat", max_tokens=24, temperature=0)
            break
        except openai.APIError:
            time.sleep(0.5)
    assert again.choices[0].text == oracle.text("the cat", 24)
