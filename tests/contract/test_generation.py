"""GenerationHandler through TorchServe's own loader and Service. Oracle: transformers' generate, one request alone."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.lib.service import Body
from tests.contract.conftest import Serve
from tests.contract.frontend import Frontend, events
from tests.generation_models import tiny_llama

CHAT, COMPLETIONS = "v1/chat/completions", "v1/completions"
GREEDY = {"temperature": 0}


class Oracle:
    """transformers alone."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory).eval()

    def ids(self, prompt: str | list[int], max_tokens: int, **options: Any) -> list[int]:
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        given = torch.tensor([ids])
        out = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=max_tokens, do_sample=False, **options
        )
        return out[0, len(ids) :].tolist()

    def text(self, prompt: str, max_tokens: int, **options: Any) -> str:
        return self.tokenizer.decode(self.ids(prompt, max_tokens, **options), skip_special_tokens=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


Start = Callable[..., Frontend]


@pytest.fixture(scope="module")
def start(serve: Serve) -> Any:
    """start(model directory, **handler settings) → Frontend; its engine ends with the module."""
    made = []

    def make(model: Path, **settings: Any) -> Frontend:
        defaults = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 48, "threads": 1}
        served = serve(model, handler="handlers.generation.handler", task="generation", **(defaults | settings))
        made.append(Frontend(served.service))
        return made[-1]

    yield make
    for frontend in made:
        frontend.handler.engine.stop()


@pytest.fixture(scope="module")
def frontend(start: Start, directory: Path) -> Frontend:
    return start(directory)


def prompts(count: int, seed: int) -> list[tuple[str, int]]:
    """Prompts with the tokens to generate, of mixed lengths."""
    chosen = random.Random(seed)
    words = ["the", "cat", "dog", "house", "plays", "guitar", "über", "漢字", "x", "12", "🦙", "--", "red"]
    return [
        (" ".join(chosen.choices(words, k=chosen.choice([1, 2, 5, 12, 22]))), chosen.choice([1, 3, 12, 30, 48]))
        for _ in range(count)
    ]


@pytest.mark.parametrize("blocks", [96, 11])
@pytest.mark.parametrize("stream", [False, True])
def test_equals_generate_whoever_joins_when(
    start: Start, directory: Path, oracle: Oracle, blocks: int, stream: bool
) -> None:
    frontend = start(directory, num_blocks=blocks)
    chosen = random.Random(blocks)
    asked = {}
    for prompt, count in prompts(24, seed=blocks + stream):
        body = {"prompt": prompt, "max_tokens": count, "stream": stream, **GREEDY}
        asked[frontend.send(body, COMPLETIONS)] = prompt, count
        for _ in range(chosen.choice([0, 1, 4])):
            frontend.call()
    frontend.run()
    for id, (prompt, count) in asked.items():
        answer = frontend.answers[id]
        assert answer.status == 200
        found = "".join(e["choices"][0]["text"] for e in events(answer)) if stream else text_of(answer)
        assert found == oracle.text(prompt, count)
    assert frontend.at_rest()
    if blocks == 11:
        assert frontend.handler.engine.stats().preemptions > 0


def text_of(answer: Any) -> str:
    assert answer.status == 200, answer.body
    choice = answer.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_chat_equals_generate_on_the_templates_text(frontend: Frontend, oracle: Oracle) -> None:
    messages = [
        {"role": "system", "content": "the red house"},
        {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]},
    ]
    answer = frontend.ask({"messages": messages, "max_tokens": 20, "model": "any", **GREEDY}, route=CHAT)[0]
    flat = [messages[0], {"role": "user", "content": "hello world"}]
    ids = oracle.tokenizer.apply_chat_template(flat, add_generation_prompt=True)["input_ids"]
    expected = oracle.ids(ids, 20)
    assert text_of(answer) == oracle.tokenizer.decode(expected, skip_special_tokens=True)
    body = answer.json()
    assert body["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": len(expected), "total_tokens": len(ids) + len(expected)
    }  # fmt: skip
    assert body["choices"][0]["finish_reason"] == ("stop" if expected[-1] == 2 else "length")
    assert body["object"] == "chat.completion"


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_transformers_own(frontend: Frontend, oracle: Oracle, penalty: float) -> None:
    body = {"prompt": "the cat the cat", "max_tokens": 40, "repetition_penalty": penalty, **GREEDY}
    expected = oracle.text("the cat the cat", 40, repetition_penalty=penalty)
    assert expected != oracle.text("the cat the cat", 40)
    assert text_of(frontend.ask(body, route=COMPLETIONS)[0]) == expected


