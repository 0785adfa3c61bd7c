from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from handlers.errors import RequestError
from handlers.request import Pair
from handlers.tokens import MOST_WINDOWS, Encoding, Text, Tokens, collate
from tests.strategies import texts


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def tokens(tiny_model: Path) -> Tokens:
    return Tokens(AutoTokenizer.from_pretrained(tiny_model), 12)


def good(slot: list[Encoding] | RequestError) -> Encoding:
    assert not isinstance(slot, RequestError)
    (encoding,) = slot
    return encoding


@settings(deadline=None)
@given(many=st.lists(texts, max_size=6))
def test_ids_are_those_of_the_tokenizer_truncated_as_it_truncates(
    tokens: Tokens, tiny_model: Path, many: list[str]
) -> None:
    own = AutoTokenizer.from_pretrained(tiny_model)
    found = tokens.encode([Text(text) for text in many])
    for text, slot in zip(many, found, strict=True):
        whole = own(text)["input_ids"]
        assert good(slot).ids == own(text, truncation=True, max_length=12)["input_ids"]
        assert good(slot).cut == max(0, len(whole) - 12)


def test_left_truncation(tiny_model: Path) -> None:
    own = AutoTokenizer.from_pretrained(tiny_model, truncation_side="left")
    text = "the cat sits on the old house and the dog runs in the green text"
    expected = AutoTokenizer.from_pretrained(tiny_model, truncation_side="left")(text, truncation=True, max_length=8)
    assert good(Tokens(own, 8).encode([Text(text)])[0]).ids == expected["input_ids"]


def test_too_long_without_truncation_is_an_error_of_that_text_alone(tokens: Tokens) -> None:
    short, long = tokens.encode([Text("the cat", truncate=False), Text("the cat " * 9, truncate=False)])
    assert good(short).cut == 0
    assert isinstance(long, RequestError)
    assert long.code == "too_long"
    assert "20 tokens" in long.message
    assert "12" in long.message


def test_token_ids_get_the_special_tokens_once(tokens: Tokens, tokenizer: Any) -> None:
    text = "the cat sits"
    bare = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    whole = tuple(tokenizer(text)["input_ids"])
    from_bare, from_whole, from_text = tokens.encode([Text(bare), Text(whole), Text(text)])
    assert good(from_bare).ids == good(from_whole).ids == good(from_text).ids == list(whole)


@pytest.mark.parametrize("wrong", [-1, 10**6, 10**400])
def test_token_ids_out_of_the_vocabulary(tokens: Tokens, wrong: int) -> None:
    slot = tokens.encode([Text((5, wrong))])[0]
    assert isinstance(slot, RequestError)
    assert slot.code == "invalid_token"


def test_ids_without_a_row_in_the_model_are_refused(tiny_model: Path) -> None:
    """On CUDA such an id would end the worker's whole context."""
    tokens = Tokens(AutoTokenizer.from_pretrained(tiny_model), 12, rows=20)
    inside, outside, text = tokens.encode([Text((19,)), Text((20,)), Text("the cat 9")])
    assert good(inside)
    assert isinstance(outside, RequestError)
    assert isinstance(text, RequestError), "a text may spell such an id as well"


def test_prompts_are_put_before_and_left_out_of_the_pooling(tiny_model: Path, tokenizer: Any) -> None:
    tokens = Tokens(AutoTokenizer.from_pretrained(tiny_model), 12, include_prompt=False)
    slot = good(tokens.encode([Text("the cat", prompt="query: ")])[0])
    assert slot.ids == tokenizer("query: the cat")["input_ids"]
    assert slot.skip == len(tokenizer("query: ")["input_ids"]) - 1, "its [CLS] and words, not its [SEP]"


def test_lower_case(tiny_model: Path) -> None:
    own = AutoTokenizer.from_pretrained(tiny_model)
    own.backend_tokenizer.normalizer = None
    expected = own("the cat")["input_ids"]
    assert own("THE Cat")["input_ids"] != expected
    assert good(Tokens(own, 12, lower_case=True).encode([Text("THE Cat")])[0]).ids == expected


def test_segments_are_told_only_to_models_whose_tokenizer_tells_them(tiny_model: Path) -> None:
    pair = Text(Pair("the cat", "a dog"))
    for names in (["input_ids", "token_type_ids", "attention_mask"], ["input_ids", "attention_mask"]):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model, model_input_names=names)
        expected = tokenizer("the cat", "a dog")
        (found,) = Tokens(tokenizer, 48).encode([pair])
        assert isinstance(found, list)
        assert found[0].ids == expected["input_ids"]
        assert found[0].type_ids == expected.get("token_type_ids", [0] * len(found[0]))


def test_a_limit_below_the_special_tokens_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="special tokens alone are 2"):
        Tokens(AutoTokenizer.from_pretrained(tiny_model), 2)


def test_collate_packed() -> None:
    tensors, layout = collate([Encoding([5, 6], [0, 0]), Encoding([7], [1], skip=0)], 0, packed=True)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "input_ids": [[5, 6, 7]],
        "position_ids": [[0, 1, 0]],
        "token_type_ids": [[0, 0, 1]],
    }
    assert (layout.starts, layout.lengths, layout.packed) == ([0, 2], [2, 1], True)


def test_positions_by_robertas_rule() -> None:
    """transformers' own rule: count what is no padding, from the padding id + 1."""
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    for ids in ([5, 6, 7], [5, 1, 7], [1, 5], [1]):
        tensors, _ = collate([Encoding(ids, [0] * len(ids))], 1, packed=True, positions_skip=1)
        expected = RobertaEmbeddings.create_position_ids_from_input_ids(torch.tensor([ids]), 1)
        assert torch.equal(tensors["position_ids"], expected)


