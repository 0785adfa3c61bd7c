from collections.abc import Sequence

from handlers.intake import admit
from handlers.request import Request
from handlers.tokens import Encoding
from handlers.work import Slot


def seconds(encodings: Sequence[Encoding]) -> float:
    """0.1 s a token."""
    return sum(map(len, encodings)) / 10


def test_one_text_that_is_too_much_work_is_told_how_many_tokens_fit() -> None:
    """However many windows it is read in."""
    windows = [Encoding([5] * 50, [0] * 50, window=i) for i in range(4)]
    slot = Slot(request=Request(("a long text",)), encodings=windows)
    assert admit([slot], seconds, 10.0, 10.0) == 1
    assert slot.error is not None
    assert (slot.error.status, slot.error.code, slot.error.param) == (413, "too_much_work", "text")
    assert "200 tokens would take about 20 s" in slot.error.message
    assert "at most about 100 like these fit in the 10 s" in slot.error.message


def test_what_is_shared_is_planned_seldom() -> None:
    """Planning thousands of texts takes seconds: as much again as was refused is refused without."""
    planned = []

    def shared(encodings: Sequence[Encoding]) -> float:
        planned.append(len(encodings))
        return 1.0 + seconds(encodings)  # a launch for all

    sizes = [40, 40, 30, 30, 30, 5]
    slots = [Slot(request=Request(("a",)), encodings=[Encoding([5] * size, [0] * size)]) for size in sizes]
    assert admit(slots, shared, 10.0, 60.0) == 3
    assert [slot.error is None for slot in slots] == [True, True, False, False, False, True]
    assert [slot.error.status for slot in slots if slot.error] == [503] * 3
    assert planned.count(3) == 2, "once for the first that did not fit, once for the small one at the end"