def test_logit_bias_and_min_tokens_are_transformers_own(frontend: Frontend, oracle: Oracle) -> None:
    # an end that comes at once, but for min_tokens
    body = {"prompt": "hello", "max_tokens": 30, "logit_bias": {"2": 100}, **GREEDY}
    bias = {"sequence_bias": [[[2], 100.0]]}
    ended, held = frontend.ask(body, {**body, "min_tokens": 7}, route=COMPLETIONS)
    assert ended.json()["usage"]["completion_tokens"] == 1
    assert ended.json()["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    expected = oracle.ids("hello", 30, min_new_tokens=7, **bias)
    assert held.json()["usage"]["completion_tokens"] == len(expected) == 8
    assert text_of(held) == oracle.tokenizer.decode(expected, skip_special_tokens=True)


def test_presence_and_frequency_penalties(frontend: Frontend, oracle: Oracle) -> None:
    """The oracle: OpenAI's formula, computed step by step on the model's own logits."""
    body = {"prompt": "the dog", "max_tokens": 25, "presence_penalty": 1.5, "frequency_penalty": 0.7, **GREEDY}
    ids = oracle.tokenizer("the dog")["input_ids"]
    counts = torch.zeros(oracle.model.config.vocab_size)
    made: list[int] = []
    with torch.inference_mode():
        while len(made) < 25 and made[-1:] != [2]:
            logits = oracle.model(torch.tensor([ids + made])).logits[0, -1]
            made.append(int((logits - 1.5 * (counts > 0) - 0.7 * counts).argmax()))
            counts[made[-1]] += 1
    assert text_of(frontend.ask(body, route=COMPLETIONS)[0]) == oracle.tokenizer.decode(made, skip_special_tokens=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_is_never_seen(frontend: Frontend, oracle: Oracle, stream: bool) -> None:
    whole = oracle.text("a man", 60)
    stop = whole[17:22]  # more than one token
    expected = whole[: whole.index(stop)]
    body = {"prompt": "a man", "max_tokens": 60, "stop": [stop, "never there"], "stream": stream, **GREEDY}
    answer = frontend.ask(body, route=COMPLETIONS)[0]
    if stream:
        pieces = events(answer)
        shown = [piece["choices"][0]["text"] for piece in pieces]
        assert "".join(shown) == expected
        finish = pieces[-1]["choices"][0]["finish_reason"]
    else:
        assert text_of(answer) == expected
        finish = answer.json()["choices"][0]["finish_reason"]
    assert finish == "stop"
    assert frontend.at_rest()


def test_the_same_seed_gives_the_same_text_in_any_company(frontend: Frontend) -> None:
    body = {"prompt": "the woman", "max_tokens": 30, "seed": 7, "temperature": 1.3, "top_p": 0.9, "n": 2}
    alone = frontend.ask(body, route=COMPLETIONS)[0].json()["choices"]
    company = [{"prompt": "x" * (i + 1), "max_tokens": 25, "temperature": 2} for i in range(6)]
    answers = frontend.ask(*company[:3], body, *company[3:], {**body, "seed": 8}, route=COMPLETIONS)
    assert answers[3].json()["choices"] == alone
    assert answers[-1].json()["choices"] != alone
    assert alone[0]["text"] != alone[1]["text"]


def test_logprobs_are_the_models_own(frontend: Frontend, oracle: Oracle) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, "temperature": 0}
    ids = oracle.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    made = oracle.ids(ids, 5)
    with torch.inference_mode():
        logprobs = oracle.model(torch.tensor([ids + made])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    answer = frontend.ask(body, route=CHAT)[0].json()["choices"][0]["logprobs"]["content"]
    assert len(answer) == len(made)
    for entry, token, row in zip(answer, made, logprobs, strict=True):
        assert entry["token"] == oracle.tokenizer.decode([token])
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [top["token"] for top in entry["top_logprobs"]] == [oracle.tokenizer.decode([i]) for i in best.indices]
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    completion = frontend.ask({"prompt": "hello", "max_tokens": 4, "logprobs": 2, **GREEDY}, route=COMPLETIONS)[0]
    found = completion.json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 4
    assert all(len(top) == 2 for top in found["top_logprobs"])


def test_several_prompts_and_answers_keep_their_order(frontend: Frontend, oracle: Oracle) -> None:
    asked = ["the cat", "hello world"]
    body = {"prompt": asked, "n": 2, "max_tokens": 12, **GREEDY}
    choices = frontend.ask(body, route=COMPLETIONS)[0].json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [oracle.text(p, 12) for p in asked for _ in range(2)]
    ids = [oracle.tokenizer(p)["input_ids"] for p in asked]
    assert frontend.ask({**body, "prompt": ids}, route=COMPLETIONS)[0].json()["choices"] == choices


def test_a_stream_ends_with_its_usage_when_that_is_asked_for(frontend: Frontend) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "ignore_eos": True, **GREEDY}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    streamed, whole = frontend.ask(asked, body, route=CHAT)
    found = events(streamed)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole.json()["usage"]
    assert all(event["usage"] is None for event in found[:-1])
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in found[:-1]) == text_of(whole)
    assert streamed.content_type == "text/event-stream; charset=utf-8"
    assert whole.json()["usage"]["completion_tokens"] == 6


