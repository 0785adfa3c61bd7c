"""sentence-transformers' files: what surrounds the network of a model, as keys of the `handler:` section.

Reads modules.json and the configurations it points to in every form from version 0.4 to 6, without importing the
library, and refuses what the handler would not compute the same way.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.errors import UserError
from scripts.lib.tree import check_name

MODULES = "modules.json"
ABOUT = "config_sentence_transformers.json"

_TRANSFORMER_CONFIGS = [
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# In the order in which sentence-transformers concatenates them.
_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SERVED = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
# Arguments that change how a model is loaded and not what it computes on text.
_HARMLESS = {
    "trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "use_fast", "padding_side", "low_cpu_mem_usage",
    "local_files_only", "device_map", "use_safetensors",
}  # fmt: skip
_SENTENCE = "sentence_embedding"
#: sentence-transformers' other families of models → the task of each.
FAMILIES = {
    "CrossEncoder": "reranking",
    "SparseEncoder": "sparse_embedding",
    "MultiVectorEncoder": "multi-vector embedding",
}


@dataclass(frozen=True)
class Pipeline:
    """What sentence-transformers' files say.

    Args:
        transformer: sub-folder of the Transformer module, "" for the root.
        pooling: pooling modes, concatenated in this order.
        include_prompt: whether a prompt's tokens are pooled.
        dense: sub-folders of Dense modules, in order.
        normalize: whether it ends with unit vectors.
        max_tokens: max_seq_length, None when the files don't say.
        lower_case: texts are lower-cased first.
        prompts: name → text.
        default_prompt_name: the prompt for requests that name none.
    """

    transformer: str = ""
    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    dense: tuple[str, ...] = ()
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None


def load_json(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    """The JSON object in the file `name`, {} when there is no such file.

    Raises:
        UserError: it is not JSON, or no object.
    """
    value = _load(files, name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{files[name]} is no JSON object", "is the download complete?")
    return value


def _load(files: Mapping[str, Path], name: str) -> Any:
    if name not in files:
        return None
    try:
        return json.loads(files[name].read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{files[name]} is not JSON: {error}", "is the download complete?") from error


def other_family(files: Mapping[str, Path]) -> str | None:
    """The task that config_sentence_transformers.json names, when that is another one than embedding."""
    name = load_json(files, ABOUT).get("model_type", "SentenceTransformer")
    return None if name == "SentenceTransformer" else FAMILIES.get(str(name), str(name))


def read(files: Mapping[str, Path]) -> Pipeline | None:
    """What the files below a model's directory say; None when there is no modules.json.

    Args:
        files: path below the model's directory → file.

    Raises:
        UserError: a module, an order or a setting that isn't served, or a file that is missing.
    """
    if MODULES not in files:
        return None
    found = kinds(files, _SERVED)
    _check_order([kind for kind, _ in found])
    paths = {kind: [path for other, path in found if other == kind] for kind in _SERVED}
    transformer = paths["Transformer"][0]
    for path in paths["Dense"]:
        _check_dense(files, path)
    for path in paths["Normalize"]:
        _check_keys(load_json(files, f"{path}/config.json"), path)
    pooling, include_prompt = _pooling(files, paths["Pooling"][0])
    max_tokens, lower_case = transformer_settings(files, transformer)
    prompts, default = prompts_of(files)
    return Pipeline(
        transformer=transformer,
        pooling=pooling,
        include_prompt=include_prompt,
        dense=tuple(paths["Dense"]),
        normalize=bool(paths["Normalize"]),
        max_tokens=max_tokens,
        lower_case=lower_case,
        prompts=prompts,
        default_prompt_name=default,
    )


def kinds(files: Mapping[str, Path], served: Sequence[str]) -> list[tuple[str, str]]:
    """(class name, sub-folder) of every module that modules.json names.

    Raises:
        UserError: a class that is not one of `served`.
    """
    modules = _load(files, MODULES)
    try:
        rows = [(str(row["type"]), str(row["path"])) for row in modules]
    except (TypeError, KeyError) as error:
        raise UserError(f"{MODULES} is no list of modules with type and path", "is the download complete?") from error
    found = []
    for reference, path in rows:
        package, _, kind = reference.rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            raise UserError(
                f"{MODULES} names {reference}, code of the model's own",
                "such a model can't be served; sentence-transformers' own modules can",
            )
        if kind not in served:
            raise UserError(
                f"{MODULES} names the module {kind}, which is not served",
                f"served are {', '.join(served)}",
            )
        found.append((kind, check_name(path.rstrip("/")) if path.rstrip("/") else ""))
    return found


def _check_order(found: list[str]) -> None:
    order = [kind for kind in found if kind != "Dropout"]  # nothing at inference
    expected = "Transformer, Pooling, any number of Dense, then Normalize or not"
    rest = order[2:]
    dense = rest[: rest.index("Normalize")] if "Normalize" in rest else rest
    tail = rest[len(dense) :]
    if order[:2] != ["Transformer", "Pooling"] or set(dense) - {"Dense"} or set(tail) - {"Normalize"}:
        raise UserError(
            f"{MODULES} has the modules {', '.join(found) or 'of none'}; served is {expected}",
            "a model of another shape can't be served",
        )


def _pooling(files: Mapping[str, Path], path: str) -> tuple[tuple[str, ...], bool]:
    name = f"{path}/config.json" if path else "config.json"
    if name not in files:
        raise UserError(f"{name} is missing, which says how to pool", "is the download complete?")
    config = load_json(files, name)
    mode = config.get("pooling_mode")
    if mode is None:
        mode = [mode for key, mode in _LEGACY_POOLING.items() if config.get(key)] or "mean"
    modes = (mode,) if isinstance(mode, str) else tuple(mode)
    unknown = [mode for mode in modes if mode not in _LEGACY_POOLING.values()]
    if unknown:
        raise UserError(f"{name} asks for the pooling mode {unknown[0]!r}, which is not served", "is the file intact?")
    return modes, bool(config.get("include_prompt", True))


def _check_keys(config: Mapping[str, Any], path: str) -> None:
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, _SENTENCE):
            raise UserError(f"{path}/config.json has {key} {config[key]!r}; served is {_SENTENCE}", "")


def _check_dense(files: Mapping[str, Path], path: str) -> None:
    name = f"{path}/config.json"
    config = load_json(files, name)
    if not isinstance(config.get("in_features"), int) or not isinstance(config.get("out_features"), int):
        raise UserError(f"{name} does not say in_features and out_features", "is the download complete?")
    activation = config.get("activation_function", "torch.nn.Tanh")
    if not str(activation).startswith("torch.nn."):
        raise UserError(f"{name} names the activation {activation}, which is no part of torch.nn", "")
    _check_keys(config, path)


def transformer_settings(
    files: Mapping[str, Path],
    path: str,
    *,
    task: str = "feature-extraction",
    reads: str = "last_hidden_state",
    writes: str = "token_embeddings",
) -> tuple[int | None, bool]:
    """max_seq_length and do_lower_case of a Transformer module; refuses what the handler doesn't do.

    Args:
        path: the module's sub-folder.
        task: its `transformer_task`.
        reads: the network's output that it reads.
        writes: what it calls that for the next module.
    """
    prefix = f"{path}/" if path else ""
    name = next((prefix + name for name in _TRANSFORMER_CONFIGS if load_json(files, prefix + name)), None)
    if name is None:
        return None, False
    config = load_json(files, name)

    def refuse(what: str) -> UserError:
        return UserError(f"{name} has {what}, which is not served", "a model without it can be served")

    if config.get("transformer_task", task) != task:
        raise refuse(f"transformer_task {config['transformer_task']}")
    text = config.get("modality_config", {}).get("text", {})
    if "modality_config" in config and not text:
        raise refuse("no modality text")
    if text.get("method", "forward") != "forward" or text.get("method_output_name") not in (None, reads):
        raise refuse(f"the text modality {text}")
    if config.get("module_output_name") not in (None, writes):
        raise refuse(f"module_output_name {config['module_output_name']}")
    for key in ("query_length", "document_length", "query_expansion", "processing_kwargs", "tokenizer_name_or_path"):
        if config.get(key):
            raise refuse(key)
    limit = config.get("max_seq_length")
    for key in ("model_args", "model_kwargs", "config_args", "config_kwargs", "tokenizer_args", "processor_kwargs"):
        arguments = dict(config.get(key) or {})
        if key in ("tokenizer_args", "processor_kwargs"):
            limit = arguments.pop("model_max_length", limit)
        if unknown := sorted(arguments.keys() - _HARMLESS):
            raise refuse(f"{key} {', '.join(unknown)}")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise UserError(f"{name} has max_seq_length {limit!r}", "it is a number of tokens")
    return limit, bool(config.get("do_lower_case", False))


def prompts_of(files: Mapping[str, Path]) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the one that is put before texts by default."""
    about = load_json(files, ABOUT)
    if about.get("truncate_dim") is not None:
        raise UserError(
            f"{ABOUT} has truncate_dim, which is not served", "remove it; requests can ask for `dimensions`"
        )
    prompts = {str(name): "" if text is None else str(text) for name, text in (about.get("prompts") or {}).items()}
    default = about.get("default_prompt_name")
    # The library knows these two names for every model: without a text of its own they mean none.
    prompts = {"query": "", "document": ""} | prompts
    if default is not None and default not in prompts:
        raise UserError(
            f"{ABOUT} names the default prompt {default!r}, which is not among its prompts", "correct the file"
        )
    return prompts, None if default is None else str(default)
