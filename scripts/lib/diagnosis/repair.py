"""What can be put right in config.properties without a doubt, with comments, order and everything else kept.

Each repair takes a deployment and returns the file's new text and what it changed, or None when there is nothing left
for it; they are repeated until none has anything to do.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace

from packaging.version import InvalidVersion, Version

from scripts.lib.diagnosis import gson
from scripts.lib.diagnosis.config_rules import PER_MODEL, model_key, per_model, plain, spelling
from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.properties_file import Entry, PropertiesFile
from scripts.lib.diagnosis.settings import BOOLEANS, INTEGERS, load_list, served
from scripts.lib.effective import packed
from scripts.lib.properties import dumps

_DOORS = frozenset(
    {"disable_token_authorization", "enable_model_api", "allowed_urls", "use_env_allowed_urls", "enable_envvars_config"}
)
_MOST = 1000  # repairs of one file
_BREAK = re.compile(r"\r\n|\n|\r")

Repaired = tuple[str, str]


def repair(deployment: Deployment) -> tuple[Deployment, list[str]]:
    """Put right what is certain.

    Returns: the deployment with the file's new text, not yet written, and what was changed, a line each.

    Raises:
        UserError: a new text cannot be parsed.
    """
    changes: list[str] = []
    while deployment.file is not None and len(changes) < _MOST:
        done = next((done for each in REPAIRS if (done := each(deployment, deployment.file)) is not None), None)
        if done is None or done[0] == deployment.file.text:
            break
        deployment = replace(deployment, file=deployment.file.with_text(done[0]))
        changes.append(done[1])
    return deployment, changes


def _join_models(_: Deployment, file: PropertiesFile) -> Repaired | None:
    """Backslashes that a `models` JSON over several lines lacks."""
    cut = file.rejoined
    if cut is None:
        return None
    pieces = re.split(r"(\r\n|\n|\r)", file.text)  # line, break, line, break …
    lines, breaks = pieces[::2], pieces[1::2]
    end = breaks[0] if breaks else "\n"
    kept = [line.rstrip(" \t\\") for line in lines[cut.first - 1 : cut.last] if line not in cut.comments]
    kept = [line for line in kept if line.strip()]
    middle = [*cut.comments, *(f"{line} \\" for line in kept[:-1]), kept[-1]]
    before = "".join(line + after for line, after in zip(lines[: cut.first - 1], breaks, strict=False))
    rest = "".join(pieces[2 * cut.last - 1 :])
    return before + end.join(middle) + rest, f"line {cut.first}: models is one value up to line {cut.last} again"


def _spell(_: Deployment, file: PropertiesFile) -> Repaired | None:
    """Properties in camelCase or with dashes."""
    for entry in file.entries:
        meant = spelling(entry.key)
        if meant is not None and not _is_door(meant) and file.get(meant) is None and entry.key in entry.source:
            source = entry.source.replace(entry.key, meant, 1)
            return _with(file, entry, source), f"line {entry.line}: {entry.key} is {meant}"
    return None


def _strip(_: Deployment, file: PropertiesFile) -> Repaired | None:
    """Blanks behind numbers and booleans."""
    for entry in file.entries:
        if entry.key in INTEGERS | BOOLEANS and not _is_door(entry.key) and entry.value != entry.value.rstrip():
            text, end = _split_end(entry.source)
            return _with(file, entry, text.rstrip() + end), f"line {entry.line}: no blank behind {entry.key}"
    return None


def _load_models(deployment: Deployment, file: PropertiesFile) -> Repaired | None:
    """Blanks between the models to load."""
    entry, wanted = file.get("load_models"), load_list(deployment)
    if entry is None or wanted is None or deployment.archives is None:
        return None
    stripped = [(name.strip(), url.strip()) for name, url in wanted]
    if stripped == wanted or any(url not in deployment.archives for _, url in stripped):
        return None
    value = ",".join(f"{name}={url}" if name else url for name, url in stripped)
    return _with(file, entry, _line("load_models", value, entry)), f"line {entry.line}: no blanks in load_models"


def _move_ignored(deployment: Deployment, file: PropertiesFile) -> Repaired | None:
    """Global settings to where they take effect, when every model loaded is known and none says otherwise."""
    models, loaded = _strict_models(file), served(deployment)
    if models is None or not loaded or file.get("model_snapshot") is not None:
        return None
    wanted = load_list(deployment)
    if (wanted is None and file.get("load_models") is None) or (wanted is not None and len(wanted) != len(loaded)):
        return None
    for entry in file.entries:
        keys = per_model(entry.key)
        if not keys or not re.fullmatch(r"[0-9]{1,9}", entry.value.strip(), re.ASCII):
            continue
        number = int(entry.value) or (1 if keys == PER_MODEL["max_batch_delay"] else 0)
        new, certain = copy.deepcopy(models), number > 0
        for model in loaded:
            settings = new.setdefault(model.name, {}).setdefault(model.stored.version, {})
            for key in keys:
                in_archive = packed(model.stored.archive.config, key)
                certain = certain and in_archive is None and settings.setdefault(key, number) == number
        if certain:
            text, end = _split_end(entry.source)
            comment = f"# (TorchServe ignores it here: see models) {_BREAK.sub(' ', text).strip()}{end or _end(file)}"
            commented = file.with_text(_with(file, entry, comment))
            names = ", ".join(f"{model.name} {model.stored.version}" for model in loaded)
            meant = " and ".join(keys)
            return _with_models(commented, new), f"line {entry.line}: {entry.key} is {meant} of {names}, in models"
    return None


def _respell_models(deployment: Deployment, file: PropertiesFile) -> Repaired | None:
    """Names, versions and keys in the `models` JSON that differ from what is meant in spelling only."""
    models = _strict_models(file)
    if not models:
        return None
    new = copy.deepcopy(models)
    loaded: dict[str, list[str]] = {}
    for model in served(deployment):
        loaded.setdefault(model.name, []).append(model.stored.version)
    for name, versions in models.items():
        same = [one for one in loaded if plain(one) == plain(name.removesuffix(".mar")) and one not in models]
        if name not in loaded and len(same) == 1:
            renamed = {same[0] if one == name else one: value for one, value in new.items()}
            return _with_models(file, renamed), f"models: {name} is {same[0]}"
        for version, settings in versions.items():
            registered = loaded.get(name, [])
            if len(registered) == 1 and registered[0] not in versions and _same(version, registered[0]):
                new[name] = {registered[0] if one == version else one: value for one, value in versions.items()}
                return _with_models(file, new), f'models, {name}: version "{version}" is "{registered[0]}"'
            for key, value in settings.items():
                meant = model_key(key)
                if meant is not None and meant not in settings:
                    new[name][version] = {meant if one == key else one: set_ for one, set_ in settings.items()}
                    return _with_models(file, new), f"models, {name} {version}: {key} is {meant}"
                if key == "maxBatchDelay" and not isinstance(value, bool) and value in (0, "0"):
                    new[name][version][key] = 1
                    return _with_models(file, new), f"models, {name} {version}: maxBatchDelay 0 is 1"
    return None


REPAIRS: tuple[Callable[[Deployment, PropertiesFile], Repaired | None], ...] = (
    _join_models, _spell, _strip, _load_models, _respell_models, _move_ignored,
)  # fmt: skip


def _is_door(key: str) -> bool:
    """Whether a property lets somebody in; a repair never opens what happens to be shut."""
    return key in _DOORS or key.endswith("_address") or key.startswith("cors_")


def _same(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return False


def _strict_models(file: PropertiesFile) -> gson.Models | None:
    """The file's `models`, {} without any; None when it holds what a rewriting would lose (comments) or is broken."""
    entry = file.get("models")
    if entry is None:
        return {}
    if "$$" in entry.value or sum(other.key == "models" for other in file.entries) > 1:
        return None
    try:
        if json.loads(entry.value) != gson.models(entry.value):
            return None
        return gson.models(entry.value)
    except (ValueError, RecursionError):
        return None


