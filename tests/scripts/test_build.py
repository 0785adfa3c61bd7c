"""batchserve build and inspect, as a person at a terminal meets them."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from scripts import build as verbs
from scripts.lib import archive, integrity
from scripts.lib.errors import UserError
from tests.models import pickle_weights, tiny_bert, write_json
from tests.scripts import builders

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "scripts" / "lib" / "service.py"

APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(verbs.build)
APP.command()(verbs.inspect)


def run(*arguments: Any) -> str:
    """Run the command in this process; return what it printed. Errors come out as they are."""
    result = CliRunner().invoke(APP, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def minilm_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("source") / "tiny", prompts={"query": "query: "}, dense=8)


@pytest.mark.usefixtures("unverified")
def test_the_archive_holds_everything_under_its_name(tmp_path: Path, minilm_like: Path) -> None:
    output = run("build", minilm_like, "--name", "tiny", "--version", "2", "--store", tmp_path, "--max-items", 7)
    path = tmp_path / "tiny.mar"
    whole = archive.read(path)
    assert archive.file_sha256(path) in output
    assert (whole.name, whole.version, whole.handler) == ("tiny", "2", "handlers.embedding")
    assert whole.config["responseTimeout"] == 120
    assert whole.settings["max_items"] == 7
    assert whole.settings["prompts"]["query"] == "query: "
    assert whole.provenance is not None
    assert whole.provenance["source"] == "tiny"
    assert not {"batchSize", "maxBatchDelay", "minWorkers", "maxWorkers"} & whole.config.keys()
    vendored = {f"handlers/{path.relative_to(ROOT / 'handlers')}" for path in (ROOT / "handlers").rglob("*.py")}
    source = {f"model/{path.relative_to(minilm_like)}" for path in minilm_like.rglob("*") if path.is_file()}
    assert whole.sizes.keys() == vendored | source | {archive.MANIFEST, archive.PROVENANCE, archive.CONFIG}
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.mar"]


@pytest.mark.usefixtures("unverified")
def test_same_inputs_same_bytes_wherever_they_lie(tmp_path: Path, minilm_like: Path) -> None:
    shutil.copytree(minilm_like, tmp_path / "elsewhere" / "tiny")
    run("build", minilm_like, "--name", "m", "--store", tmp_path / "a")
    run("build", tmp_path / "elsewhere" / "tiny", "--name", "m", "--store", tmp_path / "b")
    assert (tmp_path / "a" / "m.mar").read_bytes() == (tmp_path / "b" / "m.mar").read_bytes()


@pytest.mark.usefixtures("unverified")
def test_an_archive_is_only_replaced_on_request(tmp_path: Path, minilm_like: Path) -> None:
    path = tmp_path / "m.mar"
    command = ("build", minilm_like, "--name", "m", "--store", tmp_path)
    run(*command)
    before = (path.stat().st_ino, path.stat().st_mtime_ns)
    with pytest.raises(UserError, match=r"m\.mar exists"):
        run(*command)
    assert "unchanged" in run(*command, "--if-changed")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    assert "sha256" in run(*command, "--if-changed", "--max-items", 3)
    assert archive.read(path).settings["max_items"] == 3
    content = bytearray(path.read_bytes())
    content[-400] ^= 1
    path.write_bytes(content)
    assert "sha256" in run(*command, "--if-changed", "--max-items", 3)
    assert integrity.problems(path) == []
    run(*command, "--force")
    assert "max_items" not in archive.read(path).settings


@pytest.mark.usefixtures("unverified")
def test_a_change_of_the_model_is_seen_even_at_equal_size_and_date(tmp_path: Path, minilm_like: Path) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(minilm_like, model)
    command = ("build", model, "--name", "m", "--store", tmp_path, "--if-changed")
    run(*command)
    file = model / "2_Dense" / "model.safetensors"
    stat = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "sha256" in run(*command)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "a b"], "can't be a model's name"),
        (["--name", "m", "--version", "1/0"], "can't be a version"),
        (["--name", "m", "--task", "reranking"], "it has no head for reranking"),
        (["--name", "m", "--dtype", "float64"], "dtype is 'float64'"),
        (["--name", "m", "--attention", "flash"], "attention is 'flash'"),
        (["--name", "m", "--pooling", "median"], "pooling mode 'median'"),
        (["--name", "m", "--max-tokens", "65"], "--max-tokens 65 is not possible"),
        (["--name", "m", "--threads", "0"], "threads is 0"),
        (["--name", "m", "--requirements", "none.txt"], r"there is no file none\.txt"),
        (["--name", "m", "--handler", "none.py"], r"there is no handler file none\.py"),
    ],
)
def test_refusals(tmp_path: Path, minilm_like: Path, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("build", minilm_like, "--store", tmp_path / "store", *options)
    assert not list((tmp_path / "store").glob("*"))


@pytest.mark.usefixtures("unverified")
def test_pickled_weights_are_converted_on_request(tmp_path: Path) -> None:
    model = tiny_bert(tmp_path / "tiny")
    run("build", model, "--name", "before", "--store", tmp_path)
    pickle_weights(model)
    with pytest.raises(UserError, match="pickled"):
        run("build", model, "--name", "after", "--store", tmp_path)
    output = run("build", model, "--name", "after", "--store", tmp_path, "--convert")
    assert "left out (pickled: loading it can run code): pytorch_model.bin" in output
    assert archive.read(tmp_path / "after.mar").sizes["model/model.safetensors"] > 1000
    assert not (model / "model.safetensors").exists()


@pytest.mark.usefixtures("unverified")
def test_files_of_any_name_are_packed_or_refused(tmp_path: Path, minilm_like: Path) -> None:
    model = tmp_path / "my model, [1]"
    shutil.copytree(minilm_like, model)
    for name in ("a, b.txt", "w[1].txt", "Größe.json", "x/config.json", "y/config.json"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    (model / "linked.txt").symlink_to(model / "a, b.txt")
    output = run("build", model, "--name", "m", "--store", tmp_path)
    assert "LC_ALL=C.UTF-8" in output  # without it TorchServe 0.12.0 on Java 25 refuses to unpack such names
    sizes = archive.read(tmp_path / "m.mar").sizes
    for name in ("a, b.txt", "w[1].txt", "Größe.json", "x/config.json", "y/config.json", "linked.txt"):
        assert sizes[f"model/{name}"] == 2
    (model / "broken").symlink_to("nowhere")
    with pytest.raises(UserError, match="broken link"):
        run("build", model, "--name", "n", "--store", tmp_path)


@pytest.mark.usefixtures("unverified")
def test_a_store_inside_the_model_is_refused(
    tmp_path: Path, minilm_like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(minilm_like, tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    with pytest.raises(UserError, match="lies inside the model's directory"):
        run("build", ".", "--name", "m")
    assert not (tmp_path / "m" / "model_store").exists()


@pytest.mark.usefixtures("unverified")
def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, minilm_like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "write", full)
    with pytest.raises(UserError, match="No space left on device"):
        run("build", minilm_like, "--name", "m", "--store", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unverified")
def test_a_transformer_in_a_folder_lies_in_the_root_and_still_loads(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = tiny_bert(tmp_path / "tiny", transformer_path="0_Transformer", dense=8)
    write_json(model / "config.json", {"__version__": "0.2"})
    output = run("build", model, "--name", "m", "--store", tmp_path)
    assert "left out (0_Transformer/config.json takes its place): config.json" in output
    archive.extract(tmp_path / "m.mar", tmp_path / "out")
    expected = SentenceTransformer(str(model)).encode("hello world")
    assert (SentenceTransformer(str(tmp_path / "out" / "model")).encode("hello world") == expected).all()


def ended(build: Any, temporary: Path) -> str:
    """What a build printed that is to end now."""
    build.join(120)
    return builders.output(build, temporary)


@pytest.mark.parametrize("options", [[], ["--force"], ["--if-changed"]])
def test_four_builds_at_once_all_end_well(tmp_path: Path, minilm_like: Path, options: list[str]) -> None:
    builds = [builders.start(minilm_like, tmp_path / "store", tmp_path, 4, *options) for _ in range(4)]
    outputs = [ended(build, tmp_path) for build in builds]
    assert [build.exitcode for build in builds] == [0] * 4, outputs
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["m.mar"]
    assert integrity.problems(tmp_path / "store" / "m.mar") == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_two_different_builds_at_once_without_force(tmp_path: Path, minilm_like: Path) -> None:
    store = tmp_path / "store"
    builds = [builders.start(minilm_like, store, tmp_path, 2, "--max-items", count) for count in ("5", "6")]
    outputs = [ended(build, tmp_path) for build in builds]
    assert sorted(build.exitcode for build in builds) == [0, 1]
    # Without the line breaks that the traceback's width puts into a long path
    assert sum("m.marexists" in "".join(output.split()) for output in outputs) == 1
    assert integrity.problems(tmp_path / "store" / "m.mar") == []


@pytest.mark.parametrize(
    ("number", "rests"), [(signal.SIGKILL, 1), (signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 0)]
)
def test_a_build_that_is_stopped_leaves_no_archive(tmp_path: Path, minilm_like: Path, number: int, rests: int) -> None:
    store = tmp_path / "store"
    build = builders.start(minilm_like, store, tmp_path, 2)  # waits for a second one that never comes
    until = time.monotonic() + 60
    while not list((tmp_path / "barrier").iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(build.pid, number)
    ended(build, tmp_path)
    assert build.exitcode != 0
    assert not (store / "m.mar").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert len(list(store.iterdir())) == rests
    assert all(path.name.startswith(".") for path in store.iterdir())
    (tmp_path / "barrier" / "0").touch()
    again = builders.start(minilm_like, store, tmp_path, 2)
    output = ended(again, tmp_path)
    assert again.exitcode == 0, output
    assert [path.name for path in store.iterdir()] == ["m.mar"]


@pytest.mark.usefixtures("unverified", "unprobed")
def test_a_handler_and_its_requirements_are_packed(
    tmp_path: Path, minilm_like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = tmp_path / "my_handler.py"
    handler.write_text(
        "from handlers.embedding import EmbeddingHandler\n"
        "class Mine(EmbeddingHandler):\n"
        "    def prompt(self, request):\n"
        "        return 'query: '\n"
    )
    needs = tmp_path / "requirements.txt"
    needs.write_text("orjson\n")
    monkeypatch.chdir(tmp_path)  # a store by a relative path, as the default is
    run("build", minilm_like, "--name", "m", "--store", ".", "--handler", handler, "--requirements", needs)
    whole = archive.read(tmp_path / "m.mar")
    assert whole.handler == "my_handler"
    assert whole.manifest["model"]["requirementsFile"] == "requirements.txt"
    archive.extract(tmp_path / "m.mar", tmp_path / "out")
    assert (tmp_path / "out" / "my_handler.py").read_bytes() == handler.read_bytes()


@pytest.mark.usefixtures("unprobed")
def test_an_archive_that_does_not_load_is_not_put_in_place(tmp_path: Path, minilm_like: Path) -> None:
    handler = tmp_path / "broken.py"
    handler.write_text(
        "from handlers.embedding import EmbeddingHandler\n"
        "class Broken(EmbeddingHandler):\n"
        "    def initialize(self, context):\n"
        "        raise RuntimeError('this is the reason')\n"
    )
    with pytest.raises(UserError, match="this is the reason"):
        run("build", minilm_like, "--name", "m", "--store", tmp_path / "store", "--handler", handler)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.usefixtures("unverified")
def test_inspect(tmp_path: Path, minilm_like: Path) -> None:
    run("build", minilm_like, "--name", "m", "--store", tmp_path, "--dtype", "bfloat16")
    path = tmp_path / "m.mar"
    table = run("inspect", path)
    for said in ("embedding", "handlers.embedding", "bfloat16", "max_tokens 48", "mean", "torch 2.", "intact"):
        assert said in table
    facts = json.loads(run("inspect", path, "--json"))
    assert facts["intact"] is True
    assert facts["sha256"] == archive.file_sha256(path)
    assert facts["members"]["model/config.json"] == (minilm_like / "config.json").stat().st_size

    with zipfile.ZipFile(path, "a") as file:
        file.writestr("model/extra", "more")
    result = CliRunner().invoke(APP, ["inspect", str(path)])
    assert result.exit_code == 1
    assert "NOT intact" in result.output
    assert "'model/extra' was added" in result.output
    result = CliRunner().invoke(APP, ["inspect", str(path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["problems"] == ["'model/extra' was added"]

    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match="truncated"):
        run("inspect", path)
    result = CliRunner().invoke(APP, ["inspect", str(path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["intact"] is False


def test_inspect_an_archive_of_torch_model_archiver(tmp_path: Path) -> None:
    (tmp_path / "my_handler.py").write_text("class H: pass\n")
    (tmp_path / "w[1].txt").write_text("x")
    command = [sys.executable, "-m", "model_archiver.model_packaging", "--model-name", "foreign", "--version", "1"]
    command += ["--handler", "my_handler.py", "--export-path", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True)
    table = " ".join(run("inspect", tmp_path / "foreign.mar").split())
    assert "no provenance: built by something else; nothing to verify against" in table
    assert "foreign, version 1" in table
