"""Body → what is asked, in the three shapes that a client may speak.

| shape       | path behind the version | body                                                                        |
| chat        | v1/chat/completions     | {"messages": […], …}, as OpenAI's                                           |
| completions | v1/completions          | {"prompt": …, …}, as OpenAI's                                               |
| plain       | none                    | {"prompt" or "text" or "inputs": "…", "parameters": {…}}, or text/plain     |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers import options
from handlers.decoding import Call
from handlers.errors import RequestError, UnknownRoute, nearest, shown
from handlers.generation import parameters, tools
from handlers.generation.engine import Sampling
from handlers.generation.messages import Message, messages
from handlers.generation.parameters import Check
from handlers.generation.tools import NO_CALLS, Toolbox, toolbox
from handlers.options import boolean, integer, number, string

CHAT, COMPLETIONS, MODELS = "v1/chat/completions", "v1/completions", "v1/models"
DESCRIBE = "describe"  # what is served and how it stands
MAX_SEQUENCES = 128  # of one request: prompts × n

Prompt = str | tuple[int, ...]

_SAMPLING: Mapping[str, Check] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": parameters.top_k,
    "seed": integer(-(2**63), 2**63 - 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": parameters.above_zero(10),
    "logit_bias": parameters.logit_bias,
    "min_tokens": integer(0),
}
_COMMON: Mapping[str, Check] = {
    **_SAMPLING,
    "max_tokens": integer(1),
    "stop": parameters.stops,
    "n": integer(1, MAX_SEQUENCES),
    "ignore_eos": boolean,
    "priority": integer(-(2**31), 2**31 - 1),
    "stream": boolean,
    "response_format": parameters.response_format,
}
_OPENAI: Mapping[str, Check] = {**_COMMON, "model": string, "stream_options": lambda value: value}
_KNOWN: Mapping[str, Mapping[str, Check]] = {
    "chat": {
        **_OPENAI,
        "max_completion_tokens": integer(1),
        "logprobs": boolean,
        "top_logprobs": integer(0, 20),
        "tools": tools.tools,
        "tool_choice": tools.tool_choice,
        "parallel_tool_calls": boolean,
    },
    "completions": {**_OPENAI, "logprobs": integer(0, 5)},
    "plain": {**_COMMON, "max_new_tokens": integer(1), "do_sample": boolean},
}
# Labels that change nothing about the text.
_LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"})
# What we do not do, and the values that ask for nothing of it.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
_PLAIN_FIELDS = ("prompt", "text", "inputs")


@dataclass(frozen=True)
class Generation:
    """What one client asks.

    Args:
        shape: a row of the table above.
        field: the field that held the prompts, for errors.
        messages: of a chat.
        prompts: of the other shapes.
        sampling, stop: see engine.Sampling and detokenizer.StopStrings.
        max_tokens: None for what fits.
        n: answers for each prompt.
        stream: whether the answer comes in pieces.
        include_usage: whether a stream ends with its usage.
        ignore_eos: whether the model's own end of text is no end.
        priority: lower goes first among those that wait.
        schema: the JSON schema that each answer must follow; None for none.
        toolbox: what may and must be called.
    """

    shape: str
    field: str
    sampling: Sampling
    messages: tuple[Message, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    ignore_eos: bool = False
    priority: int = 0
    schema: Mapping[str, Any] | None = None
    toolbox: Toolbox = NO_CALLS


def check_route(route: str) -> None:
    """Refuse a path that is none of ours.

    Raises:
        UnknownRoute: with the paths that there are.
    """
    if route not in ("", CHAT, COMPLETIONS, MODELS, DESCRIBE) and not route.startswith(f"{MODELS}/"):
        raise UnknownRoute(
            f"There is no route {shown(route)}; there are {CHAT}, {COMPLETIONS}, {MODELS} and {DESCRIBE}."
        )


def parse(call: Call, vocabulary: int) -> Generation:
    """Find and check what a body asks.

    Args:
        call: the decoded request, its route one of ours and not a list of models.
        vocabulary: token ids are below it.

    Raises:
        RequestError: see the messages.
    """
    shape = {CHAT: "chat", COMPLETIONS: "completions"}.get(call.route, "plain")
    body = {"text": call.body} if isinstance(call.body, str) and shape == "plain" else call.body
    if not isinstance(body, dict):
        raise RequestError("The body must be an object.", code="invalid_type")
    given, name = _without_input(dict(body), shape)
    values = _checked(given, shape)
    for token in values.get("logit_bias", ()):
        if token >= vocabulary:
            raise RequestError(
                f"logit_bias names token {token}; the vocabulary has {vocabulary}.",
                code="invalid_value",
                param="logit_bias",
            )
    n = values.get("n", 1)
    if shape == "plain" and n > 1:
        raise RequestError(f"n is for {CHAT} and {COMPLETIONS}.", code="invalid_value", param="n")
    prompts = () if shape == "chat" else _prompts(body[name], name, vocabulary, several=shape == "completions")
    if max(len(prompts), 1) * n > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts × n {n} are more than {MAX_SEQUENCES} answers.", code="invalid_value", param="n"
        )
    return Generation(
        shape=shape,
        field=name,
        messages=messages(body[name]) if shape == "chat" else (),
        prompts=prompts,
        sampling=_sampling(values, shape),
        stop=values.get("stop", ()),
        max_tokens=_max_tokens(values),
        n=n,
        stream=values.get("stream", False),
        include_usage=_include_usage(values),
        ignore_eos=values.get("ignore_eos", False),
        priority=values.get("priority", 0),
        schema=values.get("response_format"),
        toolbox=_toolbox(values),
    )


def _toolbox(values: Mapping[str, Any]) -> Toolbox:
    """What may be called; what cannot go with a constrained answer is refused."""
    found = toolbox(values)
    schema = values.get("response_format")
    if schema is not None and found.callable:
        raise RequestError(
            "response_format is for answers without calls: leave tools out or set tool_choice to none.",
            code="invalid_value",
            param="response_format",
        )
    if values.get("ignore_eos") and (schema is not None or found.callable):
        raise RequestError(
            "ignore_eos does not go with response_format and tools, whose answers have an end.",
            code="invalid_value",
            param="ignore_eos",
        )
    return found


def _without_input(body: dict[str, Any], shape: str) -> tuple[dict[str, Any], str]:
    """The body's parameters, and the name of the field with the input."""
    fields = {"chat": ("messages",), "completions": ("prompt",)}.get(shape, _PLAIN_FIELDS)
    present = [name for name in fields if name in body]
    if not present:
        wanted = " or ".join(map(repr, fields))
        raise RequestError(f"The body needs {wanted}.", code="missing_field", param=fields[0])
    if len(present) > 1:
        raise RequestError(f"The body has {' and '.join(present)}; send one.", code="ambiguous_input", param=present[1])
    del body[present[0]]
    nested = body.pop("parameters", None) if shape == "plain" else None
    if nested is not None:
        if not isinstance(nested, dict):
            raise RequestError("'parameters' must be an object.", code="invalid_type", param="parameters")
        if doubled := sorted(nested.keys() & body.keys()):
            name = shown(doubled[0])[1:-1]
            raise RequestError(
                f"{name} is there twice, inside parameters and beside.", code="ambiguous_input", param=name
            )
        body |= nested
    return body, present[0]


