import pytest
from transformers import BertConfig

from handlers.hypotheses import entailment_of


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["contradiction", "neutral", "entailment"], 2),
        (["ENTAILMENT", "not_entailment"], 0),
        (["no", "yes"], -1),
    ],
)
def test_entailment_is_found_by_its_label_also_where_only_the_names_are_told(labels: list[str], expected: int) -> None:
    names = dict(enumerate(labels))
    assert entailment_of(BertConfig(id2label=names)) == expected
    assert entailment_of(BertConfig(id2label=names, label2id={label: i for i, label in names.items()})) == expected
