"""What one client asks, as the handlers see it: whoever asked, in whatever shape."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Pair:
    """Two texts that the model reads together, such as a query and a passage."""

    text: str
    text_pair: str


#: What one result is for: a text, the token ids of one, a pair of texts, or an object of the task's own.
Item = Any


class Nouns(NamedTuple):
    """The task's words for one result and for several, such as embedding and embeddings."""

    one: str
    many: str


class Usage(NamedTuple):
    """Tokens run for a request, and tokens that truncation cut off."""

    tokens: int
    cut: int


@dataclass(frozen=True)
class Task:
    """What a codec has to know of the task to read a body and to write an answer.

    Args:
        nouns: words for one result and several.
        fields: fields of one instance sent as an object; the first is the one that a bare text stands for.
        options: the request options it knows → a check that returns the value to use or raises RequestError.
        routes: paths of other servers' interfaces that it answers.
        item: an instance as sent and the field it was in → the item.
        nullable: options for which null is a value, and not their absence.
        inputs_alone: whether Hugging Face's clients want the result of a single input bare, not in a list.
        max_items: most instances in one request.
        arrays: whether results are arrays of numbers, or base64 of them.
        pipeline_value: a request and a result → that result in the form of transformers' pipelines.
    """

    nouns: Nouns
    fields: tuple[str, ...]
    options: Mapping[str, Callable[[Any], Any]]
    routes: tuple[str, ...]
    item: Callable[[Any, str], Item]
    nullable: tuple[str, ...] = ()
    inputs_alone: bool = False
    max_items: int = 1024
    arrays: bool = False
    pipeline_value: Callable[["Request", Any], Any] = lambda _, value: value


@dataclass(frozen=True)
class Request:
    """What one client asks.

    Args:
        items: in the client's order; there will be one result for each.
        options: the options it set, checked by the task.
        field: the field that held the items, for errors; empty where the fields of one item are the body's own.
        listed: whether that field was a list.
        echo: what the codec needs again to write the answer, such as the request's id.
    """

    items: tuple[Item, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    field: str = "text"
    listed: bool = False
    echo: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def param(self, index: int, name: str = "") -> str:
        """What errors call the item at `index`, or its field `name`."""
        return inside(f"{self.field}[{index}]" if self.listed else self.field, name)

    def with_items(self, items: Iterable[Item]) -> "Request":
        """The same request over other items, as many as before."""
        changed = tuple(items)
        if len(changed) != len(self.items):
            raise ValueError(f"{len(self.items)} items became {len(changed)}")
        return replace(self, items=changed)


def inside(param: str, name: str | int) -> str:
    """The field or index `name` inside `param`, as errors call it."""
    if isinstance(name, int):
        return f"{param}[{name}]"
    return f"{param}.{name}" if param and name and not name.startswith("[") else param + name
