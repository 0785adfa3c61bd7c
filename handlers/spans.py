"""The best spans of a context by a question answering model's start and end logits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from handlers.tokens import Encoding, Source

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Span(NamedTuple):
    """A stretch of a context.

    Args:
        score: probability of its first token as a start × that of its last as an end.
        start, end: in characters of the context.
    """

    score: float
    start: int
    end: int


def of_context(
    windows: Sequence[tuple[Encoding, Floats]],
    cls_id: int | None,
    *,
    limit: int,
    longest: int,
    align_to_words: bool,
    impossible: bool,
) -> list[Span]:
    """The best distinct spans of a context by descending score, scored as in transformers 4's pipeline.

    In each window, start and end logits go through a softmax each over the tokens of the context and the CLS token,
    which stands for there being no answer. Windows are compared by these probabilities of their own, and a span that
    several of them hold counts with its best score.

    Args:
        windows: of a question and the context, sourced, each with its (tokens, 2) logits of starts and ends.
        cls_id: the CLS token, of models that have one.
        limit: most spans to return.
        longest: most tokens of a span.
        align_to_words: widen spans to whole words.
        impossible: whether there being no answer, an empty span at 0, is one of them: its score is the lowest that a
            window gives it, since the others need not hold the answer.
    """
    sources = [encoding.source for encoding, _ in windows if encoding.source is not None]
    words = _words(sources) if align_to_words else {}
    found: dict[tuple[int, int], float] = {}
    nulls = []
    for source, (encoding, logits) in zip(sources, windows, strict=True):
        context = _context(source)
        starts, ends, null = chances(logits, encoding, context, cls_id)
        nulls.append(null)
        characters = [words.get(source.words[i], source.offsets[i]) for i in context]
        for score, start, end in best(starts, ends, characters, limit=limit, longest=longest):
            found[start, end] = max(score, found.get((start, end), 0.0))
    spans = [Span(score, start, end) for (start, end), score in found.items()]
    if impossible:
        spans.append(Span(min(nulls), 0, 0))
    return sorted(spans, key=lambda span: -span.score)[:limit]


def _context(source: Source) -> list[int]:
    """The tokens of the second text."""
    return [i for i, sequence in enumerate(source.sequences) if sequence == 1]


def _words(windows: Sequence[Source]) -> dict[int | None, tuple[int, int]]:
    """The start and end of each of the context's words, a window's edge may lie in the middle of one."""
    words: dict[int | None, tuple[int, int]] = {}
    for source in windows:
        for i in _context(source):
            word, (start, end) = source.words[i], source.offsets[i]
            if word is not None:  # some tokenizers know no words
                first, last = words.get(word, (start, end))
                words[word] = min(first, start), max(last, end)
    return words


def chances(
    logits: Floats, encoding: Encoding, context: Sequence[int], cls_id: int | None
) -> tuple[Floats, Floats, float]:
    """Probabilities of starting and of ending at each token of the context, and of the CLS token's being both."""
    sequences = encoding.source.sequences if encoding.source else []
    special = enumerate(zip(encoding.ids, sequences, strict=True))
    cls = [i for i, (token, sequence) in special if token == cls_id and sequence is None][:1]
    chosen = logits[[*context, *cls]].astype(np.float32)
    if not len(chosen):
        return chosen[:, 0], chosen[:, 1], 0.0
    scaled = np.exp(chosen - chosen.max(axis=0))
    scaled /= scaled.sum(axis=0)
    starts, ends = scaled[: len(context)].T
    return starts, ends, float(scaled[-1].prod()) if cls else 0.0


def best(
    starts: Floats, ends: Floats, characters: Sequence[tuple[int, int]], *, limit: int, longest: int
) -> list[Span]:
    """The best distinct spans of one window by descending score; of several that are the same text the best.

    Args:
        starts, ends: (tokens,), each token's probability.
        characters: where a span that starts or ends with each token starts or ends.
        limit: most spans to return.
        longest: most tokens of a span.
    """
    count = len(starts)
    if not count:
        return []
    longest = min(longest, count)
    places: Integers = np.array(characters, dtype=np.int64)
    following = sliding_window_view(np.append(ends, np.zeros(longest - 1, dtype=ends.dtype)), longest)
    # The best spans start where the best span from each token is among the best: few rows of the table are needed
    order = np.argsort(-(starts * following.max(axis=1)), kind="stable")
    _, seen = np.unique(places[order, 0], return_index=True)
    first = np.sort(order if len(seen) <= limit else order[: np.sort(seen)[limit - 1] + 1])
    begins, row = np.unique(places[first, 0], return_inverse=True)
    stops, column = np.unique(places[:, 1], return_inverse=True)
    table = np.full((len(begins), len(stops)), -1.0, dtype=np.float32)
    for length in range(longest):
        inside = np.searchsorted(first, count - length)
        last = first[:inside] + length
        np.maximum.at(table, (row[:inside], column[last]), starts[first[:inside]] * ends[last])
    ranking = np.argsort(-table, axis=None, kind="stable")[:limit]
    chosen = [(float(table.flat[i]), *divmod(int(i), len(stops))) for i in ranking]
    return [Span(score, int(begins[i]), int(stops[j])) for score, i, j in chosen if score >= 0]
