"""The bodies of SageMaker's /invocations beside JSON: JSON Lines and CSV, one instance and one answer a line."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from handlers.codecs.codec import Codec, Draft, limited, with_parameters
from handlers.decoding import Call
from handlers.errors import RequestError
from handlers.options import json_type
from handlers.request import Request, Task, Usage
from handlers.serialise import dumps

csv.field_size_limit(1 << 24)  # Python's own limit is 131,072 characters a field; a body cannot hold more than this one


def _content(call: Call) -> str:
    if not isinstance(call.body, str):
        raise RequestError(f"The body is {json_type(call.body)}; it must be lines.", code="invalid_type")
    return call.body.removeprefix("\ufeff")


def _some(values: list[Any]) -> list[Any]:
    if not values:
        raise RequestError("The body has no lines.", code="empty_body")
    return values


class JsonLines(Codec):
    """A JSON value a line: a text, an object with an instance's fields, or `inputs` and `parameters`.

    Blank lines don't count.
    """

    content_type = "application/jsonlines"

    def read(self, call: Call, task: Task) -> Draft:
        """One instance a line; `parameters` are options, the same on every line."""
        lines = [line for line in _content(call).split("\n") if line.strip()]
        limited(len(lines), "lines", task)
        spoken = [_instance(line, i) for i, line in enumerate(_some(lines))]
        parameters = spoken[0][1]
        for i, (_, other) in enumerate(spoken):
            if other != parameters:
                raise RequestError(
                    f"lines[{i}] has other parameters than lines[0]; those of one body must be equal.",
                    code="invalid_value",
                    param=f"lines[{i}].parameters",
                )
        values = [value for value, _ in spoken]
        return Draft(values, with_parameters({"parameters": parameters}), "lines", listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """One result a line."""
        return b"".join(dumps(result) + b"\n" for result in results)


def _instance(line: str, index: int) -> tuple[Any, Any]:
    """A line's instance and parameters."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(
            f"lines[{index}] is not valid JSON.", code="malformed_json", param=f"lines[{index}]"
        ) from None
    if isinstance(value, dict) and "inputs" in value and value.keys() <= {"inputs", "parameters"}:
        return value["inputs"], value.get("parameters")
    return value, None


class Csv(Codec):
    """One instance a row, no header: a text, or as many columns as the task has fields, in their order."""

    content_type = "text/csv"
    growth = 2.0  # quotes

    def read(self, call: Call, task: Task) -> Draft:
        """One instance a row."""
        try:
            rows = [row for row in csv.reader(io.StringIO(_content(call), newline=""), strict=True) if row]
        except csv.Error as error:
            raise RequestError(f"The body is not valid CSV: {error}.", code="malformed_csv") from None
        for i, row in enumerate(rows):
            if len(row) > len(task.fields):
                known = ", ".join(task.fields)
                raise RequestError(
                    f"lines[{i}] has {len(row)} columns; at most {len(task.fields)} are read: {known}.",
                    code="invalid_value",
                    param=f"lines[{i}]",
                )
        values = [row[0] if len(row) == 1 else dict(zip(task.fields, row, strict=False)) for row in rows]
        return Draft(_some(values), {}, "lines", listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """A row per result: its numbers, its values where it is a flat object, else its JSON in one cell."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows(_cells(result) for result in results)
        return out.getvalue().encode()


def _cells(result: Any) -> list[Any]:
    if hasattr(result, "dtype"):
        return list(result.astype(str)) if result.dtype.kind == "f" else result.tolist()
    if isinstance(result, dict) and not any(
        isinstance(value, dict | list) or hasattr(value, "dtype") for value in result.values()
    ):
        return list(result.values())
    return [result if isinstance(result, str) else dumps(result).decode()]
