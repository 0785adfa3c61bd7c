"""What a build says of classifiers by their labels, and of decoders by their padding."""

from pathlib import Path
from typing import Any

import pytest

from scripts.lib import checkpoint, tree
from scripts.lib.errors import UserError
from tests.models import write_json

NLI = {"0": "CONTRADICTION", "1": "NEUTRAL", "2": "ENTAILMENT"}
OTHERS = {"0": "bad", "1": "good", "2": "unsure"}


def classifier(directory: Path, **config: Any) -> dict[str, Path]:
    shape = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "max_position_embeddings": 64}
    write_json(directory / "config.json", shape | config)
    return tree.walk(directory)


@pytest.mark.parametrize(
    ("task", "labels", "said"),
    [
        ("auto", NLI, "--task zero-shot-classification"),
        ("classification", NLI, "--task zero-shot-classification"),
        ("classification", OTHERS, None),
        ("zero-shot-classification", NLI, None),
        ("zero_shot", OTHERS, "the last one is taken for entailment"),
        ("zero_shot", None, "the last one is taken for entailment"),
    ],
)
def test_labels_of_entailment_or_their_lack_are_noted(
    tmp_path: Path, task: str, labels: dict[str, str] | None, said: str | None
) -> None:
    files = classifier(tmp_path, **({"id2label": labels} if labels else {}))
    notes = checkpoint.read(files, task=task).notes
    assert [said in note for note in notes] == ([True] if said else [])


@pytest.mark.parametrize("task", ["classification", "zero_shot", "reranking"])
def test_a_decoder_that_classifies_must_name_its_padding(tmp_path: Path, task: str) -> None:
    decoder = {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], "id2label": NLI}
    with pytest.raises(UserError, match=r"config\.json has no pad_token_id"):
        checkpoint.read(classifier(tmp_path, **decoder), task=task)
    assert checkpoint.read(classifier(tmp_path, **decoder, pad_token_id=0), task=task).task == task
    assert checkpoint.read(classifier(tmp_path, id2label=NLI, pad_token_id=None), task=task).task == task
