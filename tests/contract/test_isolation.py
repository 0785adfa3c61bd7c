"""What may not go wrong in a batch: memory, time, numbers, clients' headers, logs; through TorchServe's own Service."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from handlers.metrics import HANDLER_TIME
from handlers.serialise import dumps
from scripts.lib.service import Answer, Body
from tests.contract.conftest import MIXED, SETTINGS, Serve, Served, assert_close, vectors


def test_too_much_work_is_refused_before_it_is_begun(serve: Serve, tiny_model: Path) -> None:
    served = serve(tiny_model, **SETTINGS, response_timeout=10)
    served.handler.model.costs = type(served.handler.model.costs)(
        seconds_per_token=0.1, launch_cost=0
    )  # 7 s = 70 tokens
    small, large, crowded = served.ask(
        {"texts": ["the cat"] * 10}, {"texts": ["the cat"] * 20}, {"texts": ["the cat"] * 9}
    )
    assert small.status == 200
    assert (large.status, large.json()["code"]) == (413, "too_much_work")
    assert "at most about 70 like these" in large.json()["message"]
    assert (crowded.status, crowded.headers["Retry-After"]) == (503, "1")


def test_text_that_would_take_too_long_to_tokenise_is_refused(serve: Serve, tiny_model: Path) -> None:
    served = serve(tiny_model, **SETTINGS)
    begun = time.monotonic()
    long, many, prompted, fine = served.ask(
        {"text": "." * 1_000_001},
        {"texts": ["a", "." * 1_000_001]},
        {"texts": ["a"] * 1000, "prompt": "a" * 300_000},
        {"text": "the cat"},
    )
    assert (long.status, long.json()["param"]) == (413, "text")
    assert (many.status, many.json()["param"], many.json()["code"]) == (413, "texts[1]", "text_too_long")
    assert (prompted.status, prompted.json()["code"]) == (413, "too_large")
    assert fine.status == 200
    assert time.monotonic() - begun < 20


def test_a_batch_with_too_much_text_is_tokenised_in_order_of_arrival(
    serve: Serve, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(tiny_model, **SETTINGS, response_timeout=10)
    tokens = served.handler.model.tokens
    whole = tokens.encode

    def slow(texts: Any) -> Any:
        if texts and len(texts[0]) > 100_000:
            time.sleep(2.1)
        return whole(texts)

    monkeypatch.setattr(tokens, "encode", slow)
    first, second, third = served.ask({"text": "a" * 600_000}, {"text": "a" * 600_000}, {"text": "the cat"})
    assert (first.status, second.status) == (200, 200), "tokenised together"
    assert (third.status, third.headers["Retry-After"]) == (503, "1")


def test_a_subclass_whose_prompt_fails_on_one_request_fails_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompt(request: Any) -> str:
        return {"the cat": ""}[request.items[0]]

    monkeypatch.setattr(served.handler, "prompt", prompt)
    fine, broken = served.ask({"text": "the cat"}, {"text": "a dog"})
    assert (fine.status, broken.status, broken.json()["code"]) == (200, 500, "handler_failure")


class PanicException(BaseException):
    """What the tokenizers library raises when its Rust code panics; the real one can't be made from Python."""


def test_a_tokenizer_that_panics_on_one_text_fails_that_request_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = served.handler.model.tokens
    whole = tokens.encode

    def encode(texts: Any) -> Any:
        if any(text.item == "a dog" for text in texts):
            raise PanicException("index out of bounds")
        return whole(texts)

    monkeypatch.setattr(tokens, "encode", encode)
    fine, broken, also = served.ask({"text": "the cat"}, {"text": "a dog"}, {"text": "the cat"})
    assert (fine.status, broken.status, also.status) == (200, 500, 200)
    assert broken.json()["code"] == "handler_failure"

    def stopped(texts: Any) -> Any:
        raise SystemExit(1)

    monkeypatch.setattr(tokens, "encode", stopped)
    with pytest.raises(SystemExit):
        served.ask({"text": "the cat"})


def test_an_unknown_route_is_404_whatever_the_body(served: Served) -> None:
    for body in (b"", b"{", b'{"input": "a"}'):
        answer = served.ask(Body(body, "application/json", headers={"url_path": "v1/models"}))[0]
        assert (answer.status, answer.json()["code"]) == (404, "unknown_route")


def test_predictions_follow_what_batches_take(serve: Serve, tiny_model: Path) -> None:
    served = serve(tiny_model, **SETTINGS)
    model = served.handler.model
    model.costs = type(model.costs)(seconds_per_token=0.01, launch_cost=0)
    for _ in range(30):
        served.ask({"texts": ["the cat"] * 10})
    assert model.costs.seconds_per_token < 0.005


def test_out_of_memory_costs_only_what_does_not_fit(serve: Serve, tiny_model: Path) -> None:
    served = serve(tiny_model, **SETTINGS)
    expected = vectors(served.ask({"texts": ["the cat", "a dog"]})[0])
    whole = served.handler.forward

    def forward(encodings: Sequence[Any], precise: bool) -> torch.Tensor:
        if sum(len(e) for e in encodings) > 9:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        result: torch.Tensor = whole(encodings, precise)
        return result

    served.handler.forward = forward
    timed: list[int] = []
    served.handler.metrics.observe = lambda name, value, times=1: timed.append(times) if name == HANDLER_TIME else None
    fine, huge, mixed = served.ask(
        {"texts": ["the cat", "a dog"]}, {"text": "a dog runs " * 5}, {"texts": ["the cat", "a dog runs " * 5]}
    )
    assert_close(vectors(fine), expected)
    assert (huge.status, huge.phrase) == (507, "Insufficient Storage")
    assert (mixed.status, mixed.json()["param"]) == (507, "texts[1]")
    assert timed == [1], "the time in the worker is of what was served"


