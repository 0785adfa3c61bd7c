"""An environment of a peer's own, made from PyPI once and kept."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.lineup import Peer
from scripts.lib.errors import UserError
from scripts.lib.properties import REPOSITORY

CONSTRAINTS = REPOSITORY / "constraints.txt"
STAMP = "installed.txt"
_TOLD_LINES = 5


def pins(constraints: str, torch: str, torch_only: bool) -> str:
    """The versions that an environment is installed with.

    Args:
        constraints: the text of constraints.txt.
        torch: the version here. Its local part names the build: a peer gets the CPU build where we have it, and not
            PyPI's for CUDA of several GB.
        torch_only: whether only torch is pinned.
    """
    others = [] if torch_only else [line for line in constraints.splitlines() if not line.startswith("torch==")]
    return "\n".join([*others, f"torch=={torch}", ""])


def make(peer: Peer, directory: Path) -> Path:
    """The environment's interpreter; the environment is made if it isn't there or what it should hold has changed.

    Args:
        peer: who runs in it.
        directory: where environments are kept.

    Raises:
        UserError: pip can't install it; the message has pip's last lines.
    """
    home = (directory / peer.environment).absolute()
    python, stamp, log = home / "bin" / "python", home / STAMP, directory / f"{peer.environment}.log"
    pinned = pins(CONSTRAINTS.read_text(encoding="utf-8"), version("torch"), peer.torch_only)
    wanted = hashlib.sha256("\n".join([sys.version, *peer.requirements]).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="ascii").strip() == wanted and _as_pinned(python, pinned):
        return python
    shutil.rmtree(home, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as told:
        _run([sys.executable, "-I", "-m", "venv", str(home)], told.fileno(), log)
        constraints = home / "constraints.txt"
        constraints.write_text(pinned, encoding="utf-8")
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-input",
            "--progress-bar",
            "off",
        ]
        _run([*pip, "--no-compile", "-c", str(constraints), *peer.requirements], told.fileno(), log)
    stamp.write_text(f"{wanted}\n", encoding="ascii")
    return python


def _as_pinned(python: Path, pinned: str) -> bool:
    """Whether what is installed has the pinned versions; a pin of what isn't needed there changes nothing."""
    wanted = dict(line.split("==") for line in pinned.splitlines() if "==" in line)
    return all(wanted[name] == number for name, number in versions(python, list(wanted)).items())


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """The versions of installed packages, those that are not there left out."""
    script = (
        "import importlib.metadata as m, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, m.version(name))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    told = subprocess.run([python, "-I", "-c", script, *packages], capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ", 1) for line in told.splitlines())


def _run(command: list[str], output: int, log: Path) -> None:
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TOLD_LINES:]
        raise UserError("can't be installed: " + " · ".join(line.strip() for line in last), hint=f"all of it: {log}")
