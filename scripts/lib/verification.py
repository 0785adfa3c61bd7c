"""Proof that a finished archive works: its bytes, and one text answered in a process that knows nothing of us."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib import archive, integrity
from scripts.lib.errors import UserError
from scripts.lib.user_handler import clean_environment

SECONDS = 900
_SERVICE = Path(__file__).with_name("service.py")
_SHOWN = 40  # lines of a failed worker's error


def verify(path: Path, expected: dict[str, archive.Member], work: Path) -> dict[str, Any]:
    """Check members, manifest and checksums, then load the archive in a clean process and send it one text.

    Args:
        path: the archive.
        expected: the members that were meant to be in it.
        work: a directory of the build's own: the archive is unpacked there, and the process keeps its files there.

    Returns:
        What the process says of the model.

    Raises:
        UserError: something is wrong; a worker's error is shown as it is.
    """
    wrong = integrity.problems(path)
    whole = archive.read(path)
    if whole.sizes != {name: member.size for name, member in sorted(expected.items())}:
        wrong.append("its members are not the ones that were packed")
    if wrong:
        raise UserError(
            f"the archive that was written is not intact: {'; '.join(wrong)}", "check the disk, build again"
        )
    extracted = work / "extracted"
    archive.extract(path, extracted)
    temporary = work / "tmp"
    temporary.mkdir()
    return answer_one(extracted, temporary)


def answer_one(directory: Path, temporary: Path, *, seconds: float = SECONDS) -> dict[str, Any]:
    """Load an extracted archive in a clean process, send it one text, and return the process's report.

    Args:
        directory: the extracted archive, an absolute path.
        temporary: the process's current and temporary directory, likewise.
        seconds: the most it may take.

    Raises:
        UserError: it fails or takes too long.
    """
    return _reports([str(directory)], temporary, 1, seconds)[0]


def answer_all(directory: Path, temporary: Path, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Load an extracted archive in a clean process and send it requests, one after the other, however long it takes.

    Args:
        directory, temporary: as for `answer_one`.
        bodies: what to send, as JSON.

    Returns:
        `status` and decoded `body` of each answer.

    Raises:
        UserError: the archive does not load.
    """
    lines = temporary / "bodies.jsonl"
    lines.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")
    return _reports([str(directory), str(lines)], temporary, len(bodies) + 1, None)[:-1]


def _reports(arguments: list[str], temporary: Path, count: int, seconds: float | None) -> list[dict[str, Any]]:
    """The last `count` JSON objects that the process prints, one a line."""
    # -I: neither PYTHONPATH nor the current directory nor the user's site
    command = [sys.executable, "-I", str(_SERVICE), *arguments]
    environment = clean_environment(temporary) | {"HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=temporary, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"the archive did not answer one text within {seconds:.0f} s", "nothing was put in place"
        ) from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        raise UserError(
            "the archive does not load and answer in a clean process; its error was:\n" + "\n".join(lines[-_SHOWN:]),
            "nothing was put in place",
        )
    try:
        reports = [dict(json.loads(line)) for line in done.stdout.splitlines()[-count:]]
    except ValueError as error:
        raise UserError("the archive's process gave no report", "nothing was put in place") from error
    if len(reports) != count:
        raise UserError("the archive's process gave no report", "nothing was put in place")
    return reports
