"""What can be wrong with one request. Errors travel as values in list slots; only postprocess makes statuses of them.

RequestError                400  the client's mistake; `param` names the field or index
├── UnknownRoute            404
├── TooLarge                413  more than the limits allow; the message says how much would fit
├── Overloaded              503  would not be finished before TorchServe gives up on the batch
├── OutOfMemory             507  does not fit even alone
└── ModelFailure            500  the model failed on this input alone
"""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

LONGEST_NAME = 64  # characters of a name that is compared with the known ones


class RequestError(Exception):
    """An error that belongs to one request of a batch.

    Args:
        message: one sentence for the client. Never holds more than a short excerpt of what was sent.
        code: stable identifier in snake_case.
        param: field or index at fault, such as `texts[3]`; None when it is the body as a whole.
    """

    status: ClassVar[int] = 400
    default_code: ClassVar[str] = "invalid_request"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param

    def at(self, param: str) -> "RequestError":
        """The same error, told of the field or index `param`."""
        return type(self)(self.message, code=self.code, param=param)


class UnknownRoute(RequestError):
    """The path behind the model's version is none of ours."""

    status = 404
    default_code = "unknown_route"


class TooLarge(RequestError):
    """More items, tokens or answer bytes than one request may have."""

    status = 413
    default_code = "too_large"


class Overloaded(RequestError):
    """The batch holds more work than the worker may spend on it."""

    status = 503
    default_code = "overloaded"


class OutOfMemory(RequestError):
    """One text alone does not fit into memory."""

    status = 507
    default_code = "out_of_memory"


class ModelFailure(RequestError):
    """The forward pass fails, or stays non-finite, for this text alone."""

    status = 500
    default_code = "model_failure"


class HandlerFault(Exception):
    """A handler's method gave back what the pipeline cannot use. The message is logged: it quotes no request."""


def reason(error: Exception) -> str:
    """What a log may say of an exception: others than ours may quote a client's text."""
    name = type(error).__name__
    return f"{name}: {error}" if isinstance(error, HandlerFault) else name


def place(method: Callable[..., Any]) -> str:
    """File and line of a handler's method."""
    code = getattr(method, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(method).__name__


def shown(value: object, limit: int = 60) -> str:
    """`value` as a short quoted ASCII excerpt, safe inside an error message."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= limit else f"{text[: limit - 1]}…".replace("…", "...")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, if any."""
    if len(name) > LONGEST_NAME:  # matching is quadratic, and names come from clients
        return None
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