def test_a_half_precision_overflow_is_mended_in_fp32(
    serve: Serve, tiny_model: Path, oracle: SentenceTransformer
) -> None:
    """One word is too large for fp16: its text is run again in fp32, its neighbours keep their answers."""
    served = serve(tiny_model, **SETTINGS, dtype="float16")
    word = oracle.tokenizer.convert_tokens_to_ids("guitar")

    def enlarge(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output + torch.where(args[0] == word, 1e5, 0.0)[..., None].to(output.dtype)

    served.handler.model.net.embeddings.word_embeddings.register_forward_hook(enlarge)
    texts = ["the cat", "a guitar plays", "a dog"]
    retries: list[int] = []
    count = served.handler.metrics.count
    served.handler.metrics.count = lambda name, value=1, label="": (
        retries.append(value) if "fp32" in name else None,
        count(name, value, label),
    )[1]
    found = vectors(served.ask({"texts": texts})[0])
    assert sum(retries) == 1
    assert np.isfinite(found).all()
    plain = vectors(served.ask({"texts": ["the cat", "a dog"]})[0])
    np.testing.assert_array_equal(found[[0, 2]], plain)
    assert served.handler.model.dtype == torch.float16
    assert next(served.handler.model.net.parameters()).dtype == torch.float16


def test_a_client_cannot_turn_the_batch_into_a_description(served: Served) -> None:
    """BaseHandler looks at the first row's headers only, and answers one row for all."""
    described, explained, plain = served.ask(
        Body(b'{"text": "the cat"}', headers={"describe": "True"}),
        Body(b'{"text": "the cat"}', headers={"explain": "True"}),
        {"text": "the cat"},
    )
    assert described.status == plain.status == 200
    assert described.body == plain.body
    assert explained.status == 400


def test_the_model_describes_itself(served: Served) -> None:
    from scripts.lib import service

    batch = [service._request([])]
    batch[0]["headers"] = [{"name": b"describe", "value": b"True"}]
    answer = service.answers(bytes(served.service.predict(batch)))[0][1]
    card = answer.json()
    assert (card["task"], card["dimensions"], card["attention"], card["max_tokens"]) == ("embedding", 32, "packed", 48)


def described(served: Served, **headers: str) -> tuple[Any, list[Answer]]:
    """A describe request's card, and what went out at once beside it."""
    from scripts.lib import service

    sent: list[bytes] = []

    class Socket:
        def sendall(self, message: bytes) -> None:
            sent.append(bytes(message))

    request = service._request([])
    request["headers"] = [{"name": k.encode(), "value": v.encode()} for k, v in {"describe": "True", **headers}.items()]
    served.service.set_cl_socket(Socket())
    answer = service.answers(bytes(served.service.predict([request])))[0][1]
    return answer.json(), [each for message in sent for _, each in service.answers(message)]


def test_a_named_worker_steps_aside(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    monkeypatch.setattr("handlers.parking.hold", held.append)
    card, early = described(served, **{"x-batchserve-park": f"1,{os.getpid()}", "x-batchserve-hold": "7"})
    assert held == [7.0]
    assert card["worker"] == early[0].json()["worker"] == {"pid": os.getpid(), "parked": True}
    assert early[0].headers["ts_stream_next"] == "true", "TorchServe gives it nothing else meanwhile"
    for headers in ({}, {"x-batchserve-park": "1,2"}, {"x-batchserve-park": ",".join(map(str, range(1, 40_000)))}):
        card, early = described(served, **headers)
        assert card["worker"] == {"pid": 0, "parked": False}, "who it is, is for the management API to tell"
        assert early == []
    assert held == [7.0]


def test_nothing_a_client_sent_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        served.ask({"text": "sesame"}, {"texts": ["sesame", 1]}, {"text": "sesame", "sesame": 1}, {"sesame": "sesame"})
    assert "sesame" not in caplog.text


def test_answers_are_strict_compact_json_without_orjson(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = served.ask({"texts": ["the cat", "☃"]})[0]
    monkeypatch.setattr("handlers.serialise.orjson", None)
    plain = served.ask({"texts": ["the cat", "☃"]})[0]
    np.testing.assert_array_equal(vectors(fast), vectors(plain))
    assert b" " not in plain.body
    assert dumps({"a": [1]}) == b'{"a":[1]}'


class TestMicroBatches:
    def test_a_small_budget_gives_the_same_answers(self, serve: Serve, tiny_model: Path, served: Served) -> None:
        small = serve(tiny_model, **SETTINGS, max_batch_tokens=16, max_batch_items=2)
        assert_close(vectors(small.ask({"texts": MIXED})[0]), vectors(served.ask({"texts": MIXED})[0]))

    def test_metrics_go_through_torchserves_cache(self, serve: Serve, tiny_model: Path, caplog: Any) -> None:
        served = serve(tiny_model, **SETTINGS)
        with caplog.at_level("INFO"):
            served.ask({"texts": ["the cat", "a dog " * 40]}, {"text": 3})
            served.handler.metrics.flush()
        lines = [record.getMessage() for record in caplog.records if "[METRICS]batchserve" in record.getMessage()]
        found = {line.split("[METRICS]")[1].split("|#hostname")[0] for line in lines}
        assert any(line.startswith("batchserve_tokens_total.Count:52|") for line in found), found
        assert any(line.startswith("batchserve_truncated_tokens_total.Count:34|") for line in found)
        assert any("batchserve_batch_size_bucket.Count:1|#model_name:tiny,le:2" in line for line in found)
        assert any("batchserve_errors_total.Count:1|#model_name:tiny,code:invalid_type" in line for line in found)
