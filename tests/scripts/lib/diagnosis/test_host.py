"""The machine and the snapshots around a server."""

import os
import subprocess
from pathlib import Path

import pytest

from scripts.lib.diagnosis.host import snapshots, this_host


def test_snapshots_come_by_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOG_LOCATION", raising=False)
    config = tmp_path / "logs" / "config"
    config.mkdir(parents=True)
    for name in ("20260102000000000-startup.cfg", "20260101000000000-shutdown.cfg", "notes.txt"):
        (config / name).touch()
    assert [path.name[:8] for path in snapshots([tmp_path, tmp_path, tmp_path / "gone"])] == ["20260101", "20260102"]
    monkeypatch.setenv("LOG_LOCATION", str(tmp_path / "elsewhere"))
    assert snapshots([tmp_path]) == ()
    assert len(snapshots([], log=tmp_path / "logs" / "ts_log.log")) == 2


@pytest.mark.parametrize(
    ("printed", "gpus"), [("8192\n4096\n", (8 << 30, 4 << 30)), ("No devices were found", ()), ("", ())]
)
def test_gpus_are_those_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, gpus: tuple[int, ...]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    program.chmod(0o755)
    assert subprocess.run([program], capture_output=True, check=True).stdout.decode() == printed
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    host = this_host()
    assert host.gpus == gpus
    assert host.cores >= 1
    assert host.memory > 1 << 20


def test_no_gpus_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_host().gpus == ()
