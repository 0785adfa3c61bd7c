"""A classifier's logits → scores, and labels to go with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.serialise import dumps

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
