"""response_format: answers follow a JSON schema, whatever else is asked; what cannot be followed is refused at once."""

import json
import time
from pathlib import Path
from typing import Any, Literal

import llguidance
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import LogitsProcessor

from handlers.generation import grammar, rules
from handlers.generation.grammar import Grammar
from tests.contract.frontend import CHAT, COMPLETIONS, GREEDY, Frontend, events, text_of
from tests.contract.generation.conftest import Start
from tests.generation_models import Oracle

MESSAGES = [{"role": "user", "content": "the red house"}]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Pet(Strict):
    kind: Literal["cat", "dog"]
    name: str = Field(max_length=8)


class Home(Strict):
    rooms: int = Field(ge=1, le=99)
    warm: bool
    pets: list[Pet] = Field(max_length=2)


SCHEMA = Home.model_json_schema()  # with $defs and $ref


def asked(schema: Any = SCHEMA, **options: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "home", "schema": schema, "strict": True}}
    return {"messages": MESSAGES, "response_format": form, **options}


class Allowed(LogitsProcessor):
    """The same rules on llguidance, for `generate`."""

    def __init__(self, oracle: Oracle, schema: Any, prompt: int) -> None:
        tokenizer = oracle.tokenizer.backend_tokenizer.to_str()
        known = llguidance.LLTokenizer(tokenizer, n_vocab=oracle.model.config.vocab_size, eos_token=[2])
        self._matcher = llguidance.LLMatcher(known, rules.json_answer(schema))
        self._prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in input_ids[0, self._prompt :].tolist()[-1:]:
            assert self._matcher.consume_token(token)
        bits = int.from_bytes(self._matcher.compute_bitmask(), "little")
        kept = torch.tensor([bool(bits >> i & 1) for i in range(scores.shape[1])])
        return scores.masked_fill(~kept, float("-inf"))


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_a_greedy_answer_is_generates_under_the_same_mask(frontend: Frontend, oracle: Oracle, penalty: float) -> None:
    ids = oracle.chat(MESSAGES)
    expected = oracle.text(ids, 400, logits_processor=[Allowed(oracle, SCHEMA, len(ids))], repetition_penalty=penalty)
    plain = {"messages": MESSAGES, "max_tokens": 20, **GREEDY}
    alone = text_of(frontend.ask(plain, route=CHAT)[0])
    options = {"max_tokens": 400, "repetition_penalty": penalty, **GREEDY}
    answers = frontend.ask(plain, asked(**options), plain, asked(stream=True, **options), route=CHAT)
    assert text_of(answers[1]) == text_of(answers[3]) == expected
    Home.model_validate_json(expected)
    assert answers[1].json()["choices"][0]["finish_reason"] == "stop"
    assert text_of(answers[0]) == text_of(answers[2]) == alone


def test_sampled_answers_follow_the_schema_with_everything_else(frontend: Frontend) -> None:
    some = {"temperature": 1.5, "n": 6, "logprobs": True, "top_logprobs": 2}
    every = {
        "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 60,
        "logit_bias": {"2": 50, "60": 5}, "top_p": 0.9, "top_k": 50, "stop": ["never there"],
    }  # fmt: skip
    answers = frontend.ask(asked(seed=1, **some), asked(seed=2, **some, **every), route=CHAT)
    for answer in answers:
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "stop"
            Home.model_validate_json(choice["message"]["content"])
    held = frontend.ask(asked({"enum": ["cat"]}, min_tokens=30, **GREEDY), route=CHAT)[0].json()
    assert held["choices"][0]["message"]["content"] == '"cat"'  # it can go on no more
    assert frontend.at_rest()


def test_any_object_on_every_road(frontend: Frontend) -> None:
    form, options = {"type": "json_object"}, {"temperature": 1, "seed": 3, "logit_bias": {str(i): 9 for i in (94, 96)}}
    chat = frontend.ask({"messages": MESSAGES, "response_format": form, **options}, route=CHAT)[0]
    completion = frontend.ask({"prompt": "the cat", "response_format": form, **options}, route=COMPLETIONS)[0]
    plain = frontend.ask({"text": "the cat", "parameters": {"response_format": form, **options}})[0]
    for text, finish in (
        (text_of(chat), chat.json()["choices"][0]["finish_reason"]),
        (text_of(completion), completion.json()["choices"][0]["finish_reason"]),
        (plain.json()["generated_text"], plain.json()["finish_reason"]),
    ):
        assert text.startswith("{")
        if finish == "stop":
            assert isinstance(json.loads(text), dict)


def test_max_tokens_cuts(frontend: Frontend) -> None:
    whole, streamed = frontend.ask(
        asked(max_tokens=3, **GREEDY), asked(max_tokens=3, stream=True, **GREEDY), route=CHAT
    )
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert events(streamed)[-1]["choices"][0]["finish_reason"] == "length"


