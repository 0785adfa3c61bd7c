"""A classifier's logits → scores, and the labels or documents that go with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handlers.errors import RequestError
from handlers.options import json_type, members, text
from handlers.request import inside
from handlers.serialise import dumps

#: What the documents to rank may be called.
DOCUMENTS = ("documents", "texts", "passages")
# {"label":…,"score":-1.2345678901234567e-38}, and a comma
LABELLED_BYTES = 52


def identity(logits: Tensor) -> Tensor:
    """The logits themselves."""
    return logits


def softmax(logits: Tensor) -> Tensor:
    """Along the last dimension, in fp32."""
    return torch.softmax(logits.float(), dim=-1)


#: `function_to_apply` of transformers' text-classification pipeline → (…, labels) logits to scores.
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softmax": softmax, "none": identity}


def default_function(config: Any) -> str:
    """The name of the function that transformers' text-classification pipeline applies for a model's config."""
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function `name` of torch.nn, over (…, labels) logits; one of config.ACTIVATIONS."""
    made: Callable[[Tensor], Tensor] = softmax if name == "Softmax" else getattr(torch.nn, name)()
    return made


def labels_of(config: Any) -> list[str]:
    """The labels of a model's config, in the order of its logits."""
    return [str(config.id2label[i]) for i in range(config.num_labels)]


def labelled(names: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Scores with their labels, in the order of the labels."""
    return [{"label": name, "score": score} for name, score in zip(names, scores, strict=True)]


def best_first(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries by descending `score`; ties stay in order."""
    return sorted(entries, key=lambda entry: entry["score"], reverse=True)


def labels_bytes(names: Sequence[str]) -> list[int]:
    """Most bytes that each label takes in an answer with its score."""
    return [LABELLED_BYTES + len(dumps(name)) for name in names]


@dataclass(frozen=True)
class CandidateDocuments:
    """Documents to rank by how well they answer a query.

    Args:
        query: what is asked.
        documents: in the client's order.
        field: one of DOCUMENTS, which they came as.
    """

    query: str
    documents: tuple[str, ...]
    field: str


def candidate_documents(value: Any, param: str) -> CandidateDocuments:
    """A query and its documents, sent as the field `param`: texts, or objects with a text.

    Raises:
        RequestError: something is missing, there twice, empty or no text.
    """
    found = members(value, param, ["query"], DOCUMENTS)
    query = text(found["query"], inside(param, "query"))
    named = [name for name in DOCUMENTS if name in found]
    if not named:
        where = inside(param, DOCUMENTS[0])
        raise RequestError(f"{where} is missing.", code="missing_field", param=where)
    if len(named) > 1:
        raise RequestError(
            f"{param or 'The body'} has {named[0]} and {named[1]}; send one.",
            code="ambiguous_input",
            param=inside(param, named[1]),
        )
    listed, where = found[named[0]], inside(param, named[0])
    if not isinstance(listed, list):
        raise RequestError(f"{where} is {json_type(listed)}; it must be a list.", code="invalid_type", param=where)
    if not listed:
        raise RequestError(f"{where} is an empty list.", code="empty_list", param=where)
    return CandidateDocuments(
        query, tuple(_document(each, inside(where, i)) for i, each in enumerate(listed)), named[0]
    )


def _document(value: Any, param: str) -> str:
    if isinstance(value, dict):
        value, param = members(value, param, ["text"])["text"], inside(param, "text")
    return text(value, param, "a string or an object with 'text'")
