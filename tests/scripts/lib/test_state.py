"""What a state directory's note may have removed."""

import tempfile
from pathlib import Path

import pytest

from scripts.lib.state import SCRATCH_NOTE, sweep


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def swept(directory: Path, named: str) -> None:
    (directory / SCRATCH_NOTE).write_text(named)
    sweep(directory)
    assert not (directory / SCRATCH_NOTE).exists()


def test_a_servers_scratch_directory_is_removed(tmp_path: Path, temporary: Path) -> None:
    scratch = temporary / "batchserve-abc"
    (scratch / "models").mkdir(parents=True)
    swept(tmp_path, str(scratch))
    assert list(temporary.iterdir()) == []
    swept(tmp_path, str(scratch))
    swept(tmp_path, "\0")


@pytest.mark.parametrize("place", ["elsewhere/batchserve-abc", "temporary/documents", "temporary/batchserve-x/../mine"])
def test_nothing_else_is(tmp_path: Path, temporary: Path, place: str) -> None:
    (temporary / "batchserve-x").mkdir()
    (temporary / "mine").mkdir()
    path = tmp_path / place
    path.mkdir(parents=True, exist_ok=True)
    swept(tmp_path, str(path))
    assert path.is_dir()


def test_a_link_is_not_followed_and_relative_paths_are_not_taken(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    link = temporary / "batchserve-link"
    link.symlink_to(tmp_path / "mine")
    swept(tmp_path, str(link))
    assert link.is_symlink()
    monkeypatch.chdir(temporary)
    (temporary / "batchserve-y").mkdir()
    swept(tmp_path, "batchserve-y")
    assert (temporary / "batchserve-y").is_dir()
