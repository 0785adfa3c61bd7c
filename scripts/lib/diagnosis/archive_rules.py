"""What is wrong inside the archives: configuration that is ignored, requirements, and the handlers' classic faults."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from scripts.lib.archive import CONFIG, REQUIREMENTS
from scripts.lib.diagnosis.config_rules import plain
from scripts.lib.diagnosis.deployment import Deployment, StoredArchive
from scripts.lib.diagnosis.finding import Finding, Severity
from scripts.lib.diagnosis.settings import is_true, properties, served
from scripts.lib.requirements import PROVIDED

_COUNTS = frozenset(
    {"minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout", "jobQueueSize",
     "maxRetryTimeoutInSec", "parallelLevel", "clientTimeoutInMills", "sequenceMaxIdleMSec", "sequenceTimeoutMSec",
     "maxSequenceJobQueueSize", "maxNumSequence"}
)  # fmt: skip
_SWITCHES = frozenset({"useJobTicket", "continuousBatching", "sequenceBatching", "asyncCommunication", "useVenv"})
#: Every key of model-config.yaml that TorchServe's frontend reads, all at the top.
FRONTEND_KEYS = _COUNTS | _SWITCHES | {"deviceType", "parallelType", "deviceIds", "torchrun"}
_FRONTEND = {plain(key): key for key in FRONTEND_KEYS}
#: Sections of the worker's own, whose keys are theirs.
_SECTIONS = frozenset({"torchrun", "micro_batching", "pippy", "deepspeed", "pt2", "ipex", "dali"})


def unreadable(deployment: Deployment) -> Iterator[Finding]:
    """Archives that cannot be read."""
    for one in deployment.unreadable:
        yield Finding(
            "archive-unreadable", Severity.ERROR, one.path.name, one.reason,
            "TorchServe cannot register it", "build it again, or take it out of the model store",
        )  # fmt: skip


def store(deployment: Deployment) -> Iterator[Finding]:
    """A model store that isn't there."""
    if deployment.store_fault:
        yield Finding(
            "model-store-missing", Severity.ERROR, properties(deployment)["model_store"].place, deployment.store_fault,
            "TorchServe does not start, and here the archives were not looked at",
            "correct model_store, or name the store: --model-store DIR",
        )  # fmt: skip


def yaml_keys(deployment: Deployment) -> Iterator[Finding]:
    """Keys of model-config.yaml in a spelling or a place where TorchServe does not look."""
    for stored in _archives(deployment):
        config, known = stored.archive.config, stored.handler.strings if stored.handler else frozenset[str]()
        for key in map(str, config):
            if key in FRONTEND_KEYS or key in known:
                continue
            near = difflib.get_close_matches(key, sorted(FRONTEND_KEYS), n=1, cutoff=0.88)
            if meant := _FRONTEND.get(plain(key)) or (near[0] if near else None):
                yield _ignored(stored, key, f"write {meant}")
        for section, inside in config.items():
            if isinstance(inside, Mapping) and section not in _SECTIONS and stored.archive.provenance is None:
                for key in map(str, inside):
                    if (meant := _FRONTEND.get(plain(key))) and key not in known:
                        yield _ignored(stored, f"{section}: {key}", f"write {meant} at the top, without a section")


def _ignored(stored: StoredArchive, key: str, fix: str) -> Finding:
    return Finding(
        "yaml-key", Severity.ERROR, f"{stored.file}: {CONFIG}", f"{key[:80]} is not where or how TorchServe reads it",
        "it is ignored without a word", fix,
    )  # fmt: skip


def yaml_values(deployment: Deployment) -> Iterator[Finding]:
    """Values of model-config.yaml that TorchServe does not take."""
    for stored in _archives(deployment):
        config, where = stored.archive.config, f"{stored.file}: {CONFIG}"
        for key in sorted(_COUNTS & set(config)):
            value = config[key]
            if key == "maxBatchDelay" and value == 0 and not isinstance(value, bool):
                continue  # a rule of its own
            if not isinstance(value, int) or isinstance(value, bool) or value < (key in ("batchSize", "jobQueueSize")):
                yield _untaken(where, key, value, "a whole number, without quotation marks")
        for key in sorted(_SWITCHES & set(config)):
            if not isinstance(config[key], bool):
                yield _untaken(where, key, config[key], "true or false, without quotation marks")
        least, most = config.get("minWorkers"), config.get("maxWorkers")
        if isinstance(least, int) and least > 0 and not (isinstance(most, int) and most >= least):
            yield Finding(
                "yaml-workers", Severity.ERROR, where, f"minWorkers is {least} and maxWorkers is {_brief(most)}",
                "TorchServe takes neither unless it has both, the second no less than the first",
                f"set maxWorkers to {least}, or leave both to the models property",
            )  # fmt: skip


def _untaken(where: str, key: str, value: Any, wanted: str) -> Finding:
    return Finding(
        "yaml-value", Severity.ERROR, where, f"{key} is {_brief(value)}",
        "TorchServe logs a warning and goes on without it", f"write {wanted}",
    )  # fmt: skip


