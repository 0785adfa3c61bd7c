"""What a classifier's labels say of entailment (natural language inference), for the person who builds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def classification(files: Mapping[str, Path], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """No settings; a note where the labels are those of entailment, which is another task's to use as well.

    Args:
        files: path below the model's directory → file.
        config: config.json.
    """
    if not _entails(config):
        return {}, []
    return {}, [
        "its labels are those of entailment (NLI): --task zero-shot-classification judges labels of the client's own"
    ]


def zero_shot(files: Mapping[str, Path], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """No settings; a note where no label says entailment.

    Args:
        files: path below the model's directory → file.
        config: config.json.
    """
    if _entails(config):
        return {}, []
    return {}, [
        "none of its labels starts with 'entail': the last one is taken for entailment, as in transformers' pipeline"
    ]


def _entails(config: Mapping[str, Any]) -> bool:
    """Whether a label says entailment, as transformers' pipeline looks for it."""
    names = [*(config.get("label2id") or {}), *(config.get("id2label") or {}).values()]
    return any(str(name).lower().startswith("entail") for name in names)
