"""Long texts in overlapping windows: how much they overlap, and which encodings are of one text."""

from collections.abc import Sequence

from handlers.tokens import Encoding

MOST_OVERLAP = 128  # tokens; what a window sees beyond that changes little


def overlap(room: int) -> int:
    """Tokens that neighbouring windows share unless a request says otherwise.

    Args:
        room: tokens of a text that fit into one window.
    """
    return min(room // 4, MOST_OVERLAP)


def per_text(encodings: Sequence[Encoding]) -> list[slice]:
    """Where the windows of each text lie among the encodings of a request, text by text."""
    starts = [i for i, encoding in enumerate(encodings) if encoding.window == 0]
    return [slice(*bounds) for bounds in zip(starts, [*starts[1:], len(encodings)], strict=True)]
