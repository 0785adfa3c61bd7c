"""Is an archive what its builder made? Every member against its checksum, and the file against its own layout."""

import hashlib
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

from scripts.lib.archive import PROVENANCE, Member, opened, read, sealed
from scripts.lib.errors import UserError
from scripts.lib.tree import check_name

_CHUNK = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


def problems(path: Path) -> list[str]:
    """What is wrong with the archive's bytes, a line each; [] for an intact one.

    Every member is read. With provenance: each has its checksum, none is missing, none is there besides. Without:
    only the ZIP file's own CRCs can be checked.

    Raises:
        UserError: the file isn't a model archive at all.
    """
    whole = read(path)
    found: list[str] = []
    with opened(path) as archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        found += [f"{name!a} is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
        for info in infos:
            try:
                check_name(info.filename.removesuffix("/"))
            except UserError as error:
                found.append(str(error))
            if stat.S_ISLNK(info.external_attr >> 16):
                found.append(f"{info.filename!a} is a symbolic link")
        if whole.provenance is None:
            damage = [(info.filename, _hash(archive, info)[1]) for info in infos]
            return found + [f"{name!a} is damaged: {why}" for name, why in damage if why]
        found += _against_provenance(archive, whole.provenance)
        found += _layout(path, archive)
    return found


def _against_provenance(archive: zipfile.ZipFile, origin: dict[str, Any]) -> list[str]:
    found = []
    try:
        table = {name: Member(str(row["sha256"]), int(row["size"])) for name, row in origin["members"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        return [f"{PROVENANCE} names no members: it was changed"]
    if archive.read(PROVENANCE) != sealed(origin):
        found.append(f"{PROVENANCE} was changed: its digest does not match")
    present = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    found += [f"{name!a} is missing" for name in sorted(table.keys() - present.keys())]
    found += [f"{name!a} was added" for name in sorted(present.keys() - table.keys() - {PROVENANCE})]
    for name in sorted(table.keys() & present.keys()):
        member, error = _hash(archive, present[name])
        if error or member != table[name]:
            found.append(f"{name!a} was changed: {error or 'its checksum does not match'}")
    return found


def _hash(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[Member, str]:
    digest, size = hashlib.sha256(), 0
    try:
        with archive.open(info) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        return Member("", size), str(error) or "it ends early"
    return Member(digest.hexdigest(), size), ""


def _layout(path: Path, archive: zipfile.ZipFile) -> list[str]:
    """Nothing between, before or after the members.

    TorchServe unpacks by the headers that precede each member, Python by the table at the end; bytes that only one of
    the two sees could make them unpack different files.
    """
    position = 0
    with path.open("rb") as file:
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if info.header_offset != position or len(header) < _LOCAL_HEADER.size:
                return [f"there are bytes before {info.filename!a} that belong to no member"]
            *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            position += _LOCAL_HEADER.size + name_length + extra_length + info.compress_size
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ~0x800:
                return [f"{info.filename!a} was written by another tool"]
    if position != archive.start_dir or archive.comment:
        return ["there are bytes after the last member that belong to none"]
    return []
