"""The archives of a model store, ours and others', read without running anything in them."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from scripts.lib import archive
from scripts.lib.archive import Archive
from scripts.lib.diagnosis.deployment import StoredArchive, Unreadable
from scripts.lib.diagnosis.handler_source import HandlerSource, examine
from scripts.lib.errors import UserError

_MOST_BYTES = 4 << 20  # of a source in an archive
_MOST_TEXT = 64 << 20  # of a manifest; a provenance names every member
#: What reading a foreign archive raises besides UserError: oddities of its JSON and YAML, unknown compression.
_ODD = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    NotImplementedError,
    OSError,
)

Store = tuple[dict[str, StoredArchive], tuple[Unreadable, ...], tuple[str, ...]]


def read_store(store: Path) -> Store:
    """Every archive of a store.

    Returns: the archives by file name, those that cannot be read, and the names of what else TorchServe could load
        (directories, .tar.gz), which nobody looks into.

    Raises:
        UserError: the store itself cannot be read.
    """
    try:
        paths = sorted(path for path in store.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise UserError(
            f"model store {store}: {getattr(error, 'strerror', None) or error}", hint="name it with --model-store DIR"
        ) from None
    found: dict[str, StoredArchive] = {}
    unreadable, others = [], []
    for path in paths:
        if path.name.endswith((".tar.gz", ".tgz")) or (path / archive.MANIFEST).is_file():
            others.append(path.name)
        elif path.suffix in (".mar", ".model"):
            try:
                found[path.name] = read_archive(path)
            except UserError as error:
                unreadable.append(Unreadable(path, str(error)))
    return found, tuple(unreadable), tuple(others)


def read_archive(path: Path) -> StoredArchive:
    """One archive: what it says of itself, its requirements, and what its handler's source shows.

    Raises:
        UserError: it cannot be read; the message is for people.
    """
    try:
        _check_sizes(path)
        return _read(archive.read(path))
    except _ODD as error:
        raise UserError(f"{path} cannot be read: {str(error) or type(error).__name__}") from None


def _check_sizes(path: Path) -> None:
    """Raise UserError when a text of the archive is larger than any."""
    with archive.opened(path) as opened:
        for info in opened.infolist():
            read = info.filename.startswith("MAR-INF/") or info.filename.endswith((".yaml", ".yml"))
            if read and info.file_size > _MOST_TEXT:
                raise UserError(f"{path}: {info.filename!a} has {info.file_size:,} bytes")


def _read(about: Archive) -> StoredArchive:
    sources = [name for name, size in about.sizes.items() if name.endswith(".py") and size <= _MOST_BYTES]
    module, function = handler_module(about.handler)
    requirements = str(about.manifest["model"].get("requirementsFile") or archive.REQUIREMENTS)
    lines: tuple[str, ...] = ()
    source: bytes | None = None
    sets_threads = False
    with archive.opened(about.path) as opened:
        if about.sizes.get(requirements, _MOST_BYTES + 1) <= _MOST_BYTES:
            lines = tuple(opened.read(requirements).decode("utf-8", "replace").splitlines())
        for name in sources:
            text = opened.read(name)
            sets_threads = sets_threads or b"set_num_threads" in text
            if name == module:
                source = text
    return StoredArchive(about, _handler(source, module, function), sets_threads, lines)


def handler_module(handler: str) -> tuple[str, str]:
    """The file of a manifest's handler, and the function in it that TorchServe looks for.

    A handler is `my_handler.py`, `my_handler.py:function`, `package.module` or one of TorchServe's own names.
    """
    name, _, function = handler.partition(":")
    name = name.removesuffix(".py")
    return f"{name.replace('.', '/')}.py" if name else "", function or "handle"


def _handler(source: bytes | None, module: str, function: str) -> HandlerSource | None:
    if source is not None:
        return examine(source, module, function)
    own = _torchserves_own(module)
    return examine(own.read_bytes(), f"TorchServe's {module}", function) if own else None


def _torchserves_own(module: str) -> Path | None:
    """The file of one of TorchServe's own handlers, where torchserve is installed; nothing is imported."""
    found = importlib.util.find_spec("ts")
    if found is None or found.origin is None or not module or "/" in module:
        return None
    path = Path(found.origin).parent / "torch_handler" / module
    return path if path.is_file() else None


def weights(about: Archive) -> int:
    """Bytes of an archive that a worker holds in memory: about those of its weights."""
    return sum(size for name, size in about.sizes.items() if _is_weights(name))


def _is_weights(name: str, kinds: Iterable[str] = ("safetensors", "bin", "pt", "pth", "ckpt", "onnx", "gguf")) -> bool:
    return name.rpartition(".")[2].lower() in kinds
