"""How long a call waits, and for what."""

import pytest

from handlers.generation import mailbox
from handlers.generation.handler import GenerationHandler


def test_what_a_client_that_left_holds_is_free_within_two_seconds() -> None:
    """It is noticed with the next empty piece; while it was the last one, no call comes after that."""
    watching = mailbox.LEASE * (1 + 1 / 8)
    assert mailbox.QUIET + mailbox.ROUND + watching < 2.0


@pytest.mark.parametrize(
    ("told", "collected"),
    [([True], 1), ([False, True], 2), ([False] * 9, mailbox.SILENT)],
)
def test_a_call_ends_with_news_or_when_enough_has_come_that_is_none(
    told: list[bool], collected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, waits, left = GenerationHandler(), [], iter(told)

    def collect(timeout: float) -> bool:
        waits.append(timeout)
        return next(left)

    monkeypatch.setattr(handler, "collect", collect)
    handler._wait(0.25)
    assert len(waits) == collected
    assert waits[0] == pytest.approx(0.25, abs=0.05)
    assert all(0.0 <= wait <= 0.25 for wait in waits)