def _checked(given: Mapping[str, Any], shape: str) -> dict[str, Any]:
    """The parameters, each checked; null is as if it were not there."""
    known = _KNOWN[shape]
    values = {}
    for key, value in given.items():
        if value is None or (shape != "plain" and key in _LABELS):
            continue
        if key in known:
            try:
                values[key] = known[key](value)
            except RequestError as error:  # those of objects name what is at fault inside
                said = error.message.replace("The option", key)
                raise RequestError(said, code=error.code, param=error.param or key) from None
        elif shape != "plain" and key in _NEUTRAL:
            if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[key]):
                raise RequestError(
                    f"{key} is not supported here; leave it out.", code="unsupported_parameter", param=key
                )
        else:
            near = nearest(key, known)
            hint = f"; did you mean {near!r}?" if near else f"; known are {', '.join(sorted(known))}."
            raise RequestError(
                f"Unknown parameter {shown(key)}{hint}", code="unknown_parameter", param=shown(key)[1:-1]
            )
    return values


def _sampling(values: Mapping[str, Any], shape: str) -> Sampling:
    chosen = {key: values[key] for key in _SAMPLING if key in values}
    logprobs: int | None = None
    if shape == "chat":
        if "top_logprobs" in values and not values.get("logprobs"):
            raise RequestError("top_logprobs needs logprobs: true.", code="invalid_value", param="top_logprobs")
        if values.get("logprobs"):
            logprobs = values.get("top_logprobs", 0)
    elif shape == "completions":
        logprobs = values.get("logprobs")
    elif values.get("do_sample") is False:
        if chosen.get("temperature", 0) != 0:
            raise RequestError("do_sample is false and temperature is not 0.", code="invalid_value", param="do_sample")
        chosen["temperature"] = 0.0
    most = _max_tokens(values)
    if most is not None and chosen.get("min_tokens", 0) > most:
        raise RequestError(
            f"min_tokens is {chosen['min_tokens']} and max_tokens {most}.", code="invalid_value", param="min_tokens"
        )
    return Sampling(**chosen, logprobs=logprobs)


