"""Memory of processes: all count, and the peak outlives them."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from scripts.lib.memory import PeakMemory, total_memory

SIZE = 60_000_000
# A parent whose child holds the memory and then gives it back.
CHILD = f"import sys; x = bytearray({SIZE}); print('held', flush=True); sys.stdin.readline(); del x"
PARENT = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}]); print('freed', flush=True); input()"
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with started:
        yield started
        started.kill()


def test_children_count_and_the_peak_is_kept(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"

    def tree() -> list[psutil.Process]:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children()]

    with PeakMemory(tree, every_s=0.02) as memory:
        time.sleep(0.1)
        assert total_memory(tree()) > SIZE
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "freed\n"
        assert total_memory(tree()) < SIZE
    assert SIZE < memory.peak < 3 * SIZE


def test_a_process_that_is_gone_holds_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = psutil.Process(gone.pid)
    gone.communicate(b"\n")
    assert total_memory([known]) == 0
