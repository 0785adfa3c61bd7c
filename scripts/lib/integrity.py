"""Is an archive what its builder made? Every member against its checksum, and the file against its own layout."""

import hashlib
import io
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from scripts.lib.archive import DAMAGE, PROVENANCE, Member, opened, pack, read, sealed
from scripts.lib.errors import UserError
from scripts.lib.tree import check_name

_CHUNK = 1 << 20
_HEADER = 1 << 16  # bytes; no header is longer


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
        return found or _not_as_written(path, archive)


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
    except (*DAMAGE, OSError) as error:
        return Member("", size), str(error) or "it ends early"
    return Member(digest.hexdigest(), size), ""


def _not_as_written(path: Path, archive: zipfile.ZipFile) -> list[str]:
    """Pack the members again, and compare every byte with the file.

    Python reads a ZIP file by the table at its end; TorchServe unpacks by the headers in front of the members, so a
    file could show the two different things.
    """
    sizes = {info.filename: info.file_size for info in archive.infolist()}
    with path.open("rb") as file:
        again = _Compared(file)
        pack(cast(IO[bytes], again), sizes, lambda name: _chunks(archive, name))
        if again.same():
            return []
    return [
        "its headers are not the ones that batchserve writes, or there are bytes between, before or after the members"
    ]


def _chunks(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    with archive.open(name) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


class _Compared(io.RawIOBase):
    """A file to write to that keeps nothing and compares what is written with another file.

    Args:
        file: the other one, open for reading.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._at = 0
        # Headers are written twice, the second time with the checksum: only the last word counts.
        self._small: dict[int, bytes] = {}
        self._same = True

    def same(self) -> bool:
        """Whether everything written is what the other file holds, and all that it holds."""
        end = self._file.seek(0, io.SEEK_END)
        return self._same and self._at == end and all(self._matches(at, data) for at, data in self._small.items())

    def _matches(self, at: int, data: bytes) -> bool:
        self._file.seek(at)
        return self._file.read(len(data)) == data

    def write(self, data: Any) -> int:
        """Compare, or remember what may be written again."""
        data = bytes(data)
        if len(data) > _HEADER:
            self._same = self._same and self._matches(self._at, data)
        else:
            self._small[self._at] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` bytes from the start."""
        assert whence == io.SEEK_SET
        self._at = offset
        return offset

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._at

    def seekable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """Always."""
        return True
