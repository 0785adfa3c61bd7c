"""How a model writes calls of functions, and what of its text is one.

A chat template shows how: it is given a conversation with calls that it must write into a prompt, and what it writes
around the function's name and arguments is what the model has learned to write itself. That fits every format whose
calls are JSON objects, such as

    <tool_call>\\n{"name": "…", "arguments": {…}}\\n</tool_call>      Hermes, Qwen
    {"name": "…", "parameters": {…}}                               Llama 3
    [TOOL_CALLS] [{"name": "…", "arguments": {…}}]                 Mistral
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.generation.tools import Tool

MAX_CALLS = 16  # in one answer: a model that repeats itself ends some day
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]

_NAME, _ARGUMENTS = "probe_function", {"probe_key": "probe value"}
_TOOL = Tool(_NAME, "A probe.", {"type": "object", "properties": {"probe_key": {"type": "string"}}})
_MARK = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{2,40}\])?(\s*\[?)$")
_LONGEST = 80  # characters around a call


class NoCalls(ValueError):
    """Why calls cannot be offered, for the client."""


@dataclass(frozen=True)
class Format:
    """How calls are written: `opening`, calls with `separator` between them, `closing`. Each call is `before`, its
    name, `after`, its arguments as JSON, and a closing brace.

    Args:
        mark: what `opening` begins with and no other text contains; empty where a text that begins as a call does is
            one.
        separator: None where an answer holds one call.
    """

    mark: str
    opening: str
    before: str
    after: str
    separator: str | None
    closing: str

    def tokens(self, added: Mapping[str, int]) -> dict[str, int]:
        """Those of a tokenizer's added tokens that stand around calls, longest first."""
        around = (self.opening, self.separator or "", self.closing)
        found = [text for text in added if text and any(text in part for part in around)]
        return {text: added[text] for text in sorted(found, key=len, reverse=True)}


def find_format(render: Render, ends: Iterable[str]) -> Format:
    """Find out how a model writes calls.

    Args:
        render: its chat template: messages, tools and whether an answer is asked for → a prompt.
        ends: what ends an answer in a prompt.

    Raises:
        NoCalls: it takes no tools, or its calls are no JSON objects.
    """
    question = {"role": "user", "content": "A probe?"}
    tools = [_TOOL.definition()]
    try:
        asked = render([question], tools, True)
        one = render([question, _answer(1)], tools, False)
    except Exception:  # noqa: BLE001 - what a template raises is its own
        raise NoCalls("the model's chat template has no tools") from None
    if _NAME not in asked or one.count(_NAME) == asked.count(_NAME):
        raise NoCalls("the model's chat template has no tools")
    same = (i for i, pair in enumerate(zip(asked, one, strict=False)) if pair[0] != pair[1])
    answer = one[next(same, len(asked)) :]
    place, end, before, after = _call(answer)
    mark = _MARK.search(answer[:place])
    assert mark is not None  # it matches nothing too
    if not mark[1] and answer[: mark.start()].strip():
        raise NoCalls("the model's chat template writes calls in a way that is not known here")
    closing = answer[end:]
    cuts = [cut for text in ends if text and (cut := closing.find(text)) >= 0]
    closing = closing[: min(cuts)].rstrip() if cuts else closing.rstrip()
    return Format(
        mark=mark[1] or "",
        opening=mark[0].lstrip(),
        before=before,
        after=after,
        separator=_separator(render, [question, _answer(2)], tools, answer[place:end]),
        closing=closing,
    )


def _answer(calls: int) -> dict[str, Any]:
    # ids of nine digits, because Mistral's templates accept no others
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    ids = [f"{i}23456789" for i in range(calls)]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": id, "type": "function", "function": function} for id in ids],
    }


def _call(answer: str) -> tuple[int, int, str, str]:
    """Where the first call begins and ends, and what is written before its name and between that and its arguments."""
    unknown = NoCalls("the model's chat template writes calls in a way that is not known here")
    name = answer.find(f'"{_NAME}"')
    place = answer.rfind("{", 0, max(name, 0))
    if name < 0 or place < 0:
        raise unknown
    try:
        found, length = json.JSONDecoder().raw_decode(answer[place:])
    except ValueError:
        raise unknown from None
    arguments = answer.find("{", name)
    if not isinstance(found, dict) or found.get("name") != _NAME or not place < arguments < place + length:
        raise unknown
    before, after = answer[place : name + 1], answer[name + 1 + len(_NAME) : arguments]
    written = f"{before}{_NAME}{after}{json.dumps(_ARGUMENTS)}}}"
    wanted = {key: value for key, value in found.items() if key in ("name", "arguments", "parameters")}
    try:
        same = json.loads(written) == wanted
    except ValueError:  # such as arguments that are JSON within a string
        same = False
    if not same or len(wanted) != 2 or len(written) > _LONGEST * 2:
        raise unknown
    return place, place + length, before, after


def _separator(render: Render, messages: Sequence[Mapping[str, Any]], tools: Any, call: str) -> str | None:
    """What stands between two calls; None where there cannot be two."""
    try:
        two = render(messages, tools, False)
    except Exception:  # noqa: BLE001 - such a template says so by raising
        return None
    begin = call[: call.index(_NAME) + len(_NAME)]
    second = two.rfind(begin)
    first = two.rfind(begin, 0, max(second, 0))
    if first < 0:
        return None
    try:
        _, length = json.JSONDecoder().raw_decode(two[first:])
    except ValueError:
        return None
    separator = two[first + length : second]
    return separator if second >= first + length and 0 < len(separator) <= _LONGEST else None


@dataclass(frozen=True)
class Call:
    """A call, or what is new of it.

    Args:
        index: in its answer.
        name: None where only arguments are new.
        arguments: JSON, or a piece of it.
    """

    index: int
    name: str | None
    arguments: str
