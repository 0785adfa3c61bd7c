"""The model archive (.mar): its layout, written the same way every time, read back and checked.

A ZIP whose members are stored (weights don't deflate), sorted, and carry one fixed date: same inputs, same bytes.
Besides TorchServe's manifest it holds MAR-INF/PROVENANCE.json, which names the SHA-256 of every other member.
"""

import hashlib
import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import yaml

from scripts.lib.errors import UserError
from scripts.lib.tree import check_name

MANIFEST = "MAR-INF/MANIFEST.json"
PROVENANCE = "MAR-INF/PROVENANCE.json"
CONFIG = "model-config.yaml"
REQUIREMENTS = "requirements.txt"

#: What a member is made of: a file on disk, or bytes made by the builder.
Content = Path | bytes

_DATE = (1980, 1, 1, 0, 0, 0)
_CREATED_ON = "01/01/1980 00:00:00"
_CHUNK = 1 << 20
_EXPANSION = 20  # weights hardly compress; texts such as vocabularies by less than this
_SMALL = 64 << 20  # bytes that may come out of any archive
#: What reading a damaged ZIP file raises; RuntimeError for members that claim to be encrypted or oddly compressed.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError, struct.error)
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Member:
    """A member's SHA-256 (hex) and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Archive:
    """What an archive says of itself; `read` fills it without reading the weights.

    Args:
        path: the file.
        manifest: MAR-INF/MANIFEST.json; its `model` is an object.
        config: model-config.yaml, {} when there is none.
        provenance: MAR-INF/PROVENANCE.json, None when something else built the archive.
        sizes: member → bytes, in the archive's order.
    """

    path: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    provenance: dict[str, Any] | None
    sizes: dict[str, int]

    @property
    def _model(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.manifest["model"])

    @property
    def name(self) -> str:
        """The model's name in the manifest ("" when it has none)."""
        return str(self._model.get("modelName", ""))

    @property
    def version(self) -> str:
        """The exact version string that TorchServe looks settings up by ("" when the manifest has none)."""
        return str(self._model.get("modelVersion", ""))

    @property
    def handler(self) -> str:
        """The manifest's handler, a module's name such as `handlers.embedding`."""
        return str(self._model.get("handler", ""))

    @property
    def has_requirements(self) -> bool:
        """Whether TorchServe would run pip for it, where the server allows that."""
        return bool(self._model.get("requirementsFile"))

    @property
    def settings(self) -> dict[str, Any]:
        """The `handler:` section of model-config.yaml, {} when there is none."""
        section = self.config.get("handler")
        return section if isinstance(section, dict) else {}


def manifest(name: str, version: str, handler: str, *, requirements: bool) -> bytes:
    """MAR-INF/MANIFEST.json for a model, by torch-model-archiver's own classes but for the date, which is constant."""
    from model_archiver.manifest_components.manifest import Manifest
    from model_archiver.manifest_components.model import Model

    model = Model(
        model_name=name,
        serialized_file=None,
        handler=handler,
        model_version=version,
        requirements_file=REQUIREMENTS if requirements else None,
        config_file=CONFIG,
    )
    whole = Manifest("python", model).__to_dict__()
    whole["createdOn"] = _CREATED_ON
    return json.dumps(whole, indent=2).encode()


def model_config(
    handler: Mapping[str, Any], *, response_timeout: int, startup_timeout: int, mode: Mapping[str, Any] | None = None
) -> bytes:
    """model-config.yaml: the timeouts (seconds), the `handler:` section, and what a task's `mode` needs.

    What a deployment tunes never goes here.

    ASCII only: the frontend's YAML reader stumbles over raw characters beyond the basic plane.
    """
    timeouts = {"responseTimeout": response_timeout, "startupTimeout": startup_timeout}
    whole = {**timeouts, **(mode or {}), "handler": dict(handler)}
    return yaml.safe_dump(whole, sort_keys=False, allow_unicode=False, width=1000).encode("ascii")


def provenance(about: Mapping[str, Any], members: Mapping[str, Member]) -> bytes:
    """MAR-INF/PROVENANCE.json: `about`, every member's checksum, and a digest over both."""
    table = {name: {"sha256": member.sha256, "size": member.size} for name, member in members.items()}
    return sealed({**about, "members": table})


def sealed(value: Mapping[str, Any]) -> bytes:
    """`value` as the bytes of PROVENANCE.json, its digest made anew."""
    body = {key: value[key] for key in sorted(value) if key != "digest"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=2).encode()


def measure(contents: Mapping[str, Content]) -> dict[str, Member]:
    """Read every content once: its checksum and size.

    Raises:
        UserError: a file can't be read, or is a git-lfs pointer instead of what it points to.
    """
    members = {}
    for name in sorted(contents):
        content = contents[check_name(name)]
        digest, size, head = hashlib.sha256(), 0, b""
        for chunk in _chunks(content):
            head = head or chunk[: len(_POINTER)]
            digest.update(chunk)
            size += len(chunk)
        if head.startswith(_POINTER):
            raise UserError(f"{content!s} is a git-lfs pointer, not the file itself", "run `git lfs pull` there")
        members[name] = Member(digest.hexdigest(), size)
    return members


