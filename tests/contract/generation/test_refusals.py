"""What GenerationHandler refuses: the request at fault alone, before the first byte, in the client's own form."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.service import Body
from tests.contract.frontend import CHAT, COMPLETIONS, GREEDY, Frontend, text_of
from tests.contract.generation.conftest import Start
from tests.generation_models import Oracle, tiny_llama

BAD: list[tuple[str, Any, int, str | None]] = [
    (COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 13}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 512}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2**60}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2**80}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x" * 100_000}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [10**6]}, 400, "prompt[0]"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt[0]"),
    (COMPLETIONS, {"prompt": ["a", 5]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "\ud800"}, 400, "prompt"),
    (COMPLETIONS, {"messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 6}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "echo": True}, 400, "echo"),
    (COMPLETIONS, {"prompt": ["a"] * 20, "n": 20}, 400, "n"),
    (CHAT, {}, 400, "messages"),
    (CHAT, [], 400, None),
    (CHAT, "text", 400, None),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "a"}, 400, "messages"),
    (CHAT, {"messages": ["a"]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "cat", "content": "a"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs"),
    ("", {"text": "a", "prompt": "b"}, 400, "text"),
    ("", {"text": "a", "n": 2}, 400, "n"),
    ("", {"text": "a", "parameters": {"top_p": 0.5}, "top_p": 0.5}, 400, "top_p"),
    ("", {"text": "a", "parameters": 5}, 400, "parameters"),
    ("v1/embeddings", {"input": "a"}, 404, None),
    ("v1/models/other", {}, 404, "model"),
]  # fmt: skip
for name, values in {
    "temperature": [-0.1, 2.1, "hot", True, float("nan"), [1]],
    "top_p": [-0.1, 1.1],
    "top_k": [-2, 1.5],
    "seed": [1.5, 2**70, "x"],
    "presence_penalty": [-2.1, 3],
    "frequency_penalty": [3],
    "repetition_penalty": [0, -1, 11],
    "logit_bias": [5, {"x": 1}, {"5": 101}, {"5": "a"}, {"999999": 1}, {"5": float("inf")}],
    "max_tokens": [0, -1, "5", 1.5],
    "min_tokens": [-1],
    "stop": ["", [""], ["a"] * 5, 5, [5], "x" * 2000],
    "n": [0, 129],
    "stream": ["yes"],
    "ignore_eos": [1],
    "priority": [0.5],
    "stream_options": [{"include_usage": True}, 5],
    "temprature": [1],
    "best_of": [2, True],
}.items():
    BAD += [(COMPLETIONS, {"prompt": "a", name: value}, 400, name) for value in values]


def test_a_bad_request_is_refused_and_its_neighbours_are_not(frontend: Frontend, oracle: Oracle) -> None:
    expected = oracle.text("hello world", 10)
    good = [frontend.send({"prompt": "hello world", "max_tokens": 10, **GREEDY}, COMPLETIONS) for _ in range(3)]
    bad = [frontend.send(body, route) for route, body, _, _ in BAD]
    frontend.run()
    for id, (route, body, status, param) in zip(bad, BAD, strict=True):
        answer = frontend.answers[id]
        assert answer.status == status, (route, body, answer.body)
        error = answer.json()["error"] if route.startswith("v1") else answer.json()
        assert error["param"] == param, (route, body, error)
        assert answer.body.isascii()
    assert all(text_of(frontend.answers[id]) == expected for id in good)
    said = frontend.answers[bad[0]].json()["error"]["message"]
    assert "500" in said
    assert "13" in said
    assert "512" in said
    assert frontend.at_rest()


@pytest.mark.parametrize(
    "body",
    [
        Body(b"{", headers={"url_path": CHAT}),
        Body(b"", headers={"url_path": CHAT}),
        Body(b"\xff\xfe\xfa", "application/json"),
        Body(b"[" * 100_000),
        Body(b'{"a": 1}', "application/x-www-form-urlencoded", name='{"text": "a"}'),
        Body(b"null"),
        Body(b"5"),
    ],
)
def test_bodies_that_are_none(frontend: Frontend, body: Body) -> None:
    id = frontend.send(body)
    frontend.run()
    assert frontend.answers[id].status == 400


def test_no_chat_template(start: Start, tmp_path: Path) -> None:
    frontend = start(tiny_llama(tmp_path / "plain", template=None))
    chat, completion = frontend.send({"messages": [{"role": "user", "content": "a"}]}, CHAT), frontend.send("a")
    completion = frontend.send({"prompt": "a", "max_tokens": 2}, COMPLETIONS)
    frontend.run()
    assert frontend.answers[chat].status == 400
    assert frontend.answers[chat].json()["error"]["code"] == "no_chat_template"
    assert frontend.answers[completion].status == 200


def test_nothing_of_a_text_is_logged(frontend: Frontend, caplog: pytest.LogCaptureFixture) -> None:
    frontend.ask({"prompt": "Geheimnis", "max_tokens": 2}, {"prompt": "Geheimnis", "stop": 5}, route=COMPLETIONS)
    frontend.ask(json.loads('{"messages": [{"role": "user", "content": "Geheimnis"}], "n": "x"}'), route=CHAT)
    assert "Geheimnis" not in caplog.text
