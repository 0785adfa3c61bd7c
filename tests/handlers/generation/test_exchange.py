"""One choice's text beside its calls and stop strings; what a request's clocks say."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from handlers.generation import exchange
from handlers.generation.calls import Format
from handlers.generation.engine import Finish, Output, Sampling, Token
from handlers.generation.exchange import Choice, Exchange
from handlers.generation.requests import Generation
from handlers.generation.responses import Writer
from tests.generation_models import write_tokenizer

HERMES = Format("<tool_call>", "<tool_call>\n", '{"name": "', '", "arguments": ', None, "\n</tool_call>")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>'
END = 2


@pytest.fixture(scope="module", params=[(), ("<tool_call>", "</tool_call>")], ids=["texts", "tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, marks=request.param)
    return AutoTokenizer.from_pretrained(directory)


def told(tokenizer: Any, text: str, finish: Finish, *stop: str) -> tuple[str, str | None, str]:
    """The text, the end and the arguments that a client sees of what a model has written."""
    generation = Generation("chat", "messages", Sampling(), stop=stop)
    choice = Choice(tokenizer, (), generation, frozenset({END}), HERMES)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *([END] if finish == "stop" else [])]
    pieces = []
    for place, id in enumerate(ids):
        choice.add([Token(id)], finish if place == len(ids) - 1 else None)
        if (piece := choice.take(0)) is not None:
            pieces.append(piece)
        if choice.finish is not None:
            break
    arguments = "".join(call.arguments for piece in pieces for call in piece.calls)
    return "".join(piece.text for piece in pieces), pieces[-1].finish, arguments


@pytest.mark.parametrize("stop", ["}", "tool", "<", '"', "\n", "_call>"])
def test_a_stop_string_is_no_end_of_a_call(tokenizer: Any, stop: str) -> None:
    assert told(tokenizer, f"the cat {CALL}", "stop", stop) == ("the cat ", "tool_calls", '{"a": {"b": 1}}')


def test_a_stop_string_ends_the_text_before_a_call(tokenizer: Any) -> None:
    assert told(tokenizer, f"the cat {CALL}", "stop", "cat") == ("the ", "stop", "")
    assert told(tokenizer, "the <cat", "stop", "cat") == ("the <", "stop", "")
    # what may become one shows when it has not
    assert told(tokenizer, f"the c{CALL}", "stop", "cat") == ("the c", "tool_calls", '{"a": {"b": 1}}')
    assert told(tokenizer, "the c", "stop", "cat") == ("the c", "stop", "")


def test_a_mark_is_never_shown(tokenizer: Any) -> None:
    for end in range(len("<tool_call>"), len(CALL)):
        text, finish, _ = told(tokenizer, f"the cat {CALL[:end]}", "length")
        assert (text, finish) == ("the cat ", "length")
    assert told(tokenizer, f"the cat <tool{CALL}", "stop", "cat")[0] == "the "
    assert told(tokenizer, "the cat <tool", "length")[0] == "the cat <tool"  # no mark yet


def test_each_choice_has_its_own_pace(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(exchange.time, "monotonic", lambda: now)
    generation = Generation("chat", "messages", Sampling(), n=3)
    choices = [Choice(tokenizer, (), generation, frozenset({END})) for _ in range(3)]
    found = Exchange(generation, choices, Writer(generation, "id", "model"), 1, 1000, started=97.5)
    for step in range(5):
        now = 100.0 + step
        found.add(0, Output("0", (Token(50),), "length" if step == 4 else None))
        if step in (0, 2, 4):
            found.add(1, Output("1", (Token(50),)))
        if step == 3:
            found.add(2, Output("2", (Token(50),), "length"))
    now = 200.0
    assert found.paces() == [1.0, 2.0]  # one with a single token has none
    assert found.first is not None
    assert found.first - found.started == 2.5
