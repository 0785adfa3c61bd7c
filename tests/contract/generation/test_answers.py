"""GenerationHandler's answers: shapes, log-probabilities, usage, models. Oracle: transformers' generate and logits."""

import pytest
import torch

from scripts.lib.service import Body
from tests.contract.frontend import CHAT, COMPLETIONS, GREEDY, Frontend, events, text_of
from tests.generation_models import Oracle


def test_logprobs_are_the_models_own(frontend: Frontend, oracle: Oracle) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, "temperature": 0}
    ids = oracle.chat(messages)
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
