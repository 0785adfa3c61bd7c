"""scripts.lib.weights: safetensors that are whole, pickles that run nothing, a fast tokenizer."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.lib import tree, weights
from scripts.lib.errors import UserError
from tests.models import pickle_weights, tiny_bert, write_dense


def check(directory: Path, folders: tuple[str, ...] = ("",), *, convert: bool = False) -> list[str]:
    files = tree.walk(directory)
    kept, _ = weights.partition(files, code=False)
    return weights.require(kept, files, folders, convert=convert)


def test_whole_weights_pass(tmp_path: Path) -> None:
    assert check(tiny_bert(tmp_path / "m", dense=8), ("", "2_Dense")) == []


def test_missing_weights_say_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "tf_model.h5").touch()
    (tmp_path / "flax_model.msgpack").touch()
    with pytest.raises(UserError, match=r"model\.safetensors is missing; there are only Flax and TensorFlow weights"):
        check(tmp_path)
    directory = tiny_bert(tmp_path / "m", dense=8)
    (directory / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"2_Dense/model\.safetensors is missing"):
        check(directory, ("", "2_Dense"))


@pytest.mark.parametrize("change", ["cut", "longer", "no header", "pointer", "empty"])
def test_damaged_weights_are_named(tmp_path: Path, change: str) -> None:
    path = tiny_bert(tmp_path / "m") / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-1], "longer": content + b"x", "no header": b"\xff" * 100, "empty": b"",
            "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        }[change]
    )  # fmt: skip
    with pytest.raises(UserError, match="git-lfs pointer" if change == "pointer" else "is damaged"):
        check(path.parent)


def shard(directory: Path) -> list[str]:
    """Split model.safetensors into two shards with an index; return their names."""
    state = load_file(directory / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    halves = [dict(list(state.items())[::2]), dict(list(state.items())[1::2])]
    for name, half in zip(names, halves, strict=True):
        save_file(half, directory / name, {"format": "pt"})
    table = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (directory / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (directory / "model.safetensors").unlink()
    return names


def test_every_shard_must_be_there_and_hold_its_tensors(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m")
    first, second = shard(directory)
    assert check(directory) == []
    kept = (directory / second).read_bytes()
    (directory / second).unlink()
    with pytest.raises(UserError, match=f"{second} is missing"):
        check(directory)
    shutil.copy(directory / first, directory / second)
    with pytest.raises(UserError, match=f"{second} does not hold"):
        check(directory)
    (directory / second).write_bytes(kept)
    (directory / weights.INDEX).write_text("{}")
    with pytest.raises(UserError, match="no index of weights"):
        check(directory)


def test_pickles_are_refused_and_converted_on_request(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m", dense=8)
    expected = load_file(directory / "model.safetensors")
    pickle_weights(directory)
    (directory / "2_Dense" / "model.safetensors").unlink()
    write_dense(directory / "2_Dense", 32, 8, pickled=True)
    with pytest.raises(UserError, match=r"pytorch_model\.bin, 2_Dense/pytorch_model\.bin") as error:
        check(directory, ("", "2_Dense"))
    assert "--convert" in error.value.hint
    assert check(directory, ("", "2_Dense"), convert=True) == ["", "2_Dense"]
    before = sorted(directory.rglob("*"))
    made = weights.convert(tree.walk(directory), "", tmp_path)
    assert made.keys() == {"model.safetensors"}
    found = load_file(made["model.safetensors"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert weights.convert(tree.walk(directory), "2_Dense", tmp_path).keys() == {"2_Dense/model.safetensors"}
    assert sorted(directory.rglob("*")) == before


def test_conversion_copies_shared_tensors_and_is_reproducible(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    torch.save(
        {"b": tensor, "a": tensor, "c": tensor.t(), "d": torch.nn.Parameter(tensor)}, tmp_path / "pytorch_model.bin"
    )
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made = weights.convert({"pytorch_model.bin": tmp_path / "pytorch_model.bin"}, "", tmp_path / name)
        contents.append(made["model.safetensors"].read_bytes())
        found = load_file(made["model.safetensors"])
        assert torch.equal(found["a"], tensor)
        assert torch.equal(found["c"], tensor.t())
    assert contents[0] == contents[1]


def test_sharded_pickles_become_sharded_safetensors(tmp_path: Path) -> None:
    shards = {
        "pytorch_model-00001-of-00002.bin": {"a": torch.ones(2)},
        "pytorch_model-00002-of-00002.bin": {"b": torch.zeros(2)},
    }
    for name, state in shards.items():
        torch.save(state, tmp_path / name)
    table = {key: name for name, state in shards.items() for key in state}
    (tmp_path / weights.PICKLE_INDEX).write_text(json.dumps({"weight_map": table}))
    files = tree.walk(tmp_path)
    (tmp_path / "out").mkdir()
    made = weights.convert(files, "", tmp_path / "out")
    kept, left = weights.partition(files, code=False)
    assert len(left) == 3
    assert weights.require(kept | made, files, [""], convert=False) == []
    del files["pytorch_model-00002-of-00002.bin"]
    with pytest.raises(UserError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        weights.convert(files, "", tmp_path / "out")


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.mkdir, (self.path,)


def test_conversion_runs_no_code(tmp_path: Path) -> None:
    bad = tmp_path / "pytorch_model.bin"
    (tmp_path / "out").mkdir()
    for content, message in [
        ({"a": Evil(str(tmp_path / "evil"))}, "holds more than weights"),
        ({"a": 1}, "no table of tensors"),
        ([torch.ones(1)], "no table of tensors"),
    ]:
        torch.save(content, bad)
        with pytest.raises(UserError, match=message):
            weights.convert({"pytorch_model.bin": bad}, "", tmp_path / "out")
    assert not (tmp_path / "evil").exists()
    bad.write_bytes(bad.read_bytes()[:-30])
    with pytest.raises(UserError, match="can't be read"):
        weights.convert({"pytorch_model.bin": bad}, "", tmp_path / "out")


def test_what_is_left_out_is_listed_with_its_reason(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m")
    pickle_weights(directory, keep=True)
    (directory / "onnx").mkdir()
    (directory / "__pycache__").mkdir()
    (directory / ".cache" / "huggingface").mkdir(parents=True)
    for name in ("onnx/model.onnx", "onnx/config.json", "tf_model.h5", "rust_model.ot", "model.gguf", "train.py",
                 ".gitattributes", ".cache/huggingface/x.metadata", "__pycache__/x.pyc", "optimizer.pt",
                 "openvino_model.xml", "vocabulary.bin", "README.md"):  # fmt: skip
        (directory / name).write_text("x")
    kept, left = weights.partition(tree.walk(directory), code=False)
    reasons = {item.path: item.reason for item in left}
    assert reasons.keys() | kept.keys() == tree.walk(directory).keys()
    assert reasons == {
        ".cache/huggingface/x.metadata": "bookkeeping of other tools", ".gitattributes": "bookkeeping of other tools",
        "__pycache__/x.pyc": "compiled code", "model.gguf": "GGUF weights", "onnx/config.json": "ONNX weights",
        "onnx/model.onnx": "ONNX weights", "openvino_model.xml": "OpenVINO weights",
        "optimizer.pt": "pickled: loading it can run code", "pytorch_model.bin": "pickled: loading it can run code",
        "rust_model.ot": "Rust weights", "tf_model.h5": "TensorFlow weights",
        "train.py": "code that no handler of ours runs",
    }  # fmt: skip
    assert "train.py" in weights.partition(tree.walk(directory), code=True)[0]


def test_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    directory = tiny_bert(tmp_path / "m")
    files = tree.walk(directory)
    assert weights.tokenizer(files, directory, tmp_path, trust_remote_code=False) == {}
    fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        weights.tokenizer(tree.walk(directory), directory, tmp_path, trust_remote_code=False)
    words = sorted(fast.get_vocab().items(), key=lambda item: item[1])
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words))
    config = json.loads((directory / "tokenizer_config.json").read_text()) | {"tokenizer_class": "BertTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    made = weights.tokenizer(tree.walk(directory), directory, tmp_path, trust_remote_code=False)
    slow = Tokenizer.from_file(str(made["tokenizer.json"]))
    text = "Hello World, the CAT plays a guitar!"
    assert slow.encode(text).ids == fast.encode(text).ids
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        weights.tokenizer(tree.walk(directory), directory, tmp_path, trust_remote_code=False)
