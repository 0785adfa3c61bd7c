"""A model's requirements.txt: what TorchServe would install for it, checked before it does harm.

TorchServe runs `pip install -U -t MODEL_DIRECTORY -r requirements.txt`, which sees nothing of what is installed: torch,
named or only needed by something named, would be downloaded again and shadow the server's own. What a package needs is
looked up where it is installed here; one that isn't can't be judged without a network, and is refused.
"""

import re
from collections.abc import Set
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from scripts.lib.errors import UserError

#: What the worker brings along, and no archive may install again.
PROVIDED = frozenset(
    {"torch", "torchvision", "torchaudio", "torchtext", "torchserve", "torch-model-archiver", "transformers",
     "tokenizers", "safetensors"}
)  # fmt: skip

_CONTINUED = re.compile(r"\\\n")
_COMMENT = re.compile(r"(^|\s)#.*$")
_OPTIONS_OF_A_LINE = re.compile(r"\s--[a-z].*$")
_EGG = re.compile(r"[#&]egg=([A-Za-z0-9._-]+(?:\[[A-Za-z0-9._, -]*\])?)")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2")
# Options that need no file of their own in the archive.
_HARMLESS = frozenset(
    {"-i", "--index-url", "--extra-index-url", "--no-index", "--pre", "--prefer-binary", "--trusted-host",
     "--only-binary", "--no-binary", "--require-hashes", "--use-feature"}
)  # fmt: skip


def read(path: Path) -> bytes:
    """The requirements file as the archive carries it: included files are written out in it.

    Raises:
        UserError: a line can't be read, needs a file that the archive doesn't have, or would install again what the
            worker brings along.
    """
    lines = _lines(path, ())
    for where, line in lines:
        _check(where, line)
    text = "".join(f"{line}\n" for _, line in lines)
    return text.encode("utf-8")


def _lines(path: Path, above: tuple[Path, ...]) -> list[tuple[str, str]]:
    """(file:line, text) of every line that says something, includes followed."""
    real = path.resolve()
    if real in above:
        raise UserError(f"{path} includes itself", "remove one of the -r lines")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}", "check --requirements, and the -r lines in it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}", "it is a text file in UTF-8") from error
    found = []
    for number, raw in enumerate(_CONTINUED.sub(" ", text).splitlines(), 1):
        line = _COMMENT.sub("", raw).strip()
        where = f"{path.name}:{number}"
        option, _, value = line.replace("=", " ", 1).partition(" ") if line.startswith("--") else line.partition(" ")
        if line.startswith("-r") and not line.startswith("-r ") and len(line) > 2:
            option, value = "-r", line[2:]
        if option in ("-r", "--requirement"):
            found += _lines(path.parent / value.strip(), (*above, real))
        elif line:
            found.append((where, line))
    return found


def _check(where: str, line: str) -> None:
    if line.startswith("-"):
        for word in line.split():  # pip takes several options in a line
            if word.startswith("-") and word.partition("=")[0] not in _HARMLESS:
                raise UserError(f"{where}: {word} can't be used", "the archive carries no file but this one")
        return
    requirement = _requirement(where, line)
    if requirement is None:
        return
    name = str(canonicalize_name(requirement.name))
    try:
        guilty = _brings(requirement, set())
    except metadata.PackageNotFoundError as error:
        missing = str(error.name)
        subject = name if missing == name else f"{name} needs {missing}, which"
        raise UserError(
            f"{where}: {subject} is not installed here, so what it brings along can't be checked",
            f"install it here first: pip install {missing}",
        ) from error
    if guilty == name:
        raise UserError(
            f"{where}: this would install {name} again, beside the worker's own", f"remove it: every worker has {name}"
        )
    if guilty:
        raise UserError(
            f"{where}: {name} needs {guilty}, and this would install that again, beside the worker's own",
            f"install {name} in the server's environment instead",
        )


def _requirement(where: str, line: str) -> Requirement | None:
    """What a line installs; None when its marker says not here."""
    bare = _OPTIONS_OF_A_LINE.sub("", line).strip()
    if "://" not in bare and (bare.startswith((".", "/")) or bare.endswith(_ARCHIVES)):
        raise UserError(f"{where}: {bare} is a file", "the archive carries no file but this one")
    try:
        requirement = Requirement(bare)
    except InvalidRequirement as error:
        if "://" not in bare:
            raise UserError(f"{where}: {bare!r} is no requirement", "as in requests>=2.31") from error
        return Requirement(_name_in_url(where, bare))
    if requirement.url and requirement.url.startswith("file:"):
        raise UserError(f"{where}: {bare} is a file", "the archive carries no file but this one")
    return requirement if _applies(requirement, frozenset()) else None


def _applies(requirement: Requirement, extras: Set[str]) -> bool:
    """Whether a requirement of a package counts here, with these extras of the package asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _name_in_url(where: str, url: str) -> str:
    if egg := _EGG.search(unquote(url)):
        return egg[1]
    try:
        return str(canonicalize_name(parse_wheel_filename(unquote(url.partition("#")[0].rpartition("/")[2]))[0]))
    except InvalidWheelFilename as error:
        raise UserError(f"{where}: {url} does not say what it installs", "write it as NAME @ URL") from error


def _brings(requirement: Requirement, seen: set[tuple[str, str]]) -> str | None:
    """The first of PROVIDED that installing `requirement` installs, as far as what is installed here tells.

    Args:
        requirement: with its extras.
        seen: names, each with an extra or "", that have been looked at; grows.

    Raises:
        importlib.metadata.PackageNotFoundError: the package, or one that it needs, is not installed here.
    """
    name = str(canonicalize_name(requirement.name))
    if name in PROVIDED:
        return name
    asked = {"", *(str(canonicalize_name(extra)) for extra in requirement.extras)}
    new = {extra for extra in asked if (name, extra) not in seen}
    if not new:
        return None
    seen |= {(name, extra) for extra in new}
    for text in metadata.distribution(name).requires or []:
        needed = Requirement(text)
        if _applies(needed, new) and (found := _brings(needed, seen)):
            return found
    return None
