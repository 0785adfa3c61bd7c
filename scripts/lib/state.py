"""What a started server leaves in its state directory for other commands: where it listens, and its keys."""

import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Literal

import psutil

from scripts.lib.errors import UserError

STATE_ROOT = Path(".batchserve")
KEY_FILE = "key_file.json"
#: Holds the path of the server's scratch directory.
SCRATCH_NOTE = "scratch"
#: How the names of scratch directories start.
SCRATCH_PREFIX = "batchserve-"
_STATE_FILE = "state.json"

Key = Literal["inference", "management"]


@dataclass(frozen=True)
class State:
    """A server that `TorchServe.start` started. `pid` is its supervisor's, `started` seconds since the epoch."""

    pid: int
    inference: str
    management: str
    metrics: str
    properties: str
    auth: str
    started: float = field(default_factory=time.time)

    def write(self, directory: Path) -> None:
        """Put it into the server's state directory."""
        (directory / _STATE_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @property
    def alive(self) -> bool:
        """Whether the process is there and is no other one with the same number."""
        try:
            return any(Path(part).name == "supervisor.py" for part in psutil.Process(self.pid).cmdline())
        except psutil.Error:
            return False


def make_directory(directory: Path) -> None:
    """Make a server's state directory, and the one it is in, for its owner alone; `logs` is inside.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        for each in (directory.parent, directory):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        (directory / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"state directory {directory}: {error.strerror}") from None


def lock(directory: Path) -> IO[bytes]:
    """Hold a state directory for one server, until the returned file is closed.

    Raises:
        UserError: another server holds it.
    """
    file = (directory / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(
            f"another server is starting or running with the state directory {directory}",
            hint="stop it, or choose another inference_port in serving.yaml",
        ) from None
    return file


def forget(directory: Path) -> None:
    """Remove what names a server that is gone (not its logs)."""
    for name in (KEY_FILE, _STATE_FILE, "java.pid"):
        (directory / name).unlink(missing_ok=True)


def running(root: Path = STATE_ROOT) -> dict[Path, State]:
    """The living servers whose state directories are in `root`, by directory."""
    found = {}
    for path in sorted(root.glob(f"*/{_STATE_FILE}")):
        try:
            state = State(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if state.alive:
            found[path.parent] = state
    return found


def sweep(directory: Path) -> None:
    """Remove the scratch directory that a state directory's server made: at its end, or what a killed one left.

    The note that names it is a file like any other: what it names is only removed if it looks as `launch` makes them.
    """
    note = directory / SCRATCH_NOTE
    if note.exists():
        scratch = Path(note.read_text(encoding="utf-8", errors="surrogateescape"))
        if _is_scratch(scratch):
            shutil.rmtree(scratch, ignore_errors=True)
        note.unlink()


def _is_scratch(path: Path) -> bool:
    """Whether `path` is a directory of this user's (no link), named as ours are, right inside a temporary one."""
    try:
        found = path.lstat()
        temporary = {Path(place).resolve() for place in (tempfile.gettempdir(), "/tmp")}
        return (
            path.name.startswith(SCRATCH_PREFIX)
            and stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and path.is_absolute()
            and path.parent.resolve() in temporary
        )
    except (OSError, ValueError):  # ValueError: a null byte
        return False


def read_key(path: Path, kind: Key) -> str:
    """The current key in a key_file.json that TorchServe wrote.

    Raises:
        UserError: the file is missing or not readable, or the key has expired.
    """
    try:
        content: Mapping[str, Mapping[str, object]] = json.loads(path.read_text(encoding="utf-8"))
        key, expires = str(content[kind]["key"]), str(content[kind]["expiration time"])
        # Java writes nanoseconds; Python reads at most microseconds.
        moment = datetime.fromisoformat(expires[:19]).replace(tzinfo=UTC)
    except FileNotFoundError:
        raise UserError(f"{path}: no key file there: no server runs from here, or it uses no tokens") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a key file of TorchServe: {error}") from None
    if moment < datetime.now(UTC):
        raise UserError(
            f"{path}: the {kind} key expired at {moment:%Y-%m-%d %H:%M} UTC",
            hint="restart the server, with a larger server.token_expiration_min",
        )
    return key