def test_plain_shapes(frontend: Frontend, oracle: Oracle) -> None:
    expected = oracle.text("the cat", 9)
    parameters = {"max_new_tokens": 9, "do_sample": False}
    prompt, text, inputs, flat = frontend.ask(
        {"prompt": "the cat", "parameters": {"max_tokens": 9, **GREEDY}},
        {"text": "the cat", "parameters": parameters},
        {"inputs": "the cat", "parameters": parameters},
        {"text": "the cat", "max_tokens": 9, **GREEDY},
    )
    assert prompt.json()["generated_text"] == text.json()["generated_text"] == expected
    assert flat.json() == prompt.json()
    assert inputs.json() == [{"generated_text": expected}]
    streamed = frontend.ask({"text": "the cat", "stream": True, "max_tokens": 9, **GREEDY})[0]
    assert "".join(event["text"] for event in events(streamed)) == expected
    raw = frontend.send(Body(b"the cat", "text/plain"))
    frontend.run()
    assert frontend.answers[raw].json()["usage"]["prompt_tokens"] == prompt.json()["usage"]["prompt_tokens"]


def test_max_tokens_is_what_fits_unless_it_is_said(frontend: Frontend) -> None:
    ids = [5] * 500
    answer = frontend.ask({"prompt": ids, "ignore_eos": True}, route=COMPLETIONS)[0].json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


BAD: list[tuple[str, Any, int, str | None]] = [
    (COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 13}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 512}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2**80}, 400, "prompt"),
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
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}, 400,
     "response_format"),
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


def test_models_and_description(frontend: Frontend) -> None:
    listed, one = frontend.send({}, "v1/models"), frontend.send({}, "v1/models/tiny")
    described, asked = frontend.describe(), frontend.send({}, "describe")
    frontend.run()
    assert frontend.answers[described].body == frontend.answers[asked].body
    assert frontend.answers[listed].json()["data"][0] == frontend.answers[one].json()
    assert frontend.answers[one].json()["id"] == "tiny"
    card = frontend.answers[described].json()
    assert card["task"] == "generation"
    assert card["stats"]["running"] == 0


def test_no_chat_template(start: Start, tmp_path: Path) -> None:
    frontend = start(tiny_llama(tmp_path / "plain", template=None))
    chat, completion = frontend.send({"messages": [{"role": "user", "content": "a"}]}, CHAT), frontend.send("a")
    completion = frontend.send({"prompt": "a", "max_tokens": 2}, COMPLETIONS)
    frontend.run()
    assert frontend.answers[chat].status == 400
    assert frontend.answers[chat].json()["error"]["code"] == "no_chat_template"
    assert frontend.answers[completion].status == 200


