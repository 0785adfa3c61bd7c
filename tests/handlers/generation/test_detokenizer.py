"""Text as it grows equals the text of all tokens, whatever the tokenizer; stop strings never show."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from handlers.generation.detokenizer import Detokenizer, StopStrings


def byte_level() -> Any:
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece() -> Any:
    """Llama 2's way: a word begins with ▁, and a text's first space is no part of it."""
    pieces = ["▁the", "▁cat", "s", "▁", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>", "▁a"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def grown(tokenizer: Any, ids: list[int], context: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [*(detokenizer.add(token) for token in ids), detokenizer.rest()]


@given(text=st.text(min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_no_character_is_split(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer(text)["input_ids"]
    pieces = grown(tokenizer, ids, [])
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_that_stays_incomplete_is_replaced_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer("a🦙")["input_ids"][:-1]
    assert grown(tokenizer, ids, []) == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize(("context", "expected"), [([], "the cats"), ([1], " the cats"), ([1, 3], "the cats")])
def test_spaces_before_words_are_kept(context: list[int], expected: str) -> None:
    found = "".join(grown(sentencepiece(), [0, 1, 2], context))
    assert found in (expected, " the cats" if context else expected)
    assert found.endswith("the cats")


def test_bytes_become_a_character_when_the_last_one_comes() -> None:
    assert grown(sentencepiece(), [0, 4, 5, 6, 7, 1], []) == ["the", "", "", "", "🦙", " cat", ""]


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(1, 5), max_size=40),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_end_the_text_where_they_first_are(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopStrings(stops)
    shown, at = "", 0
    for cut in [*cuts, len(text)]:
        shown += finder.add(text[at : at + cut])
        at += cut
        if finder.found:
            break
        assert text.startswith(shown)
    if not finder.found:
        shown += finder.rest()
    # the first end that a stop string reaches, as the text grew
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not ends:
        assert shown == text
        return
    assert finder.found
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert any(text[len(shown) :].startswith(stop) for stop in stops)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["stop"])
    assert finder.add("a st") == "a "
    assert finder.add("o") == ""
    assert finder.add("re") == "store"
    assert finder.add("x", watch=False) == "x"
