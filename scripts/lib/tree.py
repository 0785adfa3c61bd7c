"""A directory tree as archive members: every file under its name, links followed, nothing dropped in silence."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from scripts.lib.errors import UserError


@dataclass(frozen=True)
class LeftOut:
    """A file of the source that the archive doesn't carry, and why."""

    path: str
    reason: str


def check_name(name: str) -> str:
    """`name` if an archive can carry it as a member's path, on every tool that unpacks archives.

    Raises:
        UserError: it is absolute, climbs out with `..`, isn't text, or holds a backslash or a control character.
    """
    shown = ascii(name)
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"the file name {shown} is not valid UTF-8", "rename the file") from error
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "." in parts or "" in parts:
        raise UserError(f"{shown} is no path inside an archive", "names are relative, without . and ..")
    if "\\" in name or any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise UserError(f"the file name {shown} holds a backslash or a control character", "rename the file")
    return name


def walk(directory: Path) -> dict[str, Path]:
    """Every file below `directory`: its path relative to it (POSIX) → the file, sorted by path.

    Links to files and directories are followed, wherever they lead (a hub's cache is made of them). Empty directories
    have no member.

    Raises:
        UserError: a broken link, a loop of links, something that isn't a file or a directory, a file that can't be
            read, or a name that no archive can carry.
    """
    files: dict[str, Path] = {}
    _walk(directory, PurePosixPath(), (Path(os.path.realpath(directory)),), files)
    return dict(sorted(files.items()))


def _walk(directory: Path, prefix: PurePosixPath, ancestors: tuple[Path, ...], files: dict[str, Path]) -> None:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except PermissionError as error:
        raise UserError(
            f"{directory} can't be read: {error.strerror}", "change its permissions, or move it away"
        ) from error
    for entry in entries:
        path = Path(entry.path)
        name = check_name(str(prefix / entry.name))
        try:
            mode = entry.stat().st_mode
        except FileNotFoundError as error:
            raise UserError(f"{path} is a broken link to {_target(path)}", "repair it or remove it") from error
        except OSError as error:  # ELOOP
            raise UserError(
                f"{path} is a link that can't be followed: {error.strerror}", "repair or remove it"
            ) from error
        if stat.S_ISREG(mode):
            if not os.access(path, os.R_OK):
                raise UserError(f"{path} can't be read", "change its permissions, or move it away")
            files[name] = path
        elif stat.S_ISDIR(mode):
            real = Path(os.path.realpath(path))
            if any(ancestor == real or real in ancestor.parents for ancestor in ancestors):
                raise UserError(f"{path} is a link to a directory that holds it: a loop", "remove the link")
            _walk(path, prefix / entry.name, (*ancestors, real), files)
        else:
            raise UserError(f"{path} is {_kind(mode)}, not a file", "move it out of the model's directory")


def _target(path: Path) -> str:
    try:
        return ascii(str(path.readlink()))
    except OSError:
        return "nothing"


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a device",
        stat.S_IFCHR: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something special")
