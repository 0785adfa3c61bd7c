"""What is seen of a load while it runs."""

from scripts.lib.live import Progress
from scripts.lib.load import Sample


def test_the_line_counts_what_ended() -> None:
    state = Progress("50/s", 30.0, None)
    assert str(state.__rich__()) == "50/s: warming up"
    for status in (200, 200, 503, 500):
        state.add(Sample(0.0, 0.04, status, 1, 1, 1))
    line = str(state.__rich__())
    assert line.startswith("50/s: 0 of 30 s, 4 answers, ")
    assert line.endswith("/s, p95 40 ms, 1 errors, 1 shed")


def test_what_is_unknown_is_not_shown() -> None:
    state = Progress("1 client", None, 5)
    state.add(Sample(0.0, 0.04, 500, 1, 1, 1))
    assert ": 0 s, 1 of 5 answers, 0.0/s, 1 errors" in str(state.__rich__())
