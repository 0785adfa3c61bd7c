"""What a model's directory holds: the task it is for, and the `handler:` section that serves it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from scripts.lib import pipeline, tasks
from scripts.lib.errors import UserError
from scripts.lib.pipeline import Pipeline, load_json

# Encoders that need no look into transformers' tables, which takes seconds to import.
_ENCODERS = frozenset(
    {
        "albert", "bert", "big_bird", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra",
        "ernie", "esm", "eurobert", "flaubert", "fnet", "ibert", "jina_embeddings_v3", "longformer", "luke",
        "mobilebert", "modernbert", "mpnet", "nomic_bert", "nystromformer", "rembert", "roberta",
        "roberta-prelayernorm", "roformer", "squeezebert", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
# Families that number positions from the padding id + 1, so that their table has that many rows too many.
_OFFSET = frozenset(
    {
        "camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta",
        "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
# Larger values mean "no limit" (transformers writes 1e30).
_NO_LIMIT = 1e9


@dataclass(frozen=True)
class Checkpoint:
    """A model's directory, understood.

    Args:
        task: one of tasks.SERVED.
        pipeline: pooling and what else surrounds the network of an embedding model.
        own: keys of the `handler:` section that only this task has.
        max_tokens: tokens per text that the model takes by its own files, special ones counted.
        most_tokens: tokens that its position table has room for; None when it has no such limit.
        trust_remote_code: whether code of the model's own runs.
        notes: what the person who builds should know, a line each.
    """

    task: str
    pipeline: Pipeline
    own: Mapping[str, Any]
    max_tokens: int
    most_tokens: int | None
    trust_remote_code: bool
    notes: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """The `handler:` section, without what a deployment or the command line decides."""
        settings = {
            "task": self.task,
            "model": "model",
            "max_tokens": self.max_tokens,
            "trust_remote_code": self.trust_remote_code,
        }
        if self.task != "embedding":
            return settings | dict(self.own)
        around = self.pipeline
        return settings | {
            "pooling": around.pooling[0] if len(around.pooling) == 1 else list(around.pooling),
            "include_prompt": around.include_prompt,
            "normalize": around.normalize,
            "lower_case": around.lower_case,
            "prompts": dict(around.prompts),
            "default_prompt_name": around.default_prompt_name,
            "dense": list(around.dense),
        }


def read(
    files: Mapping[str, Path], *, task: str = "auto", max_tokens: int | None = None, trust_remote_code: bool = False
) -> Checkpoint:
    """Understand the files below a model's directory.

    Args:
        files: path below the directory → file.
        task: `auto` finds it; a name asks for it.
        max_tokens: tokens per text instead of the model's own limit.
        trust_remote_code: whether the model may bring code of its own.

    Raises:
        UserError: the model can't be served, and why.
    """
    asked = tasks.named(task)
    family = pipeline.other_family(files)
    around = pipeline.read(files) if family is None and asked in ("auto", "embedding") else None
    notes = []
    config = _config(files, around)
    _check_code(files, around, config, trust_remote_code)
    found = tasks.chosen(asked, family or ("embedding" if around is not None else tasks.of_network(config)))
    _check_network(config, found, around, trust_remote_code)
    own, more = tasks.SERVED[found].settings(files, config)
    notes += more
    if around is None:
        around = Pipeline(prompts={"query": "", "document": ""})
        if found == "embedding":
            notes.append(
                "no modules.json: mean pooling and no normalisation, as in sentence-transformers, "
                "unless options say else"
            )
    limit, most, more = _limits(files, around, config, own.pop("max_tokens", around.max_tokens))
    notes += more
    if max_tokens is not None:
        if max_tokens < 1 or (most is not None and max_tokens > most):
            raise UserError(
                f"--max-tokens {max_tokens} is not possible", f"this model takes 1 to {most or 'any number of'}"
            )
        limit = max_tokens
    if limit is None:
        raise UserError("the model's files name no longest input", "give one: --max-tokens 512")
    return Checkpoint(found, around, own, limit, most, trust_remote_code, tuple(notes))


def _config(files: Mapping[str, Path], around: Pipeline | None) -> dict[str, Any]:
    name = str(PurePosixPath(around.transformer if around else "") / "config.json")
    if name in files:
        config = load_json(files, name)
        if "model_type" in config or "auto_map" in config:
            return config
        raise UserError(f"{name} names no model_type: it is no transformers model's", "is this the model's directory?")
    if "router_config.json" in files:
        raise UserError(
            "this model reads queries and documents through different modules (Router), which is not served",
            "take a model with one Transformer for both",
        )
    if "adapter_config.json" in files:
        raise UserError(
            "this is an adapter, not a whole model", "merge it into its base model first (merge_and_unload)"
        )
    if any(path.endswith(".gguf") for path in files):
        raise UserError("this is a GGUF model", "take the original model's directory, with config.json and safetensors")
    raise UserError(f"there is no {name}: not a transformers model", "MODEL is the directory that holds config.json")


def _check_code(files: Mapping[str, Path], around: Pipeline | None, config: dict[str, Any], trusted: bool) -> None:
    """Refuse code of the model's own, unless it is trusted and lies in the directory."""
    prefix = PurePosixPath(around.transformer if around else "")
    tokenizer = load_json(files, str(prefix / "tokenizer_config.json"))
    for name, value in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        references = _references(value.get("auto_map") or {})
        if references and not trusted:
            raise UserError(
                f"{name} names code of the model's own (auto_map: {references[0]})",
                "read that code; if you trust it, build with --trust-remote-code, and it runs in every worker",
            )
        for reference in references:
            if "--" in reference:
                raise UserError(
                    f"{name} takes code from another repository ({reference})",
                    "a worker never reaches a hub: save the model with its code in its own directory",
                )
            if str(prefix / f"{reference.partition('.')[0]}.py") not in files:
                raise UserError(f"{name} names the code {reference}, which is not in the directory", "add the file")


