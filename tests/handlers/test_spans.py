"""The best spans. Oracle: every span there is, tried one by one."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers import spans
from handlers.tokens import Encoding, Source

CLS, SEP = 101, 102


def every_span(starts: Any, ends: Any, characters: list[tuple[int, int]], longest: int) -> dict[tuple[int, int], float]:
    """(start, end) in characters → the best score of the token spans that read so."""
    found: dict[tuple[int, int], float] = {}
    for first, last in product(range(len(starts)), repeat=2):
        if first <= last < first + longest:
            key = characters[first][0], characters[last][1]
            found[key] = max(found.get(key, 0.0), float(starts[first] * ends[last]))
    return found


@st.composite
def tokens(draw: Any) -> tuple[Any, Any, list[tuple[int, int]]]:
    """Probabilities, many of them equal or 0, and tokens that share words."""
    count = draw(st.integers(1, 12))
    chances = st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]), min_size=count, max_size=count)
    words = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    numbers = np.cumsum(words).tolist()
    characters = [(number * 3, number * 3 + 2) for number in numbers]
    return np.array(draw(chances), np.float32), np.array(draw(chances), np.float32), characters


@settings(max_examples=400)
@given(tokens(), st.integers(1, 40), st.integers(1, 15))
def test_no_better_span_is_missed(given_: tuple[Any, Any, list[tuple[int, int]]], limit: int, longest: int) -> None:
    starts, ends, characters = given_
    expected = every_span(starts, ends, characters, longest)
    found = spans.best(starts, ends, characters, limit=limit, longest=longest)
    assert [span.score for span in found] == sorted(expected.values(), reverse=True)[:limit]
    assert all(expected[span.start, span.end] == span.score for span in found)
    assert len({(span.start, span.end) for span in found}) == len(found)


def window(ids: list[int], context: list[tuple[int, int, int]]) -> Encoding:
    """CLS, a question of one token, SEP, and a context of tokens (word, start, end)."""
    ids = [CLS, 7, SEP, *ids, SEP]
    offsets = [(0, 0), (0, 4), (0, 0), *((start, end) for _, start, end in context), (0, 0)]
    sequences = [None, 0, None, *[1] * len(context), None]
    words = [None, 0, None, *(word for word, _, _ in context), None]
    return Encoding(ids, [0] * len(ids), source=Source(offsets, sequences, words))


def logits(length: int, **peaks: tuple[int, float]) -> Any:
    """Zeros, with a start and an end at a token each."""
    found = np.zeros((length, 2), np.float32)
    for name, (place, height) in peaks.items():
        found[place, 0 if name == "start" else 1] = height
    return found


OPTIONS: dict[str, Any] = {"limit": 3, "longest": 15, "align_to_words": False, "impossible": False}


def test_question_and_special_tokens_are_no_answers_but_cls_takes_its_share() -> None:
    encoding = window([8, 9], [(0, 0, 3), (1, 4, 7)])
    scores = logits(6, start=(1, 9.0), end=(5, 9.0))
    found = spans.of_context([(encoding, scores)], CLS, **OPTIONS)
    assert {(span.start, span.end) for span in found} == {(0, 3), (4, 7), (0, 7)}
    assert [span.score for span in found] == pytest.approx([1 / 9] * 3)
    found = spans.of_context([(encoding, scores)], None, **OPTIONS)
    assert [span.score for span in found] == pytest.approx([1 / 4] * 3)


def test_a_cls_token_that_a_client_spells_is_context() -> None:
    found = spans.of_context([(window([CLS], [(0, 0, 5)]), logits(5, start=(3, 2.0)))], CLS, **OPTIONS)
    assert (found[0].start, found[0].end) == (0, 5)
    assert found[0].score == pytest.approx(np.exp(2.0) / (np.exp(2.0) + 1) / 2)


def test_no_answer_is_as_likely_as_the_window_that_believes_least_in_it() -> None:
    encoding = window([8], [(0, 0, 3)])
    sure, doubtful = logits(5, start=(3, 3.0), end=(3, 3.0)), logits(5, start=(0, 4.0), end=(0, 4.0))
    options = OPTIONS | {"impossible": True}
    for windows in ([(encoding, sure), (encoding, doubtful)], [(encoding, doubtful), (encoding, sure)]):
        best, none = spans.of_context(windows, CLS, **options)
        assert (best.start, best.end, none.start, none.end) == (0, 3, 0, 0)
        assert best.score == pytest.approx((np.exp(3) / (np.exp(3) + 1)) ** 2)
        assert none.score == pytest.approx((1 / (np.exp(3) + 1)) ** 2)
    (none, _) = spans.of_context([(encoding, doubtful)], CLS, **options)
    assert none == (pytest.approx((np.exp(4) / (np.exp(4) + 1)) ** 2), 0, 0)


def test_words_are_whole_where_a_window_cuts_them() -> None:
    left = window([8, 9], [(0, 0, 3), (1, 4, 6)])
    right = window([10, 11], [(1, 6, 9), (2, 10, 12)])
    windows = [(left, logits(6)), (right, logits(6, start=(3, 9.0), end=(3, 9.0)))]
    (aligned, *_) = spans.of_context(windows, CLS, **OPTIONS | {"align_to_words": True})
    (exact, *_) = spans.of_context(windows, CLS, **OPTIONS)
    assert (aligned.start, aligned.end) == (4, 9)
    assert (exact.start, exact.end) == (6, 9)


def test_a_context_without_tokens_has_no_answer_but_that() -> None:
    empty = [(window([], []), logits(4))]
    assert spans.of_context(empty, CLS, **OPTIONS) == []
    assert spans.of_context(empty, CLS, **OPTIONS | {"impossible": True}) == [(1.0, 0, 0)]
    assert spans.of_context(empty, None, **OPTIONS | {"impossible": True}) == [(0.0, 0, 0)]
