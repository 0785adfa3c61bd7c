"""What a finding is."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is: it breaks or loses answers; it costs or surprises; it is worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        code: stable, for programs.
        severity: how bad it is.
        where: file and line, archive, model or server.
        what: what is there.
        consequence: what it does.
        fix: what to do about it.
    """

    code: str
    severity: Severity
    where: str
    what: str
    consequence: str
    fix: str
