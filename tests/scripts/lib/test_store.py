"""scripts.lib.store: one step from nothing to a whole archive, and no rests."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib import store
from scripts.lib.errors import UserError


def test_a_workspace_is_hidden_and_goes(tmp_path: Path) -> None:
    with store.workspace(tmp_path / "new" / "store", "m") as work:
        assert work.name.startswith(f".m.mar.{os.getpid()}.")
        assert store.remove_leftovers(tmp_path / "new" / "store") == []
        (work / "file").touch()
    assert list((tmp_path / "new" / "store").iterdir()) == []
    with pytest.raises(ZeroDivisionError), store.workspace(tmp_path / "new" / "store", "m"):
        _ = 1 / 0
    assert list((tmp_path / "new" / "store").iterdir()) == []


def test_only_what_a_dead_build_left_is_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = tmp_path / f".m.mar.{child.pid}.abcdefgh.tmp"
    names = [
        f".m.mar.{os.getpid()}.abcdefgh.tmp",
        ".m.mar.x.tmp",
        "m.mar",
        ".other",
        f".m.mar.{child.pid}.abcdefgh.tmp2",
    ]
    for path in (dead, *(tmp_path / name for name in names)):
        path.mkdir()
        (path / "lock").touch()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f".n.mar.{child.pid}.abcdefgh.tmp").symlink_to(target)
    young = tmp_path / f".young.mar.{child.pid}.abcdefgh.tmp"
    young.mkdir()  # no lock yet: perhaps it is only being made, in another container
    assert store.remove_leftovers(tmp_path) == [dead]
    assert {path.name for path in tmp_path.iterdir()} == {
        *names, "target", young.name, f".n.mar.{child.pid}.abcdefgh.tmp",
    }  # fmt: skip


def test_a_locked_workspace_stays_whatever_its_process_id_says(tmp_path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from scripts.lib import store\n"
        "with store.workspace(Path(sys.argv[1]), 'm') as work: print(work.name, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    elsewhere = tmp_path / name.replace(f".{child.pid}.", f".{gone.pid}.")
    (tmp_path / name).rename(elsewhere)
    assert store.remove_leftovers(tmp_path) == []
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    if child.stdin is not None:
        child.stdin.close()
    assert store.remove_leftovers(tmp_path) == [elsewhere]


def test_publish(tmp_path: Path) -> None:
    def built(content: str) -> Path:
        (tmp_path / "built").write_text(content)
        return tmp_path / "built"

    final = tmp_path / "m.mar"
    assert store.publish(built("one"), final, replace=False)
    assert final.stat().st_mode & 0o777 == 0o666 & ~store._umask()
    (tmp_path / "built").unlink()
    assert not store.publish(built("one"), final, replace=False)
    with pytest.raises(UserError, match=r"m\.mar exists"):
        store.publish(built("two"), final, replace=False)
    assert final.read_text() == "one"
    assert store.publish(built("two"), final, replace=True)
    assert final.read_text() == "two"


def test_publish_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    (tmp_path / "built").write_text("one")
    assert store.publish(tmp_path / "built", tmp_path / "m.mar", replace=False)
    assert (tmp_path / "m.mar").read_text() == "one"


def test_a_store_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="is not a directory"), store.workspace(path, "m"):
            pass
