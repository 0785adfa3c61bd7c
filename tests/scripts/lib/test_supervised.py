"""A supervised command that is no server; TorchServe as one is in tests/e2e."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.lib.supervised import Supervised

# Says what it sees, then lives on beside a child of its own.
TREE = """
import os, subprocess, sys, time
print(os.getcwd(), os.environ["TMPDIR"], os.environ["MINE"], os.environ.get("PYTHONPATH"), flush=True)
subprocess.Popen(["sleep", "600"])
time.sleep(600)
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    made = tmp_path / "scratch"
    made.mkdir()
    return made


@pytest.fixture
def tree(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    started = Supervised([sys.executable, "-c", TREE], scratch, tmp_path, tmp_path / "output", {"MINE": "set"})
    yield started
    started.stop(graceful=False)


def with_child(tree: Supervised) -> list[psutil.Process]:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = tree.processes()
        if "sleep" in {process.name() for process in found}:
            return found
        time.sleep(0.02)
    raise AssertionError("its child does not start")


@pytest.mark.parametrize("graceful", [True, False])
def test_nothing_of_it_stays(tree: Supervised, scratch: Path, graceful: bool) -> None:
    listed = with_child(tree)
    assert len(listed) == 2
    assert tree.pid not in {process.pid for process in listed}
    assert tree.running
    tree.stop(graceful)
    assert not any(process.is_running() for process in listed)
    assert (tree.running, tree.processes(), scratch.exists()) == (False, [], False)
    tree.stop(graceful)


def test_what_it_is_given(tree: Supervised, scratch: Path, tmp_path: Path) -> None:
    with_child(tree)
    assert (tmp_path / "output").read_text().split() == [str(tmp_path), str(scratch), "set", "None"]


def test_one_that_ends_by_itself(tmp_path: Path, scratch: Path) -> None:
    ended = Supervised(["sh", "-c", "echo why >&2; exit 3"], scratch, tmp_path, tmp_path / "output", {})
    assert ended.wait() == 3
    assert (tmp_path / "output").read_text() == "why\n"
    ended.stop()


def test_one_that_cannot_be_started_leaves_no_scratch(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="no more processes"):
        Supervised(["true"], scratch, tmp_path, tmp_path / "output", {})
    assert not scratch.exists()