def _brief(value: Any) -> str:
    """A value for people; a list's or a mapping's kind only, for aliases make small YAML endless."""
    return repr(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def undeclared_files(deployment: Deployment) -> Iterator[Finding]:
    """A configuration or requirements that the manifest does not name, or names and lacks."""
    options = {"configFile": (CONFIG, "--config-file"), "requirementsFile": (REQUIREMENTS, "--requirements-file")}
    for stored in _archives(deployment):
        for key, (usual, option) in options.items():
            named = stored.archive.manifest["model"].get(key)
            if not named and usual in stored.archive.sizes:
                yield Finding(
                    "manifest-undeclared", Severity.ERROR, stored.file,
                    f"{usual} is in the archive and the manifest's {key} doesn't name it",
                    "TorchServe never reads it", f"build the archive with {option} {usual}",
                )  # fmt: skip
            elif named and named not in stored.archive.sizes:
                yield Finding(
                    "manifest-missing", Severity.ERROR, stored.file,
                    f"the manifest names {str(named)[:80]!r} and the archive doesn't have it",
                    "the model cannot be registered as it was meant", f"build the archive again, with {option}",
                )  # fmt: skip


def requirements(deployment: Deployment) -> Iterator[Finding]:
    """Requirements that are not installed, or that shadow the server's own packages."""
    switched_on = is_true(properties(deployment), "install_py_dep_per_model")
    for stored in _archives(deployment):
        if not stored.archive.has_requirements:
            continue
        venv = stored.archive.config.get("useVenv") is True
        if not switched_on and not venv:
            if deployment.file is not None:
                yield Finding(
                    "requirements-ignored", Severity.WARNING, stored.file,
                    "it has requirements and install_py_dep_per_model is not true",
                    "TorchServe does not install them: the import fails, or finds whatever is there",
                    "set install_py_dep_per_model=true, or install them in the server's environment",
                )  # fmt: skip
            continue
        again = sorted({name for line in stored.requirements if (name := _name(line)) in PROVIDED})
        if again and not venv:
            yield Finding(
                "requirements-shadow", Severity.WARNING, stored.file, f"its requirements name {', '.join(again)}",
                "TorchServe installs them again at every registration, beside the worker's own, which they shadow",
                "leave out what every worker has",
            )  # fmt: skip


def _name(line: str) -> str:
    try:
        return str(canonicalize_name(Requirement(line.partition(" #")[0].strip()).name))
    except InvalidRequirement:
        return ""


def handlers(deployment: Deployment) -> Iterator[Finding]:
    """Handlers whose source shows the classic faults."""
    sizes: dict[str, int] = {}
    for model in served(deployment):
        sizes[model.stored.file] = max(model.count("batchSize"), sizes.get(model.stored.file, 0))
    for stored in _archives(deployment):
        source, batch = stored.handler, sizes.get(stored.file, 0)
        if source is None:
            if not deployment_handler(deployment):
                yield Finding(
                    "handler-missing", Severity.ERROR, stored.file,
                    f"its handler {stored.archive.handler[:80]!r} is neither in it nor one of TorchServe's own",
                    "the workers die while they load", "build the archive again, with --handler FILE",
                )  # fmt: skip
            continue
        where = f"{stored.file}: {source.module}"
        if source.error:
            yield Finding(
                "handler-syntax", Severity.ERROR, where, f"it is no Python: {source.error}",
                "the workers die while they load", "correct the file and build the archive again",
            )  # fmt: skip
        if source.first_row is not None and batch != 1:
            yield Finding(
                "handler-first-row", Severity.ERROR, f"{where}:{source.first_row}",
                "it looks at the first row of a batch only",
                "with a batch size above 1 the others get no answer, and the whole batch fails with 503",
                "go through all rows and return a list as long, or keep the batch size at 1",
            )  # fmt: skip
        if source.fails_together is not None and batch != 1:
            yield Finding(
                "handler-fails-together", Severity.WARNING, f"{where}:{source.fails_together}",
                "an error in one row is not kept from the others",
                "one client's bad request fails the whole batch with 503",
                "catch it per row, and set that row's status: context.set_response_status(400, 'Bad Request', idx)",
            )  # fmt: skip
        if source.tensors is not None:
            yield Finding(
                "handler-tensor", Severity.ERROR, f"{where}:{source.tensors}",
                "it returns a tensor or an array",
                "clients get pickled bytes, or the batch fails with 503 (Unsupported model output data type)",
                "return plain lists (.tolist()) or bytes",
            )  # fmt: skip
        if source.pads is not None:
            yield Finding(
                "handler-pads-to-maximum", Severity.WARNING, f"{where}:{source.pads}",
                "it pads every text to the longest that the model takes",
                "a short text costs as much as the longest",
                "pad to the longest of the batch (padding=True), or sort by length and pad little",
            )  # fmt: skip


def deployment_handler(deployment: Deployment) -> bool:
    """Whether config.properties names a handler for archives without one."""
    return "default_service_handler" in properties(deployment)


def _archives(deployment: Deployment) -> list[StoredArchive]:
    return list((deployment.archives or {}).values())


RULES = (store, unreadable, yaml_keys, yaml_values, undeclared_files, requirements, handlers)