def _references(auto_map: Any) -> list[str]:
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return sorted(str(item) for item in flat if item)


def _check_network(config: dict[str, Any], task: str, around: Pipeline | None, trusted: bool) -> None:
    """Refuse a family that has no network for the task, and decoders that are no embedding models by their files."""
    family = str(config.get("model_type", ""))
    architecture = next(iter(config.get("architectures") or []), family)
    if task == "embedding":
        if config.get("is_encoder_decoder") or family in ("t5", "mt5", "umt5", "longt5"):
            raise UserError(
                f"{architecture} is an encoder-decoder model",
                "only encoders and decoders are served as embedding models",
            )
        if family in _ENCODERS and not config.get("is_decoder"):
            return
    if trusted and config.get("auto_map"):
        return
    from transformers.models.auto import modeling_auto

    if family not in modeling_auto.MODEL_MAPPING_NAMES:
        raise UserError(
            f"transformers does not know the model type {family!r}",
            "is the model newer than the installed transformers?",
        )
    if family not in getattr(modeling_auto, tasks.SERVED[task].mapping):
        raise UserError(f"{architecture} has no network for {task.replace('_', ' ')}", "take another model")
    if task != "embedding" or (
        family in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder")
    ):
        return
    if family not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"{architecture} is no encoder of text", "only text models are served as embedding models")
    if around is None:
        raise UserError(
            f"{architecture} is a decoder, and no modules.json says how it embeds",
            "take a sentence-transformers model, such as one that pools the last token",
        )


def _limits(
    files: Mapping[str, Path], around: Pipeline, config: dict[str, Any], asked: int | None
) -> tuple[int | None, int | None, list[str]]:
    """Tokens per text by the model's own files, the room in its position table, and notes."""
    tokenizer = load_json(files, str(PurePosixPath(around.transformer) / "tokenizer_config.json"))
    stated = tokenizer.get("model_max_length", math.inf)
    most = _positions(config)
    if asked is None:
        known = [value for value in (stated, most) if isinstance(value, int | float) and 0 < value < _NO_LIMIT]
        return (int(min(known)) if known else None), most, []
    if most is not None and asked > most:
        return (
            most,
            most,
            [f"max_seq_length {asked} is more than the model's {most} positions: {most} taken"],
        )
    return asked, most, []


def _positions(config: dict[str, Any]) -> int | None:
    """Rows of the table of positions that a text can use; None without such a table."""
    family = str(config.get("model_type", ""))
    if config.get("position_biased_input") is False or str(config.get("position_embedding_type", "")).startswith(
        "relative"
    ):
        return None
    key = "max_position_embeddings"
    rows = config[key] if key in config else _default_positions(config)
    if not isinstance(rows, int) or rows < 1:
        return None
    if family not in _OFFSET:
        return rows
    padding = config.get("pad_token_id", 1)
    return rows - (padding if isinstance(padding, int) else 1) - 1


def _default_positions(config: dict[str, Any]) -> Any:
    """What transformers takes when config.json leaves max_position_embeddings out."""
    if config.get("auto_map"):
        return None
    from transformers import AutoConfig

    return getattr(AutoConfig.for_model(config["model_type"]), "max_position_embeddings", None)


def moved_to_root(files: Mapping[str, Path], checkpoint: Checkpoint) -> tuple[dict[str, Path], list[str], Checkpoint]:
    """The files with the Transformer module's sub-folder, if it has one, as the root.

    The handler wants the network's files and the folders of dense layers in one directory. Returns the new names, the
    root's files that had to make room, and the checkpoint whose pipeline says so; modules.json must then say so too.
    """
    prefix = checkpoint.pipeline.transformer
    if not prefix:
        return dict(files), [], checkpoint
    inner = {name.removeprefix(f"{prefix}/"): path for name, path in files.items() if name.startswith(f"{prefix}/")}
    outer = {name: path for name, path in files.items() if not name.startswith(f"{prefix}/")}
    replaced = sorted(inner.keys() & outer.keys())
    folders = {name.partition("/")[0] for name in inner if "/" in name}
    if clash := sorted(folder for folder in checkpoint.pipeline.dense if folder in folders):
        raise UserError(f"{prefix} holds a folder {clash[0]}, and so does the model's root", "rename one of the two")
    around = replace(checkpoint.pipeline, transformer="")
    return dict(sorted((outer | inner).items())), replaced, replace(checkpoint, pipeline=around)
