"""A cross-encoder's files: its activation, its longest input and its prompts, as keys of the `handler:` section."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.config import ACTIVATIONS
from scripts.lib import pipeline
from scripts.lib.errors import UserError


def settings(files: Mapping[str, Path], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What sentence-transformers' CrossEncoder takes from the files, in every form from version 0.4 to 6.

    Args:
        files: path below the model's directory → file.
        config: config.json.

    Returns:
        Keys of the `handler:` section, and notes for the person who builds.

    Raises:
        UserError: the files ask for what is not served.
    """
    architecture = next(iter(config.get("architectures") or []), "")
    if not architecture.endswith("ForSequenceClassification"):
        raise UserError(
            f"{architecture or 'the model'} has no head that scores a pair of texts",
            "rerankers that read a language model's answer are not served; take one …ForSequenceClassification",
        )
    about: dict[str, Any] = {}
    found: dict[str, Any] = {}
    if pipeline.other_family(files) == "reranking" and pipeline.MODULES in files:
        about = pipeline.load_json(files, pipeline.ABOUT)
        found = _modules(files)
    name, notes = _activation(about, config)
    return {"activation": name, **found}, notes


def _modules(files: Mapping[str, Path]) -> dict[str, Any]:
    """What the one module of a modular save says, and the prompts beside it."""
    (_, path), *others = pipeline.kinds(files, ("Transformer",))
    if others or path:
        raise UserError(
            f"{pipeline.MODULES} has {'several modules' if others else f'its module in {path}'}",
            "served is a cross-encoder of one Transformer module, in the model's own directory",
        )
    limit, lower_case = pipeline.transformer_settings(
        files, path, task="sequence-classification", reads="logits", writes="scores"
    )
    prompts, default = pipeline.prompts_of(files)
    found: dict[str, Any] = {"lower_case": lower_case, "prompts": prompts, "default_prompt_name": default}
    return found | ({"max_tokens": limit} if limit is not None else {})


def _activation(about: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The class of torch.nn that the files name, as CrossEncoder looks for it, and a note where it takes another."""
    labels = config.get("num_labels") or len(config.get("id2label") or ("", ""))
    default = "Sigmoid" if labels == 1 else "Identity"
    notes: list[str] = []
    section = config.get("sentence_transformers") or {}
    older = config.get("sbert_ce_default_activation_function")  # until version 3
    for path in (about.get("activation_fn"), section.get("activation_fn", older)):
        if path is None:
            continue
        name = str(path).rpartition(".")[2]
        if str(path).startswith("torch.") and name in ACTIVATIONS:
            return name, notes
        if str(path).startswith("torch."):
            raise UserError(f"the files name the activation {path}", f"served are {', '.join(ACTIVATIONS)}")
        notes.append(f"the activation {path} is code of the model's own: {default} taken, as in sentence-transformers")
    return default, notes
