"""The supervisor on a command that is no server; a real one is in tests/e2e."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.lib import supervisor


@pytest.mark.parametrize("other", [False, True])
def test_only_its_own_note_of_the_process_id_is_removed(tmp_path: Path, other: bool) -> None:
    """An old supervisor may end after a new server has written its note."""
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-I", supervisor.__file__, str(tmp_path / "scratch"), "sleep", "600"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path)
    note = tmp_path / "java.pid"
    until = time.monotonic() + 30
    while not (note.exists() and note.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    child = int(note.read_text())
    if other:
        note.write_text("1\n")
    process.communicate(supervisor.KILL, timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert note.exists() is other
    assert not (tmp_path / "scratch").exists()
