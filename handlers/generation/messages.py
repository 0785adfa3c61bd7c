"""The messages of a chat, checked and made what chat templates read."""

import json
from collections.abc import Mapping
from typing import Any

from handlers import options
from handlers.errors import RequestError
from handlers.generation.parameters import encodable, name_of

MAX_MESSAGES = 4096
MAX_CALLS = 128  # of one message
ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]


def messages(value: Any) -> tuple[Message, ...]:
    """Check the field `messages`.

    Raises:
        RequestError: names the message at fault.
    """
    if not isinstance(value, list):
        raise RequestError("messages must be a list.", code="invalid_type", param="messages")
    if not value:
        raise RequestError("messages is empty.", code="empty_messages", param="messages")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"There are more than {MAX_MESSAGES} messages.", code="invalid_value", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(value))


def characters(found: tuple[Message, ...]) -> int:
    """Characters of all texts and calls, which a template writes into a prompt."""
    calls = (call["function"] for message in found for call in message.get("tool_calls", ()))
    return sum(len(message["content"]) for message in found) + sum(len(json.dumps(call)) for call in calls)


def _message(message: Any, param: str) -> Message:
    if not isinstance(message, dict):
        raise RequestError(f"{param} must be an object.", code="invalid_type", param=param)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{param}.role must be one of {', '.join(ROLES)}.", code="invalid_value", param=f"{param}.role"
        )
    if message.get("function_call"):
        raise RequestError(
            f"{param}.function_call is not supported; send tool_calls.",
            code="unsupported_parameter",
            param=f"{param}.function_call",
        )
    calls = _calls(message.get("tool_calls"), role, param)
    # templates know the role by its older name
    found = {"role": "system" if role == "developer" else role, "content": _content(message, param, empty=bool(calls))}
    if calls:
        found["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if (text := message.get(key)) is not None:
            found[key] = options.text(text, f"{param}.{key}")
    return found


def _content(message: Mapping[str, Any], param: str, *, empty: bool) -> str:
    content = message.get("content")
    where = f"{param}.content"
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    elif content is None and empty:
        content = ""
    elif not isinstance(content, str):
        raise RequestError(f"{where} must be a string or a list of text parts.", code="invalid_type", param=where)
    return options.text(content, where)


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f'{param} must be a text part: {{"type": "text", "text": "…"}}; others are not supported.',
            code="invalid_type",
            param=param,
        )
    text: str = part["text"]
    return text


def _calls(value: Any, role: str, param: str) -> list[dict[str, Any]]:
    where = f"{param}.tool_calls"
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise RequestError(f"{where} must be a list of up to {MAX_CALLS}.", code="invalid_type", param=where)
    if value and role != "assistant":
        raise RequestError(f"{where} are the assistant's; the role is {role}.", code="invalid_value", param=where)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(value)]


def _call(value: Any, param: str) -> dict[str, Any]:
    call = options.members(value, param, ["type", "function"], ["id", "index"])
    function = options.members(call["function"], f"{param}.function", ["name", "arguments"])
    where = f"{param}.function.arguments"
    try:
        # templates write arguments as JSON themselves, so they are handed the object
        arguments = json.loads(options.text(function["arguments"], where))
        encodable(arguments, where)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be a JSON object, as a string.", code="invalid_value", param=where)
    found = {
        "type": "function",
        "function": {"name": name_of(function["name"], f"{param}.function.name"), "arguments": arguments},
    }
    return {"id": options.text(call["id"], f"{param}.id"), **found} if "id" in call else found
