"""Grammars of many requests: what one uses up, fails for or waits for is no other's."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from handlers.errors import Overloaded, RequestError
from handlers.generation import grammar, rules, trial
from handlers.generation.grammar import Grammar, Grammars
from tests.generation_models import write_tokenizer

_CHOSEN = random.Random(0)
WORDS = ["".join(_CHOSEN.choices("abcdefgh", k=30)) for _ in range(30)]
HEAVY = {"type": "integer", "multipleOf": 1000003}


class Made:
    def __init__(self, directory: Path) -> None:
        vocabulary = write_tokenizer(directory)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.grammars = Grammars(self.tokenizer, vocabulary, [2])

    def write(self, compiled: Grammar, text: str) -> bool:
        """Whether a text can be written."""
        constraint = compiled.constraint()
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            if constraint.allowed() is None:
                break
            constraint.add(token)
        return constraint.failure is None


@pytest.fixture(params=[grammar.LIMITS["max_lexer_states"]])
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", request.param)
    found = Made(tmp_path)
    yield found
    found.grammars.stop()


@pytest.mark.parametrize("made", [200], indirect=True)
def test_a_schema_is_never_used_up(made: Made) -> None:
    rule = rules.json_answer({"enum": WORDS})  # each takes some 30 of the 200 states
    for word in WORDS:
        assert made.write(made.grammars.compile(rule), json.dumps(word))


def test_what_a_request_has_spent_is_its_own(made: Made) -> None:
    rule = rules.json_answer({"enum": WORDS})
    first = made.grammars.compile(rule)
    first.spend(2 * grammar.GRACE_SECONDS)
    assert not made.write(first, json.dumps(WORDS[0]))
    assert made.write(made.grammars.compile(rule), json.dumps(WORDS[0]))


def test_what_takes_too_long_is_known_from_then_on(made: Made) -> None:
    good, heavy = rules.json_answer({"enum": [1]}), rules.json_answer(HEAVY)
    assert not made.grammars.quick(good)
    made.grammars.compile(good)  # so that the process has been used
    assert made.grammars.quick(good)
    with pytest.raises(RequestError, match="takes too long") as caught:
        made.grammars.compile(heavy)
    assert caught.value.code == "invalid_schema"
    assert made.grammars.quick(heavy)


@pytest.mark.parametrize("cause", ["no time", "killed"])
def test_what_the_machine_does_is_held_against_no_schema(
    made: Made, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    good, rule = rules.json_answer({"enum": [1]}), rules.json_answer({"enum": [2]})
    made.grammars.compile(good)
    with monkeypatch.context() as patch:
        if cause == "no time":
            patch.setattr(trial, "WAIT_SECONDS", 0.0)
        else:
            process = made.grammars._trial._process
            assert process is not None
            process.kill()
            process.wait()
        with pytest.raises(Overloaded):
            made.grammars.compile(rule)
    assert not made.grammars.quick(rule)
    assert made.write(made.grammars.compile(rule), "2")