def test_collate_padded() -> None:
    tensors, layout = collate([Encoding([5, 6], [0, 0]), Encoding([7], [1])], 9, packed=False, multiple_of=4)
    assert tensors["input_ids"].tolist() == [[5, 6, 9, 9], [7, 9, 9, 9]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert (layout.starts, layout.packed) == ([0, 4], False)


@settings(deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=6), st.sampled_from(["left", "right"]))
def test_pairs_are_cut_as_the_tokenizer_cuts_them(tiny_model: Path, pairs: list[tuple[str, str]], side: str) -> None:
    own = AutoTokenizer.from_pretrained(tiny_model, truncation_side=side)
    found = Tokens(AutoTokenizer.from_pretrained(tiny_model, truncation_side=side), 12).encode(
        [Text(Pair(*pair), sourced=True) for pair in pairs]
    )
    for pair, slot in zip(pairs, found, strict=True):
        first, second = [pair[0]], [pair[1]]  # in lists, since a bare empty second text counts as none there
        whole = own(first, second)["input_ids"][0]
        expected = own(first, second, truncation=True, max_length=12, return_offsets_mapping=True)
        encoding = good(slot)
        assert (encoding.ids, encoding.type_ids) == (expected["input_ids"][0], expected["token_type_ids"][0])
        assert encoding.cut == max(0, len(whole) - 12)
        assert encoding.source is not None
        assert list(encoding.source.offsets) == list(expected["offset_mapping"][0])
        assert encoding.source.sequences == expected.sequence_ids(0)


@settings(deadline=None)
@given(
    st.tuples(st.text("ab ", max_size=6), st.text("ab ", max_size=40)),
    st.sampled_from(["only_first", "only_second"]),
    st.integers(0, 3),
)
def test_windows_are_those_of_the_tokenizer(tiny_model: Path, pair: tuple[str, str], cut: Any, stride: int) -> None:
    own = AutoTokenizer.from_pretrained(tiny_model)
    pair = pair if cut == "only_second" else (pair[1], pair[0])
    expected = own(
        *([text] for text in pair),
        truncation=cut,
        max_length=16,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    (slot,) = Tokens(AutoTokenizer.from_pretrained(tiny_model), 16).encode(
        [Text(Pair(*pair), cut=cut, stride=stride, sourced=True)]
    )
    assert not isinstance(slot, RequestError)
    assert [e.ids for e in slot] == expected["input_ids"]
    assert [e.type_ids for e in slot] == expected["token_type_ids"]
    assert [e.window for e in slot] == list(range(len(slot)))
    assert [e.source and list(e.source.offsets) for e in slot] == [list(o) for o in expected["offset_mapping"]]
    assert [e.source and e.source.words for e in slot] == [expected.word_ids(i) for i in range(len(slot))]
    assert all(e.cut == 0 for e in slot)


@settings(deadline=None)
@given(st.text("ab ", max_size=60), st.integers(0, 5), st.sampled_from(["left", "right"]))
def test_windows_of_one_text(tiny_model: Path, text: str, stride: int, side: str) -> None:
    own = AutoTokenizer.from_pretrained(tiny_model, truncation_side=side)
    whole = own(text, add_special_tokens=False)["input_ids"]
    expected = own(text, truncation=True, max_length=10, stride=stride, return_overflowing_tokens=True)["input_ids"]
    tokens = Tokens(AutoTokenizer.from_pretrained(tiny_model, truncation_side=side), 10)
    (slot,) = tokens.encode([Text(text, stride=stride, options="mine")])
    assert not isinstance(slot, RequestError)
    assert [e.ids for e in slot] == (expected if side == "right" else expected[::-1])
    assert all(e.ids[1:-1] == whole[e.start : e.start + len(e) - 2] for e in slot)
    assert {e.options for e in slot} == {"mine"}


def test_no_room_beside_the_other_text_is_an_error_of_that_pair(tokens: Tokens) -> None:
    fine, crowded = tokens.encode(
        [Text(Pair("a", "the cat " * 9), cut="only_second"), Text(Pair("the cat " * 9, "a"), cut="only_second")]
    )
    assert len(good(fine)) == 12
    assert isinstance(crowded, RequestError)
    assert crowded.code == "too_long"
    windows = tokens.encode([Text(Pair("the cat " * 9, "a dog"), cut="only_second", stride=2)])[0]
    assert isinstance(windows, RequestError)


def test_windows_beside_a_long_text_overlap_by_less_or_are_refused(tokens: Tokens) -> None:
    def windows(question: int, stride: int) -> list[Encoding] | RequestError:
        pair = Pair("cat " * question, "dog " * 40)
        return tokens.encode([Text(pair, cut="only_second", stride=stride)])[0]

    for question, width, step in ((3, 6, 2), (6, 3, 2), (7, 2, 2)):  # of 12 tokens, 3 of them special
        slot = windows(question, 100)
        assert not isinstance(slot, RequestError)
        assert [len(e) - question - 3 for e in slot[:-1]] == [width] * (len(slot) - 1)
        assert [e.start for e in slot] == [step * i for i in range(len(slot))]
        assert sum(map(len, slot)) <= MOST_WINDOWS * (40 + question + 3)
    refused = windows(8, 0)
    assert isinstance(refused, RequestError)
    assert refused.code == "too_long"