def deep(levels: int) -> dict[str, Any]:
    """A chain of references that overflows the stack of whoever follows it."""
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(levels)
    }
    return {"$defs": {**links, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


CHOICES = {"anyOf": [{"type": "object", "properties": {key: {"type": "string"}}} for key in "ab"]}
FORM = "response_format"
BAD: list[tuple[dict[str, Any], str]] = [
    (asked({"type": "objekt"}), FORM),
    (asked({"not": {"type": "string"}}), FORM),
    (asked({"type": "array", "uniqueItems": True}), FORM),
    (asked({"type": "string", "pattern": "(?=a)b"}), FORM),
    (asked({"$ref": "#/$defs/none"}), FORM),
    (asked({"$ref": "http://example.com/schema"}), FORM),
    (asked({"enum": []}), FORM),
    (asked(deep(500)), FORM),
    (asked({"type": "integer", "multipleOf": 1000003}), FORM),
    (asked({"allOf": [CHOICES] * 12}), FORM),
    (asked({"enum": ["x" * 70_000]}), f"{FORM}.json_schema.schema"),
    (asked({"type": "number", "maximum": float("nan")}), f"{FORM}.json_schema.schema"),
    (asked([]), f"{FORM}.json_schema.schema"),
    (asked(ignore_eos=True), "ignore_eos"),
    ({"messages": MESSAGES, FORM: "json"}, FORM),
    ({"messages": MESSAGES, FORM: {}}, f"{FORM}.type"),
    ({"messages": MESSAGES, FORM: {"type": "xml"}}, f"{FORM}.type"),
    ({"messages": MESSAGES, FORM: {"type": "json_schema"}}, f"{FORM}.json_schema"),
    ({"messages": MESSAGES, FORM: {"type": "json_schema", "json_schema": {"name": "a b"}}}, f"{FORM}.json_schema.name"),
]


def test_what_cannot_be_followed_is_refused_and_holds_up_nobody(frontend: Frontend) -> None:
    plain = {"messages": MESSAGES, "max_tokens": 20, **GREEDY}
    alone = text_of(frontend.ask(plain, route=CHAT)[0])
    bad = [frontend.send({**body, "stream": True}, CHAT) for body, _ in BAD]
    started = time.monotonic()
    good = frontend.send(plain, CHAT)
    while good not in frontend.answers:
        frontend.call()
    before = [id for id in bad if id in frontend.answers]
    frontend.run()
    assert text_of(frontend.answers[good]) == alone
    assert len(before) < len(bad)  # it did not wait for their compilation
    for id, (body, param) in zip(bad, BAD, strict=True):
        error = frontend.answers[id].json()["error"]
        assert frontend.answers[id].status == 400, (body, error)
        assert error["param"] == param, (body, error)
    assert frontend.answers[bad[0]].json()["error"]["message"].endswith("cannot be followed: Invalid type: objekt.")
    assert time.monotonic() - started < 60
    again = time.monotonic()
    assert frontend.ask(asked({"type": "integer", "multipleOf": 1000003}), route=CHAT)[0].status == 400
    assert time.monotonic() - again < grammar.GRACE_SECONDS  # it is remembered
    assert frontend.at_rest()


def test_a_grammar_that_fails_underway_fails_its_own_request_alone(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"messages": MESSAGES, "max_tokens": 20, **GREEDY}
    alone = text_of(frontend.ask(plain, route=CHAT)[0])
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 40}
    monkeypatch.setattr(grammar, "TOKEN_SECONDS", -grammar.GRACE_SECONDS / 3)
    failed, good = frontend.ask(asked(schema), plain, route=CHAT)
    assert failed.status == 500
    assert "too complex" in failed.json()["error"]["message"]
    assert text_of(good) == alone
    assert frontend.at_rest()


def test_sequences_of_one_grammar_do_not_share_their_places(frontend: Frontend) -> None:
    compiled = frontend.handler.grammars.compile(rules.json_answer({"enum": ["cat", "dog"]}))
    assert isinstance(compiled, Grammar)
    first, second = compiled.constraint(), compiled.constraint()
    encode = frontend.handler.prompts.tokenizer.encode
    for token in encode('"cat"'):
        first.add(token)
    first.add(encode("x")[0])
    assert first.failure is not None
    for token in encode('"dog"'):
        second.add(token)
    assert second.failure is None
    bits = second.allowed()
    assert bits is not None
    assert int.from_bytes(bits, "little") == 1 << 2  # only the end


def test_without_the_package_nothing_is_offered(start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handlers.generation.handler.version", lambda: None)
    frontend = start(directory)
    refused, fine = frontend.ask(asked(), {"messages": MESSAGES, "max_tokens": 2, FORM: {"type": "text"}}, route=CHAT)
    assert refused.status == 400
    assert refused.json()["error"]["param"] == FORM
    assert "pip install llguidance" in refused.json()["error"]["message"]
    assert fine.status == 200
    assert frontend.handler.card()["response_format"] == ["text"]
