"""Processes started through multiprocessing end with the one that started them, and only then."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PARENT = """
import multiprocessing, sys, time
sys.path.insert(0, sys.argv[1])
from handlers.generation.vllm_guard import Guard, running

def child(pipe):
    grandchild = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    grandchild.start()
    pipe.send(grandchild.pid)
    time.sleep(300)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    other = context.Process(target=time.sleep, args=(300,))
    other.start()
    before = running()
    here, there = context.Pipe()
    started = context.Process(target=child, args=(there,))
    started.start()
    grandchild = here.recv()
    guard = Guard(before)
    if sys.argv[2] == "released":
        guard.release()
    print(other.pid, started.pid, grandchild, flush=True)
    time.sleep(300)
"""


def gone(process: psutil.Process, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("kept", ["watched", "released"])
def test_what_was_started_ends_with_its_parent(kept: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(REPOSITORY), kept], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    other, started, grandchild = (psutil.Process(int(word)) for word in parent.stdout.readline().split())
    try:
        assert not gone(started, 0.5)
        parent.kill()
        parent.wait()
        if kept == "watched":
            assert gone(started, 20)
            assert gone(grandchild, 20)
        else:
            assert not gone(started, 1)
        assert not gone(other, 0.1)  # it was not started with what is watched
    finally:
        for process in (other, started, grandchild):
            if process.is_running():
                process.kill()
        parent.stdout.close()