def test_a_client_that_leaves_frees_its_blocks(frontend: Frontend) -> None:
    left = [frontend.send({"prompt": "a b c", "ignore_eos": True, "n": 2}, COMPLETIONS) for _ in range(3)]
    stays = frontend.send({"prompt": "the", "max_tokens": 60, "ignore_eos": True}, COMPLETIONS)
    for _ in range(3):
        frontend.call()
    assert frontend.handler.engine.stats().running > 1
    for id in left:
        frontend.leave(id)
    frontend.run()
    assert frontend.answers[stays].status == 200
    assert frontend.at_rest()


def test_what_no_call_renews_is_dropped_and_told_so(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = frontend.handler.engine._choose

    def slowly(logits: torch.Tensor, ids: list[str]) -> list[int]:
        time.sleep(0.02)
        return choose(logits, ids)

    monkeypatch.setattr(frontend.handler.engine._manager, "_choose", slowly)
    id = frontend.send({"prompt": "a", "ignore_eos": True}, COMPLETIONS)
    while not frontend.handler.engine.stats().running:
        frontend.call()
    assert frontend.at_rest(seconds=2)
    frontend.run()
    assert frontend.answers[id].status == 503
    assert frontend.answers[id].json()["error"]["code"] == "dropped"


def test_a_failed_engine_is_told_and_replaced(start: Start, directory: Path, oracle: Oracle) -> None:
    frontend = start(directory)
    body = {"prompt": "the cat", "max_tokens": 480, "ignore_eos": True, **GREEDY}
    engine = frontend.handler.engine

    def broken(*_: Any) -> Any:
        raise RuntimeError("secret text")

    open_ones = [frontend.send(body, COMPLETIONS) for _ in range(2)]
    streamed = frontend.send({**body, "stream": True}, COMPLETIONS)
    while len(frontend.pieces[streamed]) < 2:
        frontend.call()
    engine._manager._choose = broken
    frontend.run()
    for id in open_ones:
        assert frontend.answers[id].status == 503
        assert frontend.answers[id].json()["error"]["code"] == "engine_failure"
        assert frontend.answers[id].headers["Retry-After"] == "1"
    assert events(frontend.answers[streamed])[-1]["error"]["code"] == "engine_failure"
    again = {"prompt": "the cat", "max_tokens": 8, **GREEDY}
    assert text_of(frontend.ask(again, route=COMPLETIONS)[0]) == oracle.text("the cat", 8)
    assert engine.stats().rebuilds == 1
    assert frontend.at_rest()


def test_logits_that_are_not_finite_fail_their_request_alone(
    start: Start, directory: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = start(directory)
    engine = frontend.handler.engine
    choose = engine._choose

    def poisoned(logits: torch.Tensor, ids: list[str]) -> list[int]:
        for row, id in enumerate(ids):
            if len(engine._chains[id].sequence.prompt) == 7:
                logits[row] = float("nan")
        return choose(logits, ids)

    monkeypatch.setattr(engine._manager, "_choose", poisoned)
    bad = frontend.send({"prompt": [5] * 7}, COMPLETIONS)
    good = frontend.send({"prompt": "the cat", "max_tokens": 12, **GREEDY}, COMPLETIONS)
    frontend.run()
    assert frontend.answers[bad].status == 500
    assert text_of(frontend.answers[good]) == oracle.text("the cat", 12)
    assert frontend.at_rest()


def test_shared_beginnings_are_computed_once(start: Start, directory: Path, oracle: Oracle) -> None:
    shared = "the cat plays guitar " * 12
    for sharing in (True, False):
        frontend = start(directory, prefix_sharing=sharing)
        first = frontend.ask({"prompt": shared + "a", "max_tokens": 4, **GREEDY}, route=COMPLETIONS)[0]
        rest = frontend.ask(*({"prompt": shared + end, "max_tokens": 4, **GREEDY} for end in "bcd"), route=COMPLETIONS)
        for end, answer in zip("abcd", [first, *rest], strict=True):
            assert text_of(answer) == oracle.text(shared + end, 4)
        assert (frontend.handler.engine.stats().prefix_tokens > 100) == sharing


def test_a_lower_priority_number_goes_first(start: Start, directory: Path) -> None:
    frontend = start(directory, num_blocks=4, max_model_len=64)  # one at a time
    running = frontend.send({"prompt": [5] * 4, "max_tokens": 58, "ignore_eos": True}, COMPLETIONS)
    while not frontend.handler.engine.stats().running:
        frontend.call()
    body = {"prompt": [6] * 50, "max_tokens": 10, "ignore_eos": True}
    late, soon = (frontend.send({**body, "priority": priority}, COMPLETIONS) for priority in (5, -5))
    done: list[str] = []
    while len(done) < 3:
        frontend.call()
        done += [id for id in frontend.answers if id not in done]
    assert done.index(soon) < done.index(late)
    assert running in done


@pytest.mark.parametrize("family", ["Qwen2", "Mistral", "GPT2", "Gemma2", "Qwen3"])
def test_families(start: Start, tmp_path: Path, family: str) -> None:
    changes: dict[str, Any] = {"head_dim": 8} if family in ("Gemma2", "Qwen3") else {}
    if family in ("Mistral", "Gemma2"):
        changes["sliding_window"] = 24
    directory = tiny_llama(tmp_path / family, family=family, **changes)
    frontend, oracle = start(directory), Oracle(directory)
    asked = prompts(6, seed=1)
    answers = frontend.ask(
        *({"prompt": prompt, "max_tokens": count, **GREEDY} for prompt, count in asked), route=COMPLETIONS
    )
    for (prompt, count), answer in zip(asked, answers, strict=True):
        assert text_of(answer) == oracle.text(prompt, count)


def test_two_hundred_mixed_requests_a_third_of_which_leave(start: Start, directory: Path, oracle: Oracle) -> None:
    frontend = start(directory, num_blocks=24, max_model_len=128)
    chosen = random.Random(0)
    expected: dict[str, tuple[str, int]] = {}
    bad, leaving = [], []
    for prompt, count in prompts(200, seed=3):
        kind = chosen.random()
        body = {"prompt": prompt, "max_tokens": count, **GREEDY}
        if kind < 0.34:
            leaving.append(frontend.send({**body, "stream": True, "max_tokens": 60, "ignore_eos": True}, COMPLETIONS))
        elif kind < 0.44:
            bad.append(frontend.send({**body, "temperature": -1}, COMPLETIONS))
        else:
            expected[frontend.send({**body, "stream": kind < 0.7}, COMPLETIONS)] = prompt, count
        if chosen.random() < 0.3:
            frontend.call()
        if leaving and chosen.random() < 0.3:
            frontend.leave(leaving.pop(chosen.randrange(len(leaving))))
    for id in leaving:
        frontend.leave(id)
    started = time.monotonic()
    frontend.run(120)
    assert all(frontend.answers[id].status == 400 for id in bad)
    texts: dict[tuple[str, int], str] = {}
    for id, asked in expected.items():
        answer = frontend.answers[id]
        text = texts.setdefault(asked, oracle.text(*asked))
        streamed = answer.content_type != "application/json"
        assert ("".join(e["choices"][0]["text"] for e in events(answer)) if streamed else text_of(answer)) == text, (
            asked
        )
    assert frontend.at_rest(), (frontend.handler.engine.stats(), time.monotonic() - started)
    assert not frontend.handler._exchanges
    assert not frontend.handler.engine._chains


def test_nothing_of_a_text_is_logged(frontend: Frontend, caplog: pytest.LogCaptureFixture) -> None:
    frontend.ask({"prompt": "Geheimnis", "max_tokens": 2}, {"prompt": "Geheimnis", "stop": 5}, route=COMPLETIONS)
    frontend.ask(json.loads('{"messages": [{"role": "user", "content": "Geheimnis"}], "n": "x"}'), route=CHAT)
    assert "Geheimnis" not in caplog.text
