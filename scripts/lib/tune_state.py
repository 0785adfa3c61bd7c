"""What a tune has measured so far, in a file: an interrupted one goes on from there, a finished one is shown again."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from scripts.lib.costs import Profile
from scripts.lib.errors import UserError
from scripts.lib.state import STATE_ROOT
from scripts.lib.tuning import Outcome, Point

DIRECTORY = STATE_ROOT / "tune"
_LETTERS = 12  # of the key in the file's name


class Costs(BaseModel):
    """A profile of the archive at so many threads (None: as torch chooses) and in a dtype (None: its own)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: int | None
    dtype: str | None
    profile: Profile


class Finished(BaseModel):
    """The end of a search: what it was allowed, over which settings, and what it found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget_s: float
    space: str
    outcome: Outcome


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    key: str
    costs: list[Costs]
    points: list[Point]
    finished: Finished | None


@dataclass
class TuneState:
    """The file, read once and written whole after every change.

    Args:
        path: of the file.
        key: of what the measurements depend on.
    """

    path: Path
    key: str
    costs: list[Costs] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    finished: Finished | None = None

    @classmethod
    def open(cls, directory: Path, name: str, about: Mapping[str, Any], *, fresh: bool = False) -> "TuneState":
        """The state of a tune: what an earlier run with the same `about` left, or an empty one.

        Windows that failed are left out: what was in their way may be gone.

        Args:
            directory: of such files; made when it is not there.
            name: of the model.
            about: all that the measurements depend on.
            fresh: leave out what is there.

        Raises:
            UserError: the directory can't be made.
        """
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory} can't be made: {error.strerror}", "name another one: --report") from error
        found = cls(directory / f"{name}-{key[:_LETTERS]}.json", key)
        try:
            content = None if fresh else _Content.model_validate_json(found.path.read_bytes())
        except (OSError, ValidationError):  # none yet, or of another version: measured again
            content = None
        if content is not None and content.key == key:
            found.costs, found.finished = list(content.costs), content.finished
            found.points = [point for point in content.points if not point.failure]
        return found

    def save(self) -> None:
        """Write it.

        Raises:
            UserError: it can't be written.
        """
        content = _Content(key=self.key, costs=self.costs, points=self.points, finished=self.finished)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"{self.path} can't be written: {error.strerror}") from error
