"""Which tokens a text that is too long loses, and the windows that it is read in instead. Pure integers."""

from collections.abc import Sequence
from typing import Any, Literal

MOST_WINDOWS = 8  # that share a token: else the little room beside a long text makes windows without end

Losing = Literal["longest_first", "only_first", "only_second"]
Stretch = tuple[int, int]


def without(values: list[Any], gaps: Sequence[Stretch]) -> list[Any]:
    """`values` but for these stretches, which are in order."""
    kept: list[Any] = []
    at = 0
    for start, end in gaps:
        kept += values[at:start]
        at = max(at, end)
    return kept + values[at:]


def cuts(spans: Sequence[Stretch], surplus: int, losing: Losing, *, left: bool) -> list[Stretch] | None:
    """The stretches to leave out, as the tokenizers library's truncation strategies choose them.

    Args:
        spans: where the tokens of a text, or of both of a pair, lie.
        surplus: how many are too many.
        losing: which text of a pair loses them.
        left: whether texts lose their first tokens.

    Returns:
        A stretch of each text; None where that would leave nothing of the one that loses.
    """
    sizes = [end - start for start, end in spans]
    if len(sizes) == 1:
        kept = [sizes[0] - surplus]
    elif losing == "longest_first":
        kept = _longest_first(sizes, sum(sizes) - surplus)
    else:
        loser = 0 if losing == "only_first" else 1
        kept = [size - surplus if i == loser else size for i, size in enumerate(sizes)]
    if min(kept) < 0 or (losing != "longest_first" and len(kept) == 2 and min(kept) == 0):
        return None
    if left:
        return [(start, end - size) for (start, end), size in zip(spans, kept, strict=True)]
    return [(start + size, end) for (start, end), size in zip(spans, kept, strict=True)]


def windows(
    span: Stretch, width: int, stride: int, longest: int, *, left: bool
) -> list[tuple[Stretch, Stretch]] | None:
    """The two stretches to leave out for each window, the windows being those of the tokenizers library.

    Args:
        span: where the tokens of the text lie.
        width: tokens of it in one window.
        stride: tokens that neighbours share, or fewer: each brings at least 1 / MOST_WINDOWS of `longest`.
        longest: tokens that the model takes.
        left: whether the windows are counted from the end; they come in the text's order all the same.

    Returns:
        None where that is not even possible without sharing.
    """
    start, end = span
    step = max(width - stride, -(-longest // MOST_WINDOWS))
    if step > width:
        return None
    last = max(0, -(-(end - start - width) // step))
    spans = [(at, min(at + width, end)) for at in range(start, start + step * last + 1, step)]
    if left:
        spans = [(max(start, at - width), at) for at in range(end - step * last, end + 1, step)]
    return [((start, first), (after, end)) for first, after in spans]


def _longest_first(sizes: list[int], room: int) -> list[int]:
    """Tokens that each text of a pair keeps: the longer one loses until both are equal."""
    low, high = min(sizes), max(sizes)
    high = low if low > room else max(low, room - low)
    if low + high > room:
        low = room // 2
        high = low + room % 2
    return [low, high] if sizes[0] <= sizes[1] else [high, low]
