"""What goes into an archive: every member's name and content, from a model's directory and what the user asks for."""

import importlib.util
import json
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from handlers.config import ConfigError
from scripts.lib import (
    archive,
    calibration,
    checkpoint,
    decoder,
    pipeline,
    requirements,
    tasks,
    tree,
    user_handler,
    weights,
)
from scripts.lib.archive import Content
from scripts.lib.checkpoint import Checkpoint
from scripts.lib.errors import UserError
from scripts.lib.source import Source
from scripts.lib.tasks import Task
from scripts.lib.tree import LeftOut

#: Worker start-up and warm-up may take long on a large model; the frontend's own default is 120 s.
STARTUP_TIMEOUT = 300
VLLM_STARTUP_TIMEOUT = 900  # it compiles, and captures graphs
_MODEL = "model"
_RECORDED = ("torch", "transformers", "tokenizers", "safetensors", "torchserve", "torch-model-archiver")


@dataclass(frozen=True)
class Order:
    """What the person who builds asks for.

    Args:
        source: the model.
        name, version: as TorchServe will know it.
        task: `auto` or a task's name.
        max_tokens: tokens per text, None for the model's own limit.
        overrides: keys of the `handler:` section that replace what the model's files say.
        handler: the user's own handler file.
        requirements: a requirements.txt to pack.
        convert: whether pickled weights may be converted.
        trust_remote_code: whether code of the model's own may run.
        response_timeout: seconds that a batch may take.
        calibration: texts that int8 and uint8 embeddings take their ranges from, one a line.
    """

    source: Source
    name: str
    version: str
    task: str = "auto"
    max_tokens: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    handler: Path | None = None
    requirements: Path | None = None
    convert: bool = False
    trust_remote_code: bool = False
    response_timeout: int = 120
    calibration: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """An archive that is not written yet.

    Args:
        contents: member → content, PROVENANCE.json included.
        members: their checksums.
        settings: the `handler:` section.
        left_out: files of the model's directory that are not in it.
        notes: what the person who builds should know.
    """

    contents: dict[str, Content]
    members: dict[str, archive.Member]
    settings: dict[str, Any]
    left_out: list[LeftOut]
    notes: list[str]


def prepare(order: Order, work: Path) -> Recipe:
    """Find, check and measure everything that goes into the archive.

    Args:
        order: what is asked for.
        work: a directory of the build's own, for files made on the way.

    Raises:
        UserError: the model, the handler or the requirements can't be packed, and why.
    """
    files = tree.walk(order.source.directory)
    found = _checkpoint(order, files)
    model, found, left_out, notes = _model_files(order, files, found, work)
    task = tasks.SERVED[found.task]
    settings = _settings(found, task, order.overrides)
    contents: dict[str, Content] = {f"{_MODEL}/{name}": content for name, content in model.items()}
    contents |= _handlers()
    module = task.module
    if order.handler is not None:
        module = _own_handler(order.handler, contents, work)
    if order.requirements is not None:
        contents[archive.REQUIREMENTS] = requirements.read(order.requirements)
        notes.append("requirements.txt is installed only by servers with install_py_dep_per_model=true")
    contents[archive.CONFIG] = _config(settings, order, task.mode)
    contents[archive.MANIFEST] = archive.manifest(
        order.name, order.version, module, requirements=order.requirements is not None
    )
    if order.calibration is not None:
        notes += _calibrate(order.calibration, contents, settings, work)
        contents[archive.CONFIG] = _config(settings, order, task.mode)
    if not all(name.isascii() for name in contents):
        notes.append(
            "some file names are not ASCII: TorchServe needs a UTF-8 locale (serve sets it; else LC_ALL=C.UTF-8)"
        )
    members = archive.measure(contents)
    about = {
        "batchserve": _version(),
        "created_with": _created_with(),
        "source": order.source.name,
        "task": found.task,
        "left_out": {item.path: item.reason for item in left_out},
    }
    contents[archive.PROVENANCE] = archive.provenance(about, members)
    members |= archive.measure({archive.PROVENANCE: contents[archive.PROVENANCE]})
    return Recipe(contents, members, settings, left_out, [*found.notes, *notes])


def _checkpoint(order: Order, files: dict[str, Path]) -> Checkpoint:
    if decoder.is_decoder(files, order.task):
        return decoder.read(files, max_tokens=order.max_tokens, trust_remote_code=order.trust_remote_code)
    return checkpoint.read(
        files, task=order.task, max_tokens=order.max_tokens, trust_remote_code=order.trust_remote_code
    )


