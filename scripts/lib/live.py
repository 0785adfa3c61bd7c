"""What is seen of a load while it runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.text import Text

from scripts.lib.console import err_console, progress
from scripts.lib.load import OnSample, Sample
from scripts.lib.load_plan import Closed, Load
from scripts.lib.stats import SHED, percentile

REFRESHES_PER_S = 4  # of a terminal: each costs the generator time
RECENT = 500  # samples that the p95 is of


class Progress:
    """The state of a window under way, as a line that is made when the terminal asks for it.

    Args:
        label: of the window.
        seconds, requests: how long it lasts, where that is known.
    """

    def __init__(self, label: str, seconds: float | None, requests: int | None) -> None:
        self._label = label
        self._seconds = seconds
        self._requests = requests
        self._start = time.monotonic()
        self._latencies: list[float] = []
        self._errors = self._shed = 0

    def add(self, sample: Sample) -> None:
        """Take in a sample."""
        if not self._latencies and not self._errors and not self._shed:
            self._start = time.monotonic() - sample.due_s - sample.latency_s  # the warm-up is over
        if sample.ok:
            self._latencies.append(sample.latency_s * 1e3)
        elif sample.status in SHED:
            self._shed += 1
        else:
            self._errors += 1

    def __rich__(self) -> Text:
        ended = len(self._latencies) + self._errors + self._shed
        if not ended:
            return Text(f"{self._label}: warming up")
        passed = time.monotonic() - self._start
        until = "" if self._seconds is None else f" of {self._seconds:g}"
        counted = "" if self._requests is None else f" of {self._requests}"
        p95 = percentile(self._latencies[-RECENT:], 95)
        parts = [
            f"{self._label}: {passed:.0f}{until} s",
            f"{ended}{counted} answers",
            f"{len(self._latencies) / max(passed, 1e-9):.1f}/s",
            "" if p95 is None else f"p95 {p95:.0f} ms",
            f"{self._errors} errors" if self._errors else "",
            f"{self._shed} shed" if self._shed else "",
        ]
        return Text(", ".join(part for part in parts if part))


@contextmanager
def shown(label: str, load: Load) -> Iterator[OnSample]:
    """Show a window while it is measured: a line that changes on a terminal, elsewhere one before and one after."""
    state = Progress(label, load.seconds, load.requests if isinstance(load, Closed) else None)
    if not err_console.is_terminal:
        with progress(label):
            yield state.add
        return
    with err_console.status(state, refresh_per_second=REFRESHES_PER_S):
        yield state.add
    err_console.print(state)
