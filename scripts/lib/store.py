"""The model store: a directory of archives, in which a build works unseen until its archive is whole.

Everything that a build writes lies in one hidden directory of the store, `.NAME.mar.PID.RANDOM.tmp`. So a build that is
killed leaves nothing under the archive's name and nothing in the system's temporary directory, and the last step is a
link within one file system. TorchServe skips hidden files.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.lib.archive import file_sha256
from scripts.lib.errors import UserError

_LOCK = "lock"
_LOCK_SECONDS = 60  # a workspace without a lock is that old: its build died before it could make one
_WORKSPACE = re.compile(r"\.(?P<name>.+)\.mar\.(?P<pid>\d+)\.[a-z0-9_]{8}\.tmp")


@contextmanager
def workspace(store: Path, name: str) -> Iterator[Path]:
    """A private directory inside `store` for the build of NAME.mar, removed at the end; its path is absolute.

    What killed builds left in the store is removed first.

    Raises:
        UserError: the store is no directory or can't be written to.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{name}.mar.{os.getpid()}.", suffix=".tmp", dir=store.absolute()))
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"the model store {store} is not a directory", "name one with --store") from error
    except OSError as error:
        raise UserError(
            f"the model store {store} can't be written to: {error.strerror}", "name another one with --store"
        ) from error
    with (directory / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            remove_leftovers(store)
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def remove_leftovers(store: Path) -> list[Path]:
    """Remove the workspaces of builds that are no more, and return them.

    Only directories are touched that carry a workspace's name, belong to this user, whose process is gone and whose
    lock nobody holds (a process id alone says nothing across containers that share a store).
    """
    removed = []
    for path in store.iterdir():
        match = _WORKSPACE.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        try:
            if path.stat().st_uid == os.getuid() and not _alive(int(match["pid"])) and _unlocked(path / _LOCK):
                shutil.rmtree(path)
                removed.append(path)
        except OSError:
            continue  # another build was faster, or it isn't ours to remove
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _unlocked(lock: Path) -> bool:
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return time.time() - lock.parent.stat().st_mtime > _LOCK_SECONDS
    except BlockingIOError:
        return False
    return True


def publish(built: Path, final: Path, *, replace: bool) -> bool:
    """Give a finished archive its name, in one step that other builds see whole or not at all.

    Args:
        built: the archive, in the same store.
        final: its name.
        replace: whether an archive of that name may be replaced.

    Returns:
        Whether this call put it there; False when a build at the same time already put the same bytes there.

    Raises:
        UserError: without `replace`, another archive has the name.
    """
    built.chmod(0o666 & ~_umask())
    if replace:
        try:
            built.replace(final)
        except IsADirectoryError as error:
            raise UserError(f"{final} is a directory", "move it away") from error
        _sync(final.parent)
        return True
    try:
        final.hardlink_to(built)
    except FileExistsError as error:
        if final.is_file() and file_sha256(final) == file_sha256(built):
            return False
        raise exists(final) from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        _publish_without_links(built, final)
    _sync(final.parent)
    return True


def exists(final: Path) -> UserError:
    """The error that `final` is there already."""
    return UserError(
        f"{final} exists", "--force replaces it, --if-changed only when something changed; or take another --name"
    )


def _publish_without_links(built: Path, final: Path) -> None:
    """For file systems without hard links: claim the name with an empty file, then move the archive over it."""
    try:
        os.close(os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError as error:
        raise exists(final) from error
    built.replace(final)


def _umask() -> int:
    """This process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
