"""An encoder-decoder's files: how long its sources and its texts may be, as keys of the `handler:` section."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.config import HandlerConfig
from scripts.lib.pipeline import load_json

_RELATIVE = ("t5", "mt5", "umt5")  # families without a table of positions: any length runs
_TRAINED = 512  # tokens that those were trained on


def settings(files: Mapping[str, Path], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What the handler must know of a model that writes texts.

    Args:
        files: path below the model's directory → file.
        config: config.json.

    Returns:
        `max_new_tokens`, where the model's own default passes the handler's; `max_tokens`, where no file tells it. And
        notes for the person who builds.
    """
    found: dict[str, Any] = {}
    notes: list[str] = []
    own = load_json(files, "generation_config.json") if "generation_config.json" in files else config
    specific = [value for value in (config.get("task_specific_params") or {}).values() if isinstance(value, Mapping)]
    longest = max(map(_new_tokens, [own, *specific]))
    if longest > HandlerConfig.max_new_tokens:
        found["max_new_tokens"] = longest
    stated = load_json(files, "tokenizer_config.json").get("model_max_length")
    told = isinstance(stated, int | float) and 0 < stated < 1e9
    if config.get("model_type") in _RELATIVE and not told:
        trained = config.get("n_positions")
        found["max_tokens"] = trained if isinstance(trained, int) and trained > 0 else _TRAINED
        notes.append(f"no file tells the longest input: {found['max_tokens']} tokens, unless --max-tokens says else")
    return found, notes


def _new_tokens(generation: Mapping[str, Any]) -> int:
    """Tokens that generate writes at most by these settings; 0 where they don't say."""
    tokens, length = generation.get("max_new_tokens"), generation.get("max_length")
    if isinstance(tokens, int):
        return tokens
    return length - 1 if isinstance(length, int) else 0
