"""What an answer must be, written in llguidance's variant of Lark: a JSON value, or text and calls of functions."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from handlers.generation.calls import MAX_CALLS, Format
from handlers.generation.tools import Toolbox

# As printers of JSON write it: where any white space may stand, small models may write nothing else for ever.
_JSON = {"whitespace_pattern": r" |\n {0,32}|\n\t{0,8}"}
_ANY = "ANY: /a/ | ~/a/"  # all that a model may write, texts or not
_KEY = "x-guidance"  # llguidance's own settings of a schema, which are not for clients


def json_answer(schema: Mapping[str, Any]) -> str:
    """The rules of a JSON value that follows a schema."""
    return f"start: {_json(schema)}\n"


def calls(format: Format, toolbox: Toolbox, tokens: Mapping[str, int], ends: Iterable[int]) -> str:
    """The rules of an answer that calls what a request says.

    Args:
        format: how the model writes calls.
        toolbox: what may and must be called.
        tokens: texts of the format that are tokens of their own, longest first.
        ends: tokens that end a text.
    """
    names = [f"call_{i}" for i in range(len(toolbox.callable))]
    lines = [
        f"{name}: {json.dumps(format.before + tool.name + format.after)} {_json(tool.parameters)} " + '"}"'
        for name, tool in zip(names, toolbox.callable, strict=True)
    ]
    lines.append(f"call: {' | '.join(names)}")
    more = []
    if toolbox.parallel and format.separator is not None:
        more = [f"({' '.join([*_parts(format.separator, tokens), 'call'])}){{0,{MAX_CALLS - 1}}}"]
    opening, closing = _parts(format.opening[len(format.mark) :], tokens), _parts(format.closing, tokens)
    lines.append(" ".join(["behind:", *opening, "call", *more, *closing]))
    if toolbox.forced:
        start = " ".join(["start:", *_parts(format.mark, tokens), "behind"])
    elif format.mark in tokens:
        mark = tokens[format.mark]
        others = ",".join(map(str, sorted({*ends, mark})))
        start = f"start: <[^{others}]>* (<[{mark}]> behind)?"
    elif format.mark:
        # the mark ends the text as soon as it is there
        start = f"start: ANY | marked behind\nmarked[lazy]: ANY {json.dumps(format.mark)}\n{_ANY}"
    else:
        first = json.dumps((format.opening + format.before)[0])
        start = f"start: TEXT | behind\nTEXT: ~({first} ANY)\n{_ANY}"
    return "\n".join([start, *lines, ""])


def _json(schema: Mapping[str, Any]) -> str:
    known = {key: value for key, value in schema.items() if key != _KEY}
    return f"%json {json.dumps({**known, _KEY: _JSON})}"


def _parts(text: str, tokens: Mapping[str, int]) -> list[str]:
    """A text of a format, its tokens by their numbers."""
    if not text:
        return []
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return [f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece) for piece in pieces if piece]
