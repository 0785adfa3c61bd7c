"""Which of a model's files an archive carries: safetensors and a fast tokenizer; pickles only after conversion."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from scripts.lib import marian
from scripts.lib.errors import UserError
from scripts.lib.tree import LeftOut

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
TOKENIZER = "tokenizer.json"

_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_OTHER_FORMATS = {
    ".onnx": "ONNX", ".onnx_data": "ONNX", ".h5": "TensorFlow", ".msgpack": "Flax", ".ot": "Rust", ".tflite": "TFLite",
    ".mlmodel": "Core ML", ".gguf": "GGUF",
}  # fmt: skip
_FOLDERS = {"onnx": "ONNX", "openvino": "OpenVINO", "coreml": "Core ML"}
_SLOW_TOKENIZERS = (
    "vocab.txt", "vocab.json", "merges.txt", "bpe.codes",
    "spiece.model", "spm.model", "sentencepiece.bpe.model", "tokenizer.model",
)  # fmt: skip
_PICKLE_HEADS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def partition(files: Mapping[str, Path], *, code: bool) -> tuple[dict[str, Path], list[LeftOut]]:
    """Split a model's files into those that an archive may carry and those it never does.

    Args:
        files: path below the model's directory → file.
        code: whether the model's own Python files are wanted.

    Returns:
        The files to pack, and the others with the reason.
    """
    kept: dict[str, Path] = {}
    left: list[LeftOut] = []
    for name, path in files.items():
        reason = _reason(name, path, code)
        if reason:
            left.append(LeftOut(name, reason))
        else:
            kept[name] = path
    return kept, left


def _reason(name: str, path: Path, code: bool) -> str:
    """Why the archive has no use for the file; "" when it may have."""
    parts = PurePosixPath(name).parts
    suffix = PurePosixPath(name).suffix.lower()
    if (
        parts[0].startswith(".git")
        or parts[0] == ".cache"
        or parts[-1] in (".gitattributes", ".gitignore", ".DS_Store")
    ):
        return "bookkeeping of other tools"
    if "__pycache__" in parts or suffix == ".pyc":
        return "compiled code"
    if parts[0] in _FOLDERS and len(parts) > 1:
        return f"{_FOLDERS[parts[0]]} weights"
    if suffix in _OTHER_FORMATS:
        return f"{_OTHER_FORMATS[suffix]} weights"
    if parts[-1].startswith("openvino_") and suffix in (".xml", ".bin"):
        return "OpenVINO weights"
    if suffix in _PICKLES or (suffix == ".bin" and _pickled(path)) or parts[-1] == PICKLE_INDEX:
        return "pickled: loading it can run code"
    if suffix == ".py" and not code:
        return "code that no handler of ours runs"
    return ""


def _pickled(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith(_PICKLE_HEADS)


def require(
    kept: Mapping[str, Path], all_files: Mapping[str, Path], folders: Iterable[str], *, convert: bool
) -> list[str]:
    """Check that every folder's weights are there, whole and safetensors; name the folders to convert.

    Args:
        kept: the files to pack.
        all_files: those and the ones left out.
        folders: "" for the network, sub-folders for dense layers.
        convert: whether pickled weights may be converted.

    Raises:
        UserError: weights are missing, incomplete or damaged; or pickled, and `convert` is off.
    """
    pickled = []
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        if prefix + WEIGHTS in kept:
            _header(kept[prefix + WEIGHTS])
        elif prefix + INDEX in kept:
            _check_shards(kept, prefix)
        elif prefix + PICKLE in all_files or prefix + PICKLE_INDEX in all_files:
            pickled.append(folder)
        else:
            there = sorted({_suffix_kind(name) for name in all_files if name.startswith(prefix)} - {""})
            found = f"; there are only {' and '.join(there)} weights" if there else ""
            raise UserError(
                f"{prefix}{WEIGHTS} is missing{found}",
                "save the model with save_pretrained, or complete the download",
            )
    if pickled and not convert:
        where = ", ".join((f"{folder}/" if folder else "") + PICKLE for folder in pickled)
        raise UserError(
            f"the weights are pickled ({where}): loading such a file can run code",
            "--convert reads them without running code and packs safetensors; the source stays as it is",
        )
    return pickled


def _suffix_kind(name: str) -> str:
    if name.endswith(_PICKLES):
        return "pickled"
    return _OTHER_FORMATS.get(PurePosixPath(name).suffix.lower(), "")


def _check_shards(files: Mapping[str, Path], prefix: str) -> None:
    path = files[prefix + INDEX]
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        wanted: dict[str, set[str]] = {}
        for tensor, shard in table.items():
            wanted.setdefault(str(shard), set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no index of weights", "complete the download") from error
    for shard, tensors in sorted(wanted.items()):
        if prefix + shard not in files:
            raise UserError(f"{prefix}{shard} is missing, which {INDEX} names", "complete the download")
        if absent := sorted(tensors - _header(files[prefix + shard]).keys()):
            raise UserError(f"{prefix}{shard} does not hold {absent[0]}, which {INDEX} says", "complete the download")


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file's table of tensors; checks that the file is as long as its table says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise UserError(
                f"{path} is a git-lfs pointer, not the weights", "run `git lfs pull` in the model's directory"
            )
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > size - 8:
            raise UserError(f"{path} is damaged: no safetensors file, or a truncated one", "complete the download")
        try:
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            end = max((row["data_offsets"][1] for row in table.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged: its table can't be read", "complete the download") from error
    if 8 + length + end != size:
        raise UserError(f"{path} is damaged: {size} bytes, its table says {8 + length + end}", "complete the download")
    return dict(table)


def convert(files: Mapping[str, Path], folder: str, directory: Path) -> dict[str, Path]:
    """Convert a folder's pickled weights to safetensors without running code.

    Args:
        files: path below the model's directory → file.
        folder: "" or a sub-folder of it.
        directory: where the new files go; must exist.

    Returns:
        path below the model's directory → new file.

    Raises:
        UserError: the file holds more than tensors, or can't be read.
    """
    prefix = f"{folder}/" if folder else ""
    if prefix + PICKLE in files:
        made = directory / f"{len(list(directory.iterdir()))}.safetensors"
        _convert_file(files[prefix + PICKLE], made)
        return {prefix + WEIGHTS: made}
    index_path = files[prefix + PICKLE_INDEX]
    index = load_index(index_path)
    renamed = {shard: f"{PurePosixPath(shard).stem.replace('pytorch_model', 'model')}.safetensors" for shard in
               sorted(set(index["weight_map"].values()))}  # fmt: skip
    converted: dict[str, Path] = {}
    for old, new in renamed.items():
        if prefix + old not in files:
            raise UserError(f"{prefix}{old} is missing, which {PICKLE_INDEX} names", "complete the download")
        made = directory / f"{len(list(directory.iterdir()))}.safetensors"
        _convert_file(files[prefix + old], made)
        converted[prefix + new] = made
    index["weight_map"] = {tensor: renamed[shard] for tensor, shard in index["weight_map"].items()}
    made = directory / f"{len(list(directory.iterdir()))}.json"
    made.write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    return converted | {prefix + INDEX: made}


def load_index(path: Path) -> dict[str, Any]:
    """The index of sharded weights.

    Raises:
        UserError: it is none.
    """
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        index["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no index of weights", "complete the download") from error
    return dict(index)


def _convert_file(source: Path, target: Path) -> None:
    import pickle

    import torch
    from safetensors.torch import save_file

    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{source} holds more than weights, and is not converted: {str(error).strip().splitlines()[0]}",
            "load it where you trust it, and save the model with save_pretrained",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise UserError(f"{source} can't be read: {str(error).splitlines()[0]}", "complete the download") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise UserError(f"{source} is no table of tensors", "save the model with save_pretrained")
    # Tensors that share memory get a copy each: safetensors has no aliases, and the loader ties them again.
    save_file({str(key): state[key].detach().clone().contiguous() for key in sorted(state)}, target, {"format": "pt"})


def tokenizer(files: Mapping[str, Path], home: Path, directory: Path, *, trust_remote_code: bool) -> dict[str, Path]:
    """The fast tokenizer, made from the slow one's files where there is none.

    Args:
        files: path below the network's directory → file.
        home: the network's directory.
        directory: where a new file goes.
        trust_remote_code: whether the model's own tokenizer code may run here.

    Returns:
        {} when tokenizer.json is there, else its name → the new file; for Marian's, tokenizer_config.json's as well.

    Raises:
        UserError: there is no tokenizer at all, or it can't be converted, or not without packages that aren't here.
    """
    if TOKENIZER in files:
        try:
            json.loads(files[TOKENIZER].read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{files[TOKENIZER]} is not JSON: {error}", "complete the download") from error
        return {}
    if marian.present(files):
        return marian.convert(files, directory)
    slow = [name for name in _SLOW_TOKENIZERS if name in files]
    if not slow:
        raise UserError("tokenizer.json is missing", "save the tokenizer beside the model with save_pretrained")
    from transformers import AutoTokenizer
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    there = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    if absent := [package for package, found in there.items() if not found]:
        models = [name for name in slow if name.endswith(".model")]
        if models:
            raise UserError(
                f"tokenizer.json is missing, and {models[0]} can't be converted without {' and '.join(absent)}",
                f"pip install {' '.join(absent)}; serving does not need them",
            )
    try:
        made = AutoTokenizer.from_pretrained(home, local_files_only=True, trust_remote_code=trust_remote_code)
        if not made.is_fast:
            raise ValueError(f"transformers has no fast tokenizer like {type(made).__name__}")
        made.backend_tokenizer.save(str(directory / TOKENIZER))
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"tokenizer.json is missing, and {', '.join(slow)} can't be converted: {why}",
            "save a fast tokenizer beside the model with save_pretrained",
        ) from error
    return {TOKENIZER: directory / TOKENIZER}