def _max_tokens(values: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_tokens", "max_completion_tokens", "max_new_tokens") if name in values]
    if len({values[name] for name in names}) > 1:
        raise RequestError(f"{names[0]} and {names[1]} differ; send one.", code="ambiguous_input", param=names[1])
    return values[names[0]] if names else None


def _include_usage(values: Mapping[str, Any]) -> bool:
    options = values.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object.", code="invalid_type", param="stream_options")
    if not values.get("stream"):
        raise RequestError("stream_options needs stream: true.", code="invalid_value", param="stream_options")
    for key in options:
        if key not in ("include_usage", "include_obfuscation"):
            name = shown(key)[1:-1]
            raise RequestError(
                f"Unknown stream option {shown(key)}; known is include_usage.",
                code="unknown_parameter",
                param=f"stream_options.{name}",
            )
    if options.get("include_obfuscation"):
        raise RequestError(
            "include_obfuscation is not supported here; leave it out.",
            code="unsupported_parameter",
            param="stream_options.include_obfuscation",
        )
    usage = options.get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        raise RequestError(
            "include_usage must be true or false.", code="invalid_type", param="stream_options.include_usage"
        )
    return bool(usage)


def _prompts(value: Any, name: str, vocabulary: int, *, several: bool) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (_text(value, name),)
    if not several or not isinstance(value, list):
        wanted = "a string, a list of strings or token ids" if several else "a string"
        raise RequestError(f"{name} must be {wanted}.", code="invalid_type", param=name)
    if not value:
        raise RequestError(f"{name} is an empty list.", code="empty_prompt", param=name)
    if all(isinstance(item, int) for item in value):
        return (_ids(value, name, vocabulary),)
    if len(value) > MAX_SEQUENCES:
        raise RequestError(
            f"{name} has {len(value)} entries; at most {MAX_SEQUENCES} fit.", code="invalid_value", param=name
        )
    found: list[Prompt] = []
    for i, item in enumerate(value):
        param = f"{name}[{i}]"
        if isinstance(item, str):
            found.append(_text(item, param))
        elif isinstance(item, list):
            found.append(_ids(item, param, vocabulary))
        else:
            raise RequestError(f"{param} must be a string or a list of token ids.", code="invalid_type", param=param)
    return tuple(found)


def _text(text: str, param: str) -> str:
    if not text:
        raise RequestError(f"{param} is empty.", code="empty_prompt", param=param)
    return options.text(text, param)


def _ids(value: list[Any], param: str, vocabulary: int) -> tuple[int, ...]:
    if not value:
        raise RequestError(f"{param} is an empty list of token ids.", code="empty_prompt", param=param)
    for i, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise RequestError(
                f"{param}[{i}] must be a token id from 0 to {vocabulary - 1}.",
                code="invalid_value",
                param=f"{param}[{i}]",
            )
    return tuple(value)