def _with(file: PropertiesFile, entry: Entry, source: str) -> str:
    """The file's text with an entry's source replaced."""
    parts = (source if part is entry else part.source if isinstance(part, Entry) else part for part in file.parts)
    return "".join(parts)


def _with_models(file: PropertiesFile, models: gson.Models) -> str:
    """The file's text with another `models`, over as many lines as it was, after load_models where it is new."""
    entry = file.get("models")
    if entry is None:
        after = file.get("load_models") or file.entries[-1]
        text, end = _split_end(after.source)
        line = _line("models", json.dumps(models, separators=(",", ":")), after)
        return _with(file, after, text + (end or _end(file)) + line)
    if len(_BREAK.findall(_split_end(entry.source)[0])) == 0:
        return _with(file, entry, _line("models", json.dumps(models, separators=(",", ":")), entry))
    _, end = _split_end(entry.source)
    lines = json.dumps(models, indent=2).replace("\\", "\\\\").split("\n")
    return _with(file, entry, "models=" + ("\\" + _end(file)).join(lines) + end)


def _line(key: str, value: str, like: Entry) -> str:
    """A property on one line, that ends as `like` does."""
    return dumps({key: value}).rstrip("\n") + _split_end(like.source)[1]


def _split_end(source: str) -> tuple[str, str]:
    """A source's text, and the line break at its end ("" at the end of the file)."""
    match = re.search(r"(\r\n|\n|\r)?\Z", source)
    end = match[1] or "" if match else ""
    return source[: len(source) - len(end)], end


def _end(file: PropertiesFile) -> str:
    match = _BREAK.search(file.text)
    return match[0] if match else "\n"
