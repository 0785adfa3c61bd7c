"""Which prompt goes before a request's texts, as sentence-transformers chooses it."""

from collections.abc import Callable, Mapping
from typing import Any

from handlers.config import HandlerConfig
from handlers.errors import RequestError, nearest, shown
from handlers.options import string

OPTIONS: Mapping[str, Callable[[Any], Any]] = {"prompt_name": string, "prompt": string}


def check(options: Mapping[str, Any], config: HandlerConfig) -> None:
    """Whether the model has the prompt that a request names.

    Raises:
        RequestError: it has none of that name, or the request sends a prompt of its own as well.
    """
    if "prompt" in options and "prompt_name" in options:
        raise RequestError("Send prompt or prompt_name, not both.", code="ambiguous_input", param="prompt")
    name = options.get("prompt_name")
    if name is not None and name not in config.prompts:
        known = sorted(config.prompts)
        near = nearest(name, known)
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known) or 'none'}."
        raise RequestError(f"The model has no prompt {shown(name)}; {hint}", code="invalid_value", param="prompt_name")


def chosen(options: Mapping[str, Any], config: HandlerConfig) -> str:
    """The request's own prompt, the one it names, or the model's default."""
    if "prompt" in options:
        return str(options["prompt"])
    name = options.get("prompt_name", config.default_prompt_name)
    return config.prompts[name] if name is not None else ""
