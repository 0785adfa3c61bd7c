"""The machine and the files around a server: cores, memory, GPUs, snapshots."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

from handlers.cores import cores
from scripts.lib.diagnosis.deployment import Host

_SECONDS = 10


def this_host() -> Host:
    """This machine, its GPUs as TorchServe finds NVIDIA's: by nvidia-smi."""
    return Host(cores(), psutil.virtual_memory().total, _gpus())


def _gpus() -> tuple[int, ...]:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return tuple(int(line) << 20 for line in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()  # none, or none that TorchServe would find


def snapshots(directories: Iterable[Path], log: Path | None = None) -> tuple[Path, ...]:
    """The snapshots under these directories, in which TorchServe was or will be started, the newest last.

    TorchServe keeps them in `config` below its log directory ($LOG_LOCATION, or `logs`), named after the time.

    Args:
        directories: where it is started.
        log: a log of its, which lies in its log directory.
    """
    found: set[Path] = set()
    kept = [directory / os.environ.get("LOG_LOCATION", "logs") for directory in directories]
    for logs in [*kept, log.parent] if log else kept:
        try:
            found |= {path.absolute() for path in (logs / "config").glob("[0-9]*.cfg") if path.is_file()}
        except OSError:
            continue
    return tuple(sorted(found, key=lambda path: path.name))
