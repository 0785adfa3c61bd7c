"""What every codec can do, and what most of them share."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from handlers.decoding import Call
from handlers.errors import RequestError, TooLarge
from handlers.options import json_type
from handlers.request import Request, Task, Usage
from handlers.serialise import dumps


@dataclass(frozen=True)
class Draft:
    """What a body holds, before the task has looked at it.

    Args:
        values: the instances as sent.
        options: the options as sent.
        field: the field that held the instances; empty where one instance's fields are the body's own.
        listed: whether they came as a list.
    """

    values: Sequence[Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    field: str = "text"
    listed: bool = False


class Codec:
    """One shape. Stateless: a codec is shared by all requests.

    Class attributes:
        options: options of the shape's own, which every task ignores → their checks.
        item_bytes: most bytes that the shape adds to an item's value in the answer.
        growth: how many times larger it makes a value that is no array at most, as where JSON is quoted in JSON.
        content_type: of its answers; errors are JSON in every shape.
    """

    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    item_bytes: ClassVar[int] = 2
    growth: ClassVar[float] = 1.0
    content_type: ClassVar[str] = "application/json"

    def echo(self, call: Call) -> Mapping[str, Any]:
        """What an answer or an error needs again, such as the request's id. Never raises."""
        return {}

    def read(self, call: Call, task: Task) -> Draft:
        """Find instances and options in a decoded body.

        Raises:
            RequestError: the body is not of this shape.
        """
        raise NotImplementedError

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """The body of a successful answer.

        Args:
            results: one per item, JSON values or float32 arrays.
            model: name under which the model is served.
        """
        raise NotImplementedError

    def bound(self, size: int, task: Task) -> int:
        """Most bytes that an item takes in the answer, when its value takes `size` as JSON."""
        return self.item_bytes + (size if task.arrays else math.ceil(size * self.growth))

    def status(self, error: RequestError) -> int:
        """The HTTP status of an error."""
        return error.status

    def refuse(self, error: RequestError, echo: Mapping[str, Any]) -> bytes:
        """The body of a failed answer. ASCII: nothing that a client put into a field's name can break it.

        Args:
            echo: what `echo` kept of the request.
        """
        return ascii_json(self.complaint(error, echo))

    def complaint(self, error: RequestError, echo: Mapping[str, Any]) -> dict[str, Any]:
        """What `refuse` says."""
        return {"code": error.code, "message": error.message, "param": error.param}


class ErrorText(Codec):
    """A shape whose errors are an object with the message as `error`."""

    def complaint(self, error: RequestError, echo: Mapping[str, Any]) -> dict[str, Any]:
        """The message under `error`, as these clients expect, and what ours tells beside it."""
        return {"error": error.message, "code": error.code, "param": error.param}


def ascii_json(value: Any) -> bytes:
    """Compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


def as_object(call: Call, *needed: str) -> dict[str, Any]:
    """The body as an object that has the fields `needed`, a copy."""
    if not isinstance(call.body, dict):
        raise RequestError(f"The body is {json_type(call.body)}; it must be an object.", code="invalid_type")
    for name in needed:
        if call.body.get(name) is None:
            raise RequestError(f"The body needs {name!r}.", code="missing_field", param=name)
    return dict(call.body)


def as_list(value: Any, name: str) -> list[Any]:
    """A list with something in it, sent as the field `name`."""
    if not isinstance(value, list):
        raise RequestError(f"{name!r} is {json_type(value)}; it must be a list.", code="invalid_type", param=name)
    if not value:
        raise RequestError(f"{name!r} is an empty list.", code="empty_list", param=name)
    return value


def limited(count: int, name: str, task: Task) -> None:
    """Refuse more instances than one request may have, in the field `name`."""
    if count > task.max_items:
        raise TooLarge(
            f"{name!r} holds {count} items; at most {task.max_items} fit in one request.",
            code="too_many_items",
            param=name,
        )


def with_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """Options beside the instances, and those below `parameters`, which the former win over."""
    parameters = given.pop("parameters", None)
    if parameters is None:
        return given
    if not isinstance(parameters, dict):
        raise RequestError("'parameters' must be an object.", code="invalid_type", param="parameters")
    return {**parameters, **given}


def singly(results: Sequence[Any], request: Request, task: Task) -> bytes:
    """A bare result for a single input where the task's clients expect that, else the list of results."""
    return dumps(results[0] if task.inputs_alone and not request.listed else list(results))
