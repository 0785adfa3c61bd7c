"""What a cross-encoder's files say. Oracle: sentence-transformers' CrossEncoder on the same directory."""

import json
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import CrossEncoder

from scripts.lib import checkpoint, tree
from scripts.lib.errors import UserError
from tests.families import family


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return family(tmp_path / "model", "bert", head="sequence-classification", labels=["LABEL_0"])


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def modular(model: Path, activation: str, *modules: str) -> None:
    """Make it a save of sentence-transformers 6, with further modules behind the first."""
    edit(model / "config_sentence_transformers.json", model_type="CrossEncoder", activation_fn=activation)
    package = "sentence_transformers.base.modules.transformer"
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{package}.Transformer"}]
    listed += [{"idx": i, "name": str(i), "path": f"{i}_X", "type": kind} for i, kind in enumerate(modules, 1)]
    (model / "modules.json").write_text(json.dumps(listed))
    edit(
        model / "sentence_bert_config.json",
        transformer_task="sequence-classification",
        modality_config={"text": {"method": "forward", "method_output_name": "logits"}},
        module_output_name="scores",
    )


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, "Sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "Identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "Tanh"),
        ({"sentence_transformers": {"activation_fn": "own.Code"}}, "Sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, "Identity"),
    ],
)
def test_the_activation_is_cross_encoders(model: Path, config: dict[str, Any], activation: str) -> None:
    edit(model / "config.json", **config)
    if len(config.get("id2label", "1")) == 2:
        (model / "model.safetensors").unlink()
        family(model, "bert", head="sequence-classification", labels=["a", "b"])
    found = checkpoint.read(tree.walk(model), task="reranking")
    oracle = CrossEncoder(str(model), device="cpu")
    assert found.own["activation"] == activation == type(oracle.activation_fn).__name__
    assert found.max_tokens == oracle.max_seq_length
    assert bool(found.notes) == ("own.Code" in json.dumps(config)), "code that is not taken is told"


def test_a_modular_saves_activation_wins(model: Path) -> None:
    edit(model / "config.json", sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    modular(model, "torch.nn.modules.activation.Tanh")
    oracle = CrossEncoder(str(model), device="cpu")
    found = checkpoint.read(tree.walk(model))
    assert (found.task, found.own["activation"]) == ("reranking", "Tanh")
    assert type(oracle.activation_fn).__name__ == "Tanh"


def test_more_tokens_than_positions_are_cut_to_these(model: Path) -> None:
    modular(model, "torch.nn.modules.activation.Sigmoid")
    edit(model / "sentence_bert_config.json", max_seq_length=4096)
    found = checkpoint.read(tree.walk(model))
    assert found.max_tokens == 64
    assert "4096" in found.notes[-1]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["sentence_transformers.cross_encoder.modules.logit_score.LogitScore"], "LogitScore, which is not served"),
        (["sentence_transformers.base.modules.transformer.Transformer"], "several modules"),
        (["own.Module"], "code of the model's own"),
    ],
)
def test_modules_that_are_not_served(model: Path, modules: list[str], message: str) -> None:
    modular(model, "torch.nn.modules.activation.Sigmoid", *modules)
    with pytest.raises(UserError, match=message):
        checkpoint.read(tree.walk(model))


def test_a_language_model_as_reranker_is_refused(tmp_path: Path) -> None:
    model = family(tmp_path / "model", "qwen3", head="causal-lm")
    modular(model, "torch.nn.modules.linear.Identity")
    with pytest.raises(UserError, match="no head that scores a pair"):
        checkpoint.read(tree.walk(model))


def test_an_activation_that_is_not_served_is_refused(model: Path) -> None:
    edit(model / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.PReLU"})
    with pytest.raises(UserError, match="PReLU"):
        checkpoint.read(tree.walk(model))
