"""The clients that people have, unmodified, and too many of them. Oracle: transformers' generate on its own."""

import asyncio
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests

from scripts.lib.server import TorchServe
from tests.e2e.conftest import CLI
from tests.e2e.generation.conftest import NAME, Start, rests, url
from tests.generation_models import Oracle

CHAT = [{"role": "user", "content": "the cat plays"}]
PROMPT = "the cat plays guitar"
SLOTS, QUEUE = 2, 4
OPTIONS: dict[str, Any] = {"model": NAME, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server(start: Start) -> TorchServe:
    return start(SLOTS, QUEUE, cache_gib=0.01)


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> str:
    """What the model says to CHAT."""
    return oracle.text(oracle.chat(CHAT), 24)


@pytest.fixture(scope="module")
def completed(oracle: Oracle) -> str:
    """How the model goes on after PROMPT."""
    return oracle.text(PROMPT, 24)


def test_the_openai_client(client: openai.OpenAI, expected: str, completed: str) -> None:
    whole = client.chat.completions.create(messages=CHAT, **OPTIONS)
    assert whole.choices[0].message.content == expected
    assert whole.usage is not None
    stream = client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **OPTIONS
    )
    events = list(stream)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == expected
    assert events[-1].usage == whole.usage
    completion = client.completions.create(prompt=PROMPT, logprobs=1, **OPTIONS)
    assert completion.choices[0].text == completed
    assert completion.choices[0].logprobs is not None
    pieces = client.completions.create(prompt=PROMPT, stream=True, **OPTIONS)
    assert "".join(piece.choices[0].text for piece in pieces) == completed
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_the_async_openai_client(client: openai.OpenAI, expected: str, completed: str) -> None:
    async def ask() -> None:
        made = openai.AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key, max_retries=0, timeout=60)
        async with made:
            chat, completions = made.chat.completions, made.completions

            async def streamed() -> str:
                stream = await chat.create(messages=CHAT, stream=True, **OPTIONS)
                return "".join([event.choices[0].delta.content or "" async for event in stream])

            async def whole() -> str:
                return (await chat.create(messages=CHAT, **OPTIONS)).choices[0].message.content or ""

            async def pieces() -> str:
                stream = await completions.create(prompt=PROMPT, stream=True, **OPTIONS)
                return "".join([event.choices[0].text async for event in stream])

            async def text() -> str:
                return (await completions.create(prompt=PROMPT, **OPTIONS)).choices[0].text

            ways = [streamed, whole, pieces, text]
            assert await asyncio.gather(*(way() for way in ways)) == [expected, expected, completed, completed]

    asyncio.run(ask())


def test_curl_shows_the_stream_as_it_comes(server: TorchServe, oracle: Oracle) -> None:
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True}
    started = time.monotonic()
    with subprocess.Popen(
        ["curl", "-sN", "-H", f"Authorization: {server.headers()['Authorization']}", "-H",
         "Content-Type: application/json", "-d", json.dumps(body), f"{url(server)}/v1/completions"],
        stdout=subprocess.PIPE, text=True,
    ) as curl:  # fmt: skip
        assert curl.stdout is not None
        lines = [curl.stdout.readline()]
        first = time.monotonic() - started
        lines += curl.stdout
        last = time.monotonic() - started
    assert curl.returncode == 0
    assert first < last / 2
    assert lines[-2:] == ["data: [DONE]\n", "\n"]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2:2]]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == oracle.text("a", 300, eos_token_id=-1)


def test_errors_are_openais_before_the_first_byte(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4096") as caught:
        client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=4096, stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=NAME, messages=[])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="a")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_more_than_slots_and_queue_are_refused_at_once(server: TorchServe, oracle: Oracle) -> None:
    def ask(_: int) -> tuple[requests.Response, float]:
        begun = time.monotonic()
        body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        answer = requests.post(f"{url(server)}/v1/completions", headers=server.headers(), timeout=120, json=body)
        return answer, time.monotonic() - begun

    with ThreadPoolExecutor(3 * (SLOTS + QUEUE)) as pool:
        found = list(pool.map(ask, range(3 * (SLOTS + QUEUE))))
    refused = [took for answer, took in found if answer.status_code == 503]
    served = [took for answer, took in found if answer.status_code == 200]
    assert len(served) + len(refused) == len(found)
    assert QUEUE < len(served) <= SLOTS + QUEUE
    assert max(refused) < min(served), "they waited for those that ran"
    text = oracle.text("a", 300, eos_token_id=-1)
    assert all(a.json()["choices"][0]["text"] == text for a, _ in found if a.status_code == 200)
    assert rests(server, 4)


def test_helpers_of_the_worker_wait_no_longer_than_is_good(server: TorchServe) -> None:
    worker = server.management.describe(NAME, "1.0").workers[0].pid
    assert psutil.Process(worker).environ()["GOMP_SPINCOUNT"] == "2000"


def test_plain_bodies(server: TorchServe, oracle: Oracle) -> None:
    where = f"{server.urls.inference}/predictions/{NAME}"
    asked = {"text": "the cat", "parameters": {"max_tokens": 5, "temperature": 0}}
    whole = requests.post(where, json=asked, headers=server.headers(), timeout=60)
    assert whole.json()["generated_text"] == oracle.text("the cat", 5)
    raw = requests.post(where, data=b"\xff\xfe", headers={**server.headers(), "Content-Type": "application/json"})
    assert raw.status_code == 400


def test_another_number_of_workers_is_refused_with_what_several_devices_need(
    server: TorchServe, tmp_path: Path
) -> None:
    token = server.headers("management")["Authorization"].removeprefix("Bearer ")
    scale = [*CLI, "scale", NAME, "2", "--management", server.urls.management, "--token", token]
    serving = tmp_path / "serving.yaml"
    model = {"archive": f"{NAME}.mar", "version": "1.0", "workers": 2}
    serving.write_text(json.dumps({"server": {"model_store": str(server.model_store)}, "models": {NAME: model}}))
    configure = [*CLI, "configure", "--serving", str(serving), "--output", str(tmp_path / "config.properties")]
    for command in (scale, configure):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode != 0
        assert "one worker: a second one would hold the queue and stall the first one's streams" in said
        assert "several devices declare an entry for each, or build with --engine vllm" in said
    assert not (tmp_path / "config.properties").exists()