def _model_files(
    order: Order, files: dict[str, Path], found: Checkpoint, work: Path
) -> tuple[dict[str, Content], Checkpoint, list[LeftOut], list[str]]:
    """The members below model/, the checkpoint after any move, what is left out, and notes."""
    home = order.source.directory / found.pipeline.transformer
    moved = found.pipeline.transformer
    files, replaced, found = checkpoint.moved_to_root(files, found)
    kept, left_out = weights.partition(files, code=order.trust_remote_code)
    left_out += [LeftOut(name, f"{moved}/{name} takes its place") for name in replaced]
    notes = []
    pickled = weights.require(kept, files, ["", *found.pipeline.dense], convert=order.convert)
    converted = work / "converted"
    converted.mkdir()
    for folder in pickled:
        kept |= weights.convert(files, folder, converted)
        notes.append(f"{folder or 'the model'}: pickled weights converted to safetensors")
    made = weights.tokenizer(kept, home, converted, trust_remote_code=order.trust_remote_code)
    if made:
        kept |= made
        notes.append("tokenizer.json made from the slow tokenizer's files")
    contents: dict[str, Content] = dict(kept)
    if moved:
        modules = json.loads(kept[pipeline.MODULES].read_text(encoding="utf-8-sig"))
        for module in modules:
            if module["path"].rstrip("/") == moved:
                module["path"] = ""
        contents[pipeline.MODULES] = json.dumps(modules, indent=2).encode()
        notes.append(f"the files of {moved}/ lie in the model's root")
    return contents, found, left_out, notes


def _settings(found: Checkpoint, task: Task, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The `handler:` section, checked by the code that will read it."""
    known = {each.name for each in fields(task.config)}  # type: ignore[arg-type]  # configs are dataclasses
    asked = {key: value for key, value in overrides.items() if key in known or value != "auto"}
    if others := [key for key in asked if key not in known]:
        said = found.task.replace("_", " ")
        raise UserError(f"--{others[0].replace('_', '-')} is not for {said} models", "see batchserve build --help")
    settings = found.settings() | asked
    task.check(settings)
    try:
        task.config.from_mapping(settings)
    except ConfigError as error:
        raise UserError(str(error).removeprefix("handler: "), "see batchserve build --help") from error
    return settings


def _config(settings: dict[str, Any], order: Order, mode: Mapping[str, Any]) -> bytes:
    startup = VLLM_STARTUP_TIMEOUT if settings.get("engine") == "vllm" else STARTUP_TIMEOUT
    longest = max(startup, order.response_timeout)
    return archive.model_config(settings, response_timeout=order.response_timeout, startup_timeout=longest, mode=mode)


def _calibrate(file: Path, contents: dict[str, Content], settings: dict[str, Any], work: Path) -> list[str]:
    """Add the calibration to the members and to the `handler:` section; notes."""
    if settings["task"] != "embedding":
        raise UserError(f"--calibrate is for embeddings, and this is a model for {settings['task']}", "leave it out")
    texts = calibration.read(file)
    contents[calibration.MEMBER] = calibration.member(texts, contents, work)
    settings["calibration"] = calibration.MEMBER
    if len(texts) < calibration.FEW:
        return [f"calibrated with {len(texts)} texts; some hundreds give ranges that fit others too"]
    return []


def _handlers() -> dict[str, Content]:
    """The handlers package as members: its Python files and nothing else."""
    spec = importlib.util.find_spec("handlers")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places:
        raise UserError("the package `handlers` is not installed", "install the checkout: pip install -e .")
    found = {name: path for name, path in tree.walk(Path(places[0])).items() if name.endswith(".py")}
    return {f"handlers/{name}": path for name, path in found.items()}


def _own_handler(path: Path, contents: dict[str, Content], work: Path) -> str:
    """Check the user's handler file, add it, and return its module."""
    module = user_handler.check_text(path)
    contents[f"{module}.py"] = text = path.read_bytes()
    probe = work / "probe"
    for name, content in contents.items():
        if name.startswith("handlers/") and isinstance(content, Path):
            (probe / name).parent.mkdir(parents=True, exist_ok=True)
            (probe / name).write_bytes(content.read_bytes())
    (probe / f"{module}.py").write_bytes(text)
    user_handler.check_import(probe, module)
    return module


def _version() -> str:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return metadata.version("batchserve")


def _created_with() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _RECORDED:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
