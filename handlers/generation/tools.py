"""The functions that a model may call, as a client describes them, and which of them it must call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers import options
from handlers.errors import RequestError, shown
from handlers.generation import parameters

MAX_TOOLS = 128
WORDS = ("none", "auto", "required")


@dataclass(frozen=True)
class Tool:
    """A function.

    Args:
        name: letters, digits, _ and -.
        description: what it does, for the model; None where nothing is said.
        parameters: the JSON schema of its arguments, which are an object.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def definition(self) -> dict[str, Any]:
        """As chat templates have it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True)
class Toolbox:
    """What a request says of calls.

    Args:
        tools: those that the model is told of; none where it may call none.
        callable: those of them that it may call.
        forced: whether it must call one.
        parallel: whether one answer may hold several calls.
    """

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    forced: bool = False
    parallel: bool = True


NO_CALLS = Toolbox()


def toolbox(values: Mapping[str, Any]) -> Toolbox:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of a request, each checked, say together.

    Raises:
        RequestError: the choice is none of the tools.
    """
    offered: tuple[Tool, ...] = values.get("tools", ())
    word, name = values.get("tool_choice", ("auto", None))
    if word == "none" or (word == "auto" and not offered):
        return NO_CALLS
    if not offered:
        raise RequestError("tool_choice asks for a call and there are no tools.", code="missing_field", param="tools")
    callable = offered if name is None else tuple(tool for tool in offered if tool.name == name)
    if not callable:
        raise RequestError(
            f"tool_choice names the function {shown(name)}, which is none of the tools.",
            code="invalid_value",
            param="tool_choice",
        )
    # one that is named is called once
    parallel = values.get("parallel_tool_calls", True) and name is None
    return Toolbox(offered, callable, word != "auto", parallel)


def tools(value: Any) -> tuple[Tool, ...]:
    """The check of `tools`."""
    if not isinstance(value, list):
        raise RequestError(f"tools is {options.json_type(value)}; it must be a list.", code="invalid_type")
    if len(value) > MAX_TOOLS:
        raise RequestError(f"There are {len(value)} tools; at most {MAX_TOOLS} work.", code="invalid_value")
    found = tuple(_tool(entry, f"tools[{i}]") for i, entry in enumerate(value))
    if len({tool.name for tool in found}) < len(found):
        raise RequestError("Two tools have one name.", code="invalid_value")
    return found


def _tool(value: Any, param: str) -> Tool:
    entry = options.members(value, param, ["type", "function"])
    _is_function(entry["type"], f"{param}.type")
    inside = f"{param}.function"
    function = options.members(entry["function"], inside, ["name"], ["description", "parameters", "strict"])
    name = parameters.name_of(function["name"], f"{inside}.name")
    options.checked(function.get("strict", True), f"{inside}.strict", options.boolean)
    description = function.get("description")
    if description is not None:
        options.text(description, f"{inside}.description")
    where = f"{inside}.parameters"
    schema = parameters.schema(function.get("parameters", {"type": "object", "properties": {}}), where)
    if schema.get("type", "object") != "object":
        raise RequestError(f"{where} must be of type object.", code="invalid_value", param=where)
    return Tool(name, description, {"type": "object", **schema})


def tool_choice(value: Any) -> tuple[str, str | None]:
    """The check of `tool_choice`: one of OpenAI's words, or `function` and its name."""
    if isinstance(value, str) and value in WORDS:
        return value, None
    if not isinstance(value, dict):
        raise RequestError(
            f"tool_choice must be {', '.join(WORDS)} or an object that names a function.", code="invalid_value"
        )
    entry = options.members(value, "tool_choice", ["type", "function"])
    _is_function(entry["type"], "tool_choice.type")
    function = options.members(entry["function"], "tool_choice.function", ["name"])
    return "function", parameters.name_of(function["name"], "tool_choice.function.name")


def _is_function(value: Any, param: str) -> None:
    if value != "function":
        raise RequestError(f"{param} must be 'function'.", code="invalid_value", param=param)
