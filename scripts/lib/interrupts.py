"""Signals that ask a command to end, as exceptions that unwind it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the status of a command that Ctrl-C ended


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn TERM and HUP into SystemExit and INT into KeyboardInterrupt inside the block, so that servers are stopped.

    A HUP that is ignored stays ignored: that is what nohup asks for. INT is not: shells ignore it for commands in the
    background, which then could not be interrupted at all.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
