"""The benchmark's texts have the lengths they claim, and are the same every time."""

import random
from pathlib import Path

import orjson
import pytest

from scripts.lib.source import resolve
from scripts.lib.subjects import QUERY, SUBJECTS
from scripts.lib.workloads import BLOCK, WORKLOADS, Vocabulary, make_workload, mixed_lengths


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(resolve("bundled:minilm").directory)


@pytest.mark.parametrize("name", WORKLOADS)
def test_lengths_are_exact_in_the_models_own_tokens(vocabulary: Vocabulary, name: str) -> None:
    workload = make_workload(name, vocabulary, 20)
    assert [vocabulary.length(text) for text in workload.texts] == list(workload.lengths)
    assert sum(body.tokens for body in workload.bodies) == sum(workload.lengths)


def test_short_stays_within_its_range(vocabulary: Vocabulary) -> None:
    lengths = make_workload("short", vocabulary, 500).lengths
    assert (min(lengths), max(lengths)) == (5, 25)


@pytest.mark.parametrize("count", [BLOCK, 5 * BLOCK])
def test_mixed_has_one_long_text_in_ten_in_every_block(count: int) -> None:
    lengths = mixed_lengths(count, random.Random(1))
    assert all(5 <= length <= 30 or 200 <= length <= 256 for length in lengths)
    for start in range(0, count, BLOCK):
        assert sum(length >= 200 for length in lengths[start : start + BLOCK]) == BLOCK // 10


def test_bodies_hold_the_texts_in_order(vocabulary: Vocabulary) -> None:
    mixed, lists = make_workload("mixed", vocabulary, 7), make_workload("lists", vocabulary, 3)
    assert [orjson.loads(body.data) for body in mixed.bodies] == [{"text": text} for text in mixed.texts]
    texts = [text for body in lists.bodies for text in orjson.loads(body.data)["texts"]]
    assert texts == list(lists.texts)
    assert [body.texts for body in lists.bodies] == [32] * 3


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(vocabulary: Vocabulary) -> None:
    assert make_workload("mixed", vocabulary, 30) == make_workload("mixed", vocabulary, 30)
    assert make_workload("mixed", vocabulary, 30).texts != make_workload("mixed", vocabulary, 30, seed=1).texts


def test_words_are_words(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.words) > 10_000
    assert {"house", "river", "learning"} <= set(vocabulary.words)


def test_nonsense_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="no workload 'huge'"):
        make_workload("huge", vocabulary, 1)
    with pytest.raises(ValueError, match="at least one request"):
        make_workload("short", vocabulary, 0)
    with pytest.raises(ValueError, match="no room for a word"):
        vocabulary.text(2, random.Random(0))


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="0 whole words"):
        Vocabulary.load(tmp_path)


def test_pairs_are_as_long_as_texts_alone(vocabulary: Vocabulary) -> None:
    pool = make_workload("lists", vocabulary, 2, subject=SUBJECTS["reranking"])
    body = orjson.loads(pool.bodies[0].data)
    assert (body["query"], len(body["documents"]), pool.bodies[0].texts) == (QUERY, 64, 64)
    assert pool.inputs[0] == (QUERY, pool.texts[0])
    lengths = [len(vocabulary._tokenizer.encode(*pair).ids) for pair in pool.inputs]
    assert lengths == list(pool.lengths)
    assert max(lengths) <= 256
    assert sum(body.tokens for body in pool.bodies) == sum(lengths)