def write(path: Path, contents: Mapping[str, Content], members: Mapping[str, Member]) -> str:
    """Write a new archive to `path` and return the file's SHA-256.

    Args:
        path: must not exist.
        contents: member name → content; may be in any order.
        members: what `measure` found for them.

    Raises:
        UserError: a file is no longer what `measure` saw.
    """
    with path.open("xb") as file:
        pack(
            file,
            {name: member.size for name, member in members.items()},
            lambda name: _same(contents[name], members[name]),
        )
        file.flush()
        os.fsync(file.fileno())
    return file_sha256(path)


def pack(file: IO[bytes], sizes: Mapping[str, int], chunks: Callable[[str], Iterable[bytes]]) -> None:
    """Write members to `file` as an archive has them.

    Args:
        file: open for writing, seekable.
        sizes: member name → bytes; in any order.
        chunks: a member's content.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(sizes):
            info = zipfile.ZipInfo(name, _DATE)
            info.create_system = 3
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            info.file_size = sizes[name]  # decides on ZIP64 before the first byte
            with archive.open(info, "w") as out:
                for chunk in chunks(name):
                    out.write(chunk)


def _same(content: Content, expected: Member) -> Iterator[bytes]:
    """The content's chunks; an error at the end, or before too much, when it is not what was measured."""
    digest, size = hashlib.sha256(), 0
    for chunk in _chunks(content):
        digest.update(chunk)
        size += len(chunk)
        if size > expected.size:
            break
        yield chunk
    if size != expected.size or digest.hexdigest() != expected.sha256:
        raise UserError(f"{content!s} changed while it was packed", "build again when nothing writes to it")


def _chunks(content: Content) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    try:
        with content.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        raise UserError(f"{content} can't be read: {error.strerror}", "check the disk and the permissions") from error


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive as a ZipFile; a file that isn't one, or is damaged, becomes a UserError that says so."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is no regular file", "name a .mar file")  # opening a pipe would wait for ever
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise UserError(f"there is no archive {path}", "build one: batchserve build MODEL --name NAME") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a directory, not an archive", "name a .mar file") from error
    except DAMAGE as error:
        raise UserError(f"{path} is {_what_is_wrong(path, error)}", "build it again") from error
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from error
    with archive:
        try:
            yield archive
        except DAMAGE as error:
            raise UserError(f"{path} is {_what_is_wrong(path, error)}", "build it again") from error


def _what_is_wrong(path: Path, error: BaseException) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    if not head:
        return "empty"
    if head[:2] == b"\x1f\x8b":
        return "a gzip file: TorchServe's archives are ZIP files"
    if head != b"PK\x03\x04":
        return "not a model archive: no ZIP file"
    if "not a zip file" in str(error):
        return "truncated: it starts as an archive and has no end"
    return f"damaged: {error}"


def read(path: Path) -> Archive:
    """What the archive says of itself. Checks no checksum: see `integrity.problems`.

    Raises:
        UserError: it isn't a readable ZIP file, or not one of TorchServe's archives.
    """
    with opened(path) as archive:
        names = {info.filename for info in archive.infolist()}
        if MANIFEST not in names:
            raise UserError(f"{path} is a ZIP file but no model archive: it has no {MANIFEST}", "build it again")
        about = _json(archive, MANIFEST)
        if not isinstance(about.get("model"), dict):
            raise UserError(f"{path}: {MANIFEST} describes no model", "build it again")
        config_file = about["model"].get("configFile")
        config: Any = {}
        if isinstance(config_file, str) and config_file in names:
            try:
                config = yaml.safe_load(archive.read(config_file))
            except yaml.YAMLError as error:
                raise UserError(f"{path}: {config_file} is not YAML", "build it again") from error
        origin = _json(archive, PROVENANCE) if PROVENANCE in names else None
        sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
    return Archive(path, about, config if isinstance(config, dict) else {}, origin, sizes)


def _json(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    try:
        value = json.loads(archive.read(name))
    except ValueError as error:
        raise UserError(f"{archive.filename}: {name} is not JSON", "build it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{archive.filename}: {name} is no JSON object", "build it again")
    return value


def extract(path: Path, directory: Path) -> None:
    """Unpack the archive into `directory`, which must be empty or not exist.

    Raises:
        UserError: a member's name would leave the directory, is there twice, is a link, the archive is damaged, or it
            unpacks to far more than any model compresses by.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with opened(path) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > _EXPANSION * path.stat().st_size + _SMALL:
            raise UserError(f"{path} would unpack to {unpacked:,} bytes: no model archive does", "build it again")
        for info in archive.infolist():
            name = check_name(info.filename.removesuffix("/"))
            if stat.S_ISLNK(info.external_attr >> 16):
                raise UserError(f"{path}: {name!a} is a symbolic link", "build it again")
            target = directory / name
            try:
                if info.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, target.open("xb") as out:
                    _copy(source, out)
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise UserError(f"{path}: {name!a} is there twice", "build it again") from error


def _copy(source: IO[bytes], out: IO[bytes]) -> None:
    while chunk := source.read(_CHUNK):
        out.write(chunk)
