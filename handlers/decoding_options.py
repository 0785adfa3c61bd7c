"""How a model writes a text: the parameters of transformers' `generate` that a request may set, and their sum."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from handlers.errors import RequestError
from handlers.options import boolean, integer, number

MAX_BEAMS = 16
DEFAULT_NEW_TOKENS = 20  # generate's own, for models that name no length


def early_stopping(value: Any) -> bool | str:
    """true, false or "never": when beam search ends."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "never"):
        return value
    raise RequestError("The option must be true, false or 'never'.", code="invalid_value")


#: Name, as `generate` has it → its check; `seed` is ours.
OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "max_new_tokens": integer(1),
    "min_new_tokens": integer(0),
    "max_length": integer(2),
    "min_length": integer(0),
    "num_beams": integer(1, MAX_BEAMS),
    "early_stopping": early_stopping,
    "length_penalty": number(-10, 10),
    "no_repeat_ngram_size": integer(0, 1000),
    "repetition_penalty": number(0.1, 10),
    "do_sample": boolean,
    "temperature": number(0.01, 100),
    "top_k": integer(0, 1 << 30),
    "top_p": number(0.001, 1),
    "seed": integer(0, (1 << 63) - 1),
}
_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_BEAMS = ("early_stopping", "length_penalty")


@dataclass(frozen=True)
class Decoding:
    """How texts are written; equal ones may be written together.

    Args:
        max_length: tokens of the longest text, the decoder's start token counted.
        min_length: tokens, counted likewise, before which no text ends.
        num_beams: beams of a beam search; 1 takes the best token at once.
        early_stopping, length_penalty: of a beam search.
        no_repeat_ngram_size: n-grams of this size never come twice; 0 allows all.
        repetition_penalty: divides the scores of tokens that were there before.
        do_sample: draw tokens instead of taking the best.
        temperature, top_k, top_p: what is drawn from.
        seed: of the draw.
        apart: a number of its own for a text that must be written alone.
    """

    max_length: int = DEFAULT_NEW_TOKENS + 1
    min_length: int = 0
    num_beams: int = 1
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int | None = None
    apart: int | None = None

    def settings(self) -> dict[str, Any]:
        """The arguments of `generate`: every one that a request may set, whatever the model's own default."""
        names = ["max_length", "min_length", "num_beams", "no_repeat_ngram_size", "repetition_penalty", "do_sample"]
        names += _BEAMS if self.num_beams > 1 else ()
        names += _SAMPLING[:-1] if self.do_sample else ()
        values = {name: getattr(self, name) for name in names}
        return values | {"max_new_tokens": None, "min_new_tokens": None, "num_return_sequences": 1}


def defaults(generation: Mapping[str, Any], limit: int) -> Decoding:
    """What a model does when nothing is asked of it.

    Args:
        generation: generation_config.json, or task_specific_params on top of it.
        limit: most new tokens.
    """
    known = {name: generation[name] for name in Decoding.__dataclass_fields__ if generation.get(name) is not None}
    for end in ("max", "min"):
        if generation.get(f"{end}_new_tokens") is not None:
            known[f"{end}_length"] = generation[f"{end}_new_tokens"] + 1
    decoding = Decoding(**known)
    return replace(decoding, max_length=min(decoding.max_length, limit + 1))


def chosen(options: Mapping[str, Any], default: Decoding, limit: int) -> Decoding:
    """What a request asks for.

    Args:
        options: of the request, each checked by OPTIONS; others are passed over.
        default: what the model does by itself.
        limit: most new tokens.

    Raises:
        RequestError: options that contradict each other, have no effect, or pass the limit.
    """
    given = {name: value for name, value in options.items() if name in OPTIONS}
    for end in ("max", "min"):
        tokens, length = f"{end}_new_tokens", f"{end}_length"
        if tokens in given and length in given:
            raise RequestError(f"Send {tokens} or {length}, not both.", code="ambiguous_input", param=length)
        if tokens in given:
            given[length] = given.pop(tokens) + 1
    decoding = replace(default, **given)
    if decoding.max_length > limit + 1:
        name = "max_new_tokens" if "max_new_tokens" in options else "max_length"
        most = limit if name == "max_new_tokens" else limit + 1
        raise RequestError(
            f"{name} is {options[name]}; this model writes at most {most}.", code="invalid_value", param=name
        )
    if "min_length" in given and decoding.min_length > decoding.max_length:
        name = "min_new_tokens" if "min_new_tokens" in options else "min_length"
        most = decoding.max_length - (name == "min_new_tokens")
        raise RequestError(
            f"{name} is {options[name]}, but a text ends after {most}; raise max_new_tokens as well.",
            code="invalid_value",
            param=name,
        )
    _check_effect(given, _SAMPLING, decoding.do_sample, "do_sample is true")
    _check_effect(given, _BEAMS, decoding.num_beams > 1, "num_beams is more than 1")
    return decoding


def _check_effect(given: Mapping[str, Any], names: tuple[str, ...], effective: bool, condition: str) -> None:
    idle = None if effective else next((name for name in names if name in given), None)
    if idle is not None:
        raise RequestError(f"{idle} has no effect unless {condition}.", code="no_effect", param=idle)
