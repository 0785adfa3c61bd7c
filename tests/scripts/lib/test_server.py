"""What a start that fails leaves behind; real servers are in tests/e2e."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from scripts.lib import launch, server
from scripts.lib.addresses import free_ports
from scripts.lib.errors import UserError
from scripts.lib.server import TorchServe
from scripts.lib.state import SCRATCH_NOTE, lock


@pytest.fixture
def unstarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchServe:
    """A server that could be started; its scratch directory would be in tmp_path/temporary."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    names = ("inference_address", "management_address", "metrics_address")
    lines = [f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, free_ports(3), strict=True)]
    grpc = zip(("grpc_inference_port", "grpc_management_port"), free_ports(2), strict=True)
    lines += [f"{name}={port}" for name, port in grpc]
    (tmp_path / "config.properties").write_text("\n".join(lines))
    return TorchServe(tmp_path / "config.properties", tmp_path, java=Path("java"), work_dir=tmp_path / "state")


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("no more processes")


@pytest.mark.parametrize("broken", ["note", "process", "command"])
def test_a_start_that_fails_gives_the_state_directory_back(
    unstarted: TorchServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "note":
        original = Path.write_text
        monkeypatch.setattr(
            Path, "write_text", lambda path, *a, **k: refuse() if path.name == SCRATCH_NOTE else original(path, *a, **k)
        )
    elif broken == "process":
        monkeypatch.setattr(subprocess, "Popen", refuse)
    else:
        monkeypatch.setattr(launch, "command", refuse)
    with pytest.raises(UserError, match="no more processes"):
        unstarted.start()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (unstarted.work_dir / SCRATCH_NOTE).exists()
    lock(unstarted.work_dir).close()


def test_a_state_that_cannot_be_written_ends_the_process_again(
    unstarted: TorchServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "command", lambda *_: ["sleep", "600"])
    monkeypatch.setattr(server.State, "write", refuse)
    with pytest.raises(UserError, match="no more processes"):
        unstarted.start()
    assert not unstarted.running
    assert unstarted.processes() == []
    assert list((tmp_path / "temporary").iterdir()) == []
    lock(unstarted.work_dir).close()
