"""Zero-shot classification by entailment: labels → hypotheses, and the logits of their pairs → ranked labels."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handlers import options
from handlers.errors import RequestError
from handlers.scores import softmax

TEMPLATE = "This example is {}."  # of transformers' pipeline
LONGEST_TEMPLATE = 1000  # characters; every label of a request repeats it
SCORE_BYTES = 25  # of 1.1754943508222875e-38 and two commas, the label's too
RESULT_BYTES = len('{"sequence":,"labels":[],"scores":[]}')


@dataclass(frozen=True)
class Premise:
    """A text and the labels it may have; None stands for what the request says for all of its texts.

    Args:
        text: the premise.
        labels: candidate labels.
        template: makes a hypothesis of a label.
        multi_label: whether each label is judged by itself.
    """

    text: str
    labels: tuple[str, ...] | None = None
    template: str | None = None
    multi_label: bool | None = None


def labels(value: Any) -> tuple[str, ...]:
    """Candidate labels: a list of strings, or one string with commas between them, as transformers' pipeline takes."""
    if isinstance(value, str):
        value = [label.strip() for label in value.split(",") if label.strip()]
    if value == []:
        raise RequestError("There are no labels.", code="empty_list")
    if not isinstance(value, list):
        raise RequestError("The labels must be a list of strings, or a string.", code="invalid_type")
    return tuple(options.checked(label, f"[{i}]", _label) for i, label in enumerate(value))


def _label(value: Any) -> str:
    label = options.string(value)
    if not label.strip():
        raise RequestError("The label is blank.", code="empty_string")
    return label


def template(value: Any) -> str:
    """A text with `{}` where the label goes; doubled braces stand for braces, as in Python's `str.format`."""
    text = options.string(value)
    if len(text) > LONGEST_TEMPLATE:
        raise RequestError(f"The template must have at most {LONGEST_TEMPLATE} characters.", code="invalid_value")
    try:
        fields = [field for field in string.Formatter().parse(text) if field[1] is not None]
    except ValueError:
        fields = []
    if [field[1:] for field in fields] != [("", "", None)]:  # what `str.format` knows beside is no client's to use
        raise RequestError("The template must hold {} once, where the label goes.", code="invalid_value")
    return text


def hypothesis(template: str, label: str) -> str:
    """What the text is to entail if it has the label."""
    return "".join(
        literal if name is None else literal + label for literal, name, _, _ in string.Formatter().parse(template)
    )


def entailment_of(config: Any) -> int:
    """The index of the logit for entailment by its label, as transformers' pipeline finds it: -1 if none says so."""
    indices: Mapping[str, int] = config.label2id or {label: index for index, label in config.id2label.items()}
    return next((index for label, index in indices.items() if label.lower().startswith("entail")), -1)


def ranked(
    names: Sequence[str], logits: Tensor, entailment: int, *, independent: bool
) -> tuple[list[str], list[float]]:
    """Labels and scores by descending score, as transformers' pipeline has them; of equals the later label is first.

    Args:
        names: the candidate labels.
        logits: (labels, classes), of each label's hypothesis.
        entailment: the class that says that the label holds.
        independent: a softmax over entailment and contradiction (the first class, or the last where that is
            entailment) for each label, else one over the labels' entailment.
    """
    if independent:
        contradiction = -1 if entailment == 0 else 0
        scores = softmax(logits[:, [contradiction, entailment]])[:, 1]
    else:
        scores = softmax(logits[:, entailment])
    order = np.argsort(scores.numpy(), kind="stable")[::-1]
    return [names[i] for i in order], scores[torch.from_numpy(order.copy())].tolist()
