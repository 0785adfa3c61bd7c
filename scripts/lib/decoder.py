"""A decoder-only model's directory, understood: the task `generation`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib import tasks
from scripts.lib.checkpoint import Checkpoint
from scripts.lib.errors import UserError
from scripts.lib.pipeline import MODULES, Pipeline, load_json

TASK = "generation"
#: Why there is one worker, and what several devices are used by.
ONE_WORKER = (
    "a generation archive has one worker: a second one would hold the queue and stall the first one's streams. For"
    " several devices declare an entry for each, or build with --engine vllm and its tensor_parallel_size"
)

_ENDS = ("ForCausalLM", "LMHeadModel")
# transformers' continuous batching pages keys and values; these families keep another kind of state.
_STATEFUL = (
    "mamba",
    "rwkv",
    "jamba",
    "bamba",
    "zamba",
    "recurrent_gemma",
    "falcon_mamba",
    "falcon_h1",
    "xlstm",
    "lfm2",
)


@dataclass(frozen=True)
class Decoder(Checkpoint):
    """A decoder-only model's directory, understood; `own` has the context where one was asked for."""

    def settings(self) -> dict[str, Any]:
        """The `handler:` section, without what a deployment or the command line decides."""
        return {"task": self.task, "model": "model", "trust_remote_code": self.trust_remote_code, **self.own}


def is_decoder(files: Mapping[str, Path], task: str) -> bool:
    """Whether the files are a decoder-only model's, to be served as one.

    Args:
        files: path below the model's directory → file.
        task: the task that was asked for, `auto` among them.
    """
    asked = tasks.named(task)
    if asked == TASK:
        return True
    if asked != "auto" or MODULES in files or "config.json" not in files:
        return False
    config = load_json(files, "config.json")
    return not config.get("is_encoder_decoder") and _architecture(config).endswith(_ENDS)


def read(files: Mapping[str, Path], *, max_tokens: int | None, trust_remote_code: bool) -> Decoder:
    """Understand the files below a decoder-only model's directory.

    Args:
        files: path below the model's directory → file.
        max_tokens: most tokens of a prompt and its answer instead of what model and cache allow.
        trust_remote_code: whether the model may bring code of its own.

    Raises:
        UserError: the model can't be served, and why.
    """
    if "config.json" not in files:
        raise UserError("there is no config.json: not a transformers model", "MODEL is the directory that holds it")
    config = load_json(files, "config.json")
    family, architecture = str(config.get("model_type", "")), _architecture(config)
    if config.get("is_encoder_decoder") or not architecture.endswith(_ENDS):
        raise UserError(
            f"{architecture or family or 'this'} is no decoder-only language model",
            "the task generation is for models such as LlamaForCausalLM",
        )
    if family.startswith(_STATEFUL):
        raise UserError(f"{family} models keep a state that cannot be paged", "take a model that has attention alone")
    if config.get("auto_map") and not trust_remote_code:
        raise UserError(
            "config.json names code of the model's own (auto_map)",
            "read that code; if you trust it, build with --trust-remote-code, and it runs in the worker",
        )
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    most = positions if isinstance(positions, int) and positions > 0 else None
    if max_tokens is not None and (max_tokens < 2 or (most is not None and max_tokens > most)):
        raise UserError(
            f"a context of {max_tokens} tokens is not possible", f"this model takes 2 to {most or 'any number of'}"
        )
    notes = []
    if not _has_template(files):
        notes.append("the model has no chat template: v1/chat/completions is refused, v1/completions works")
    return Decoder(
        task=TASK,
        pipeline=Pipeline(),
        own={} if max_tokens is None else {"max_model_len": max_tokens},
        max_tokens=max_tokens or most or 0,
        most_tokens=most,
        trust_remote_code=trust_remote_code,
        notes=tuple(notes),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    return str(next(iter(config.get("architectures") or []), ""))


def _has_template(files: Mapping[str, Path]) -> bool:
    named = "chat_template.jinja" in files or any(name.startswith("additional_chat_templates/") for name in files)
    return named or bool(load_json(files, "tokenizer_config.json").get("chat_template"))
