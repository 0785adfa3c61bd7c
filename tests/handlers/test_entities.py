"""Entities of scores written by hand; the contract tests hold whole models against the pipeline."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from handlers.entities import Entities
from handlers.tokens import Encoding, Source

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC"]
WORDS = ["[UNK]", "anna", "##bel", "##la", "lives", "in", "new", "york", "-"]
TEXT = "Annabella lives in New York"
IDS = [1, 2, 3, 4, 5, 6, 7]
OFFSETS = [(0, 4), (4, 7), (7, 9), (10, 15), (16, 18), (19, 22), (23, 27)]


@pytest.fixture(scope="module")
def entities() -> Entities:
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Entities(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), LABELS)


def window(start: int = 0, end: int = 7, ids: list[int] = IDS) -> Encoding:
    """Tokens of TEXT between two special ones."""
    return Encoding(
        [0, *ids[start:end], 0],
        [0] * (end - start + 2),
        source=Source(
            offsets=[(0, 0), *OFFSETS[start:end], (0, 0)],
            sequences=[None, *[0] * (end - start), None],
            words=[None, *[(0, 0, 0, 1, 2, 3, 4)[i] for i in range(start, end)], None],
        ),
        start=start,
    )


def logits(*rows: str | dict[str, float]) -> torch.Tensor:
    """Logits of tokens, special ones around them: a label that is certain, or probabilities."""
    shares = [row if isinstance(row, dict) else {row: 1.0} for row in ("MISC", *rows, "MISC")]
    return torch.tensor([[row.get(label, 1e-9) for label in LABELS] for row in shares]).log()


def named(found: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(entity[key] for key in keys) for entity in found]


def test_tokens(entities: Entities) -> None:
    rows = logits("B-PER", "I-PER", {"O": 0.6, "MISC": 0.4}, "O", "O", {"B-LOC": 0.7, "O": 0.3}, "I-LOC")
    found = entities.of(TEXT, [window()], [rows])
    assert found[0] == {
        "entity": "B-PER", "score": pytest.approx(1), "index": 1, "word": "anna", "start": 0, "end": 4
    }  # fmt: skip
    expected = [("B-PER", 1, "anna"), ("I-PER", 2, "##bel"), ("B-LOC", 6, "new"), ("I-LOC", 7, "york")]
    assert named(found, "entity", "index", "word") == expected
    assert found[2]["score"] == pytest.approx(0.7)
    assert len(entities.of(TEXT, [window()], [rows], ignored=())) == 7
    assert named(entities.of(TEXT, [window()], [rows], ignored=("O", "B-PER", "I-PER")), "index") == [(6,), (7,)]


def test_simple_groups(entities: Entities) -> None:
    """Another tag or a B- begins a group; one without a prefix goes on."""
    rows = logits("I-PER", "I-PER", "B-PER", "O", "MISC", "MISC", {"I-LOC": 0.8})
    found = entities.of(TEXT, [window()], [rows], strategy="simple")
    expected = [("PER", "annabel", 0, 7), ("PER", "##la", 7, 9), ("MISC", "in new", 16, 22), ("LOC", "york", 23, 27)]
    assert named(found, "entity_group", "word", "start", "end") == expected
    assert named(entities.of(TEXT, [window()], [rows], strategy="simple", ignored=("MISC", "PER")), "entity_group") == [
        ("O",), ("LOC",)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "label", "score"), [("first", "PER", 0.5), ("max", "LOC", 0.8), ("average", "MISC", 0.4)]
)
def test_a_word_has_one_label(entities: Entities, strategy: str, label: str, score: float) -> None:
    word = ({"B-PER": 0.5, "MISC": 0.4, "O": 0.1}, {"B-LOC": 0.8, "MISC": 0.2}, {"MISC": 0.6, "B-PER": 0.4})
    rows = logits(*word, "O", "O", "O", "O")
    found = entities.of(TEXT, [window()], [rows], strategy=strategy)
    assert named(found, "entity_group", "word", "start", "end") == [(label, "annabella", 0, 9)]
    assert found[0]["score"] == pytest.approx(score)


def test_an_unknown_token_is_a_word_as_it_stands(entities: Entities) -> None:
    ids = [1, 0, 3, 4, 5, 6, 7]
    rows = logits("O", "B-PER", "I-PER", "O", "O", "O", "O")
    assert named(entities.of(TEXT, [window(ids=ids)], [rows]), "word") == [("bel",), ("##la",)]
    assert named(entities.of(TEXT, [window(ids=ids)], [rows], strategy="first"), "word", "start") == [("bella", 4)]


def test_every_token_of_windows_comes_from_the_one_that_sees_more_around_it(entities: Entities) -> None:
    """Tokens 2 to 4 are in both windows: 2 and the one in the middle are the first window's, 4 is the second's."""
    pieces = [window(0, 5), window(2, 7)]
    scores = [logits(*["B-PER"] * 5), logits(*["B-LOC"] * 5)]
    found = entities.of(TEXT, pieces, scores)
    assert named(found, "index", "start") == list(zip(range(1, 8), [start for start, _ in OFFSETS], strict=True))
    assert [entity["entity"] for entity in found] == ["B-PER"] * 4 + ["B-LOC"] * 3


def test_groups_of_windows_that_overlap_are_one(entities: Entities) -> None:
    """The longest; of two that are equally long, the surer one."""
    pieces = [window(0, 6), window(3, 7)]
    unsure = {"B-LOC": 0.6, "O": 0.4}
    found = entities.of(
        TEXT,
        pieces,
        [logits("O", "O", "O", unsure, "O", "B-LOC"), logits("B-PER", "O", "B-LOC", "I-LOC")],
        strategy="simple",
    )
    assert named(found, "entity_group", "start", "end") == [("PER", 10, 15), ("LOC", 19, 27)]


@pytest.mark.parametrize("strategy", ["none", "simple", "first"])
def test_a_text_without_tokens_has_no_entities(entities: Entities, strategy: str) -> None:
    assert entities.of("", [window(0, 0)], [logits()], strategy=strategy) == []
