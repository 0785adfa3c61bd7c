"""scripts.lib.checkpoint and pipeline: what a model's files say, in every form, and what is refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from handlers.config import HandlerConfig
from scripts.lib import checkpoint, pipeline, tree
from scripts.lib.checkpoint import Checkpoint
from scripts.lib.errors import UserError
from scripts.lib.source import resolve
from tests.models import tiny_bert, write_json


def read(directory: Path, **options: Any) -> Checkpoint:
    return checkpoint.read(tree.walk(directory), **options)


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {key: item for key, item in (value | changes).items() if item is not ...})


def test_minilm() -> None:
    settings = read(resolve("bundled:minilm").directory).settings()
    assert settings == {
        "task": "embedding", "model": "model", "max_tokens": 256, "pooling": "mean", "include_prompt": True,
        "normalize": True, "lower_case": False, "prompts": {"query": "", "document": ""}, "default_prompt_name": None,
        "dense": [], "trust_remote_code": False,
    }  # fmt: skip
    HandlerConfig.from_mapping(settings)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pooling": "cls", "normalize": False, "max_seq_length": 20},
        {"pooling": ["cls", "max", "mean"], "dense": 8, "include_prompt": False, "lower_case": True},
        {"prompts": {"query": "query: ", "other": "x"}, "default_prompt_name": "other", "max_seq_length": None},
        {"family": "distilbert", "transformer_path": "0_Transformer", "pooling": "weightedmean", "dense": 8},
        {"family": "mpnet", "pooling": "lasttoken", "max_seq_length": None},
        {"pooling": "mean_sqrt_len_tokens", "model_max_length": None, "max_seq_length": None, "positions": 40},
    ],
)
def test_both_forms_say_what_sentence_transformers_reads(tmp_path: Path, options: dict[str, Any], legacy: bool) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Pooling

    directory = tiny_bert(tmp_path / "m", legacy=legacy, **options)
    found = read(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = SentenceTransformer(str(directory))
    pooling = next(module for module in theirs if isinstance(module, Pooling))
    modes = pooling.pooling_mode
    around = found.pipeline
    assert set(around.pooling) == {modes} if isinstance(modes, str) else around.pooling == tuple(modes)
    assert around.include_prompt == pooling.include_prompt
    assert around.prompts == theirs.prompts
    assert around.default_prompt_name == theirs.default_prompt_name
    assert len(around.dense) == sum(isinstance(module, Dense) for module in theirs)
    assert around.normalize == (type(theirs[-1]).__name__ == "Normalize")
    assert around.lower_case == options.get("lower_case", False)
    # sentence-transformers believes in all rows of a RoBERTa-like table, and such a model crashes on its longest texts
    offset = 2 if options.get("family") == "mpnet" else 0
    assert found.max_tokens == min(theirs.max_seq_length, 64 - offset)
    HandlerConfig.from_mapping(checkpoint.moved_to_root(tree.walk(directory), found)[2].settings())


@pytest.mark.parametrize(("family", "most"), [("bert", 64), ("roberta", 62), ("xlm-roberta", 62), ("mpnet", 62)])
def test_limits(tmp_path: Path, family: str, most: int) -> None:
    import torch
    from transformers import AutoModel

    directory = tiny_bert(tmp_path / "m", family=family, max_seq_length=100, model_max_length=None)
    found = read(directory)
    assert found.max_tokens == found.most_tokens == most
    assert "max_seq_length 100" in found.notes[0]
    assert read(directory, max_tokens=most).max_tokens == most
    model = AutoModel.from_pretrained(directory)
    with torch.inference_mode():
        assert model(torch.full((1, most), 7)).last_hidden_state.shape[1] == most
    with pytest.raises(UserError, match=f"--max-tokens {most + 1} is not possible"):
        read(directory, max_tokens=most + 1)
    with pytest.raises((IndexError, RuntimeError)), torch.inference_mode():
        model(torch.full((1, most + 1), 7))


def test_a_model_without_any_limit_asks_for_one(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m", model_max_length=None, max_seq_length=None)
    edit(directory / "config.json", model_type="deberta-v2", position_biased_input=False)
    with pytest.raises(UserError, match="no longest input"):
        read(directory)
    assert read(directory, max_tokens=1000).max_tokens == 1000


def test_plain_encoder(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m", sentence_transformers=False)
    found = read(directory)
    assert (found.pipeline.pooling, found.pipeline.normalize, found.max_tokens) == (("mean",), False, 64)
    assert "mean pooling" in found.notes[0]


@pytest.mark.parametrize(
    ("architecture", "extra", "task"),
    [
        ("BertForSequenceClassification", {"id2label": {"0": "a", "1": "b"}}, "classification"),
        ("BertForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, "reranking"),
        ("BertForTokenClassification", {}, "token_classification"),
        ("BertForQuestionAnswering", {}, "question_answering"),
        ("BertForMaskedLM", {}, "fill_mask"),
    ],
)
def test_models_with_heads(tmp_path: Path, architecture: str, extra: dict[str, Any], task: str) -> None:
    directory = tiny_bert(tmp_path / "m", sentence_transformers=False)
    edit(directory / "config.json", architectures=[architecture], **extra)
    assert read(directory).task == task
    assert read(directory, task=task.replace("_", "-")).task == task
    assert read(directory, task="embedding").task == "embedding"
    with pytest.raises(UserError, match="it has no head for seq2seq"):
        read(directory, task="translation")
    with pytest.raises(UserError, match="the task ranking is not served"):
        read(directory, task="ranking")


@pytest.mark.parametrize("architecture", ["BertForMultipleChoice", "BertForPreTraining"])
def test_models_for_what_is_not_served(tmp_path: Path, architecture: str) -> None:
    directory = tiny_bert(tmp_path / "m", sentence_transformers=False)
    edit(directory / "config.json", architectures=[architecture])
    with pytest.raises(UserError, match="which is not served"):
        read(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is a decoder"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "is a decoder"),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "encoder-decoder"),
        ({"model_type": "bart", "architectures": ["BartModel"], "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "no encoder of text"),
        ({"model_type": "no-such-thing"}, "does not know the model type 'no-such-thing'"),
        ({"is_decoder": True}, "is a decoder"),
    ],
)
def test_what_is_no_encoder_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    directory = tiny_bert(tmp_path / "m", sentence_transformers=False)
    edit(directory / "config.json", **config)
    with pytest.raises(UserError, match=message):
        read(directory, task="embedding")


def test_code_of_the_models_own(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m")
    edit(directory / "config.json", auto_map={"AutoModel": "modeling_my.MyModel"})
    with pytest.raises(UserError, match=r"auto_map: modeling_my\.MyModel") as error:
        read(directory)
    assert "--trust-remote-code" in error.value.hint
    with pytest.raises(UserError, match="not in the directory"):
        read(directory, trust_remote_code=True)
    (directory / "modeling_my.py").touch()
    assert read(directory, trust_remote_code=True).settings()["trust_remote_code"] is True
    edit(directory / "config.json", auto_map={"AutoModel": "other/repo--modeling_my.MyModel"})
    with pytest.raises(UserError, match="another repository"):
        read(directory, trust_remote_code=True)
    edit(directory / "config.json", auto_map=...)
    edit(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tok.MyTokenizer"]})
    with pytest.raises(UserError, match=r"auto_map: tok\.MyTokenizer"):
        read(directory)


def modules(*kinds: str) -> list[dict[str, str]]:
    base = "sentence_transformers.models."
    return [{"type": base + kind, "path": f"{i}_{kind}" if i else ""} for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (modules("Transformer", "LSTM", "Pooling"), "the module LSTM, which is not served"),
        (modules("Transformer"), "has the modules Transformer; served is"),
        (modules("Transformer", "Pooling", "Normalize", "Dense"), "served is"),
        (modules("Transformer", "Dense", "Pooling"), "served is"),
        ([], "has the modules of none"),
        ([{"type": "custom_st.Transformer", "path": ""}], "code of the model's own"),
        ([{"type": "sentence_transformers.models.Transformer", "path": "../x"}], "no path inside"),
        ([{"kind": "x"}], "no list of modules"),
    ],
)
def test_modules_that_are_not_served(tmp_path: Path, value: Any, message: str) -> None:
    directory = tiny_bert(tmp_path / "m")
    write_json(directory / "modules.json", value)
    with pytest.raises(UserError, match=message):
        read(directory)


def test_dropout_is_nothing(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m")
    listed = json.loads((directory / "modules.json").read_text())
    listed.insert(2, {"idx": 9, "name": "9", "path": "9_Dropout", "type": "sentence_transformers.models.Dropout"})
    write_json(directory / "modules.json", listed)
    assert read(directory).pipeline.normalize


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task fill-mask"),
        ("sentence_bert_config.json", {"modality_config": {"image": {}}}, "no modality text"),
        ("sentence_bert_config.json", {"query_length": 32}, "query_length"),
        ("sentence_bert_config.json", {"model_args": {"add_pooling_layer": False}}, "model_args add_pooling_layer"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length 'many'"),
        (
            "config_sentence_transformers.json",
            {"model_type": "MultiVectorEncoder"},
            "a model for multi-vector embedding",
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "the default prompt 'x'"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "the pooling mode 'median'"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, r"the activation os\.system"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("2_Dense/config.json", {"in_features": ...}, "does not say in_features"),
        ("config.json", {"model_type": ...}, "names no model_type"),
    ],
)
def test_settings_that_are_not_served(tmp_path: Path, file: str, changes: dict[str, Any], message: str) -> None:
    directory = tiny_bert(tmp_path / "m", dense=8)
    edit(directory / file, **changes)
    with pytest.raises(UserError, match=message):
        read(directory)


def test_harmless_arguments_and_the_newest_forms_pass(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m", legacy=False)
    edit(
        directory / "sentence_bert_config.json",
        max_seq_length=...,
        model_kwargs={"trust_remote_code": True, "torch_dtype": "float16"},
        processor_kwargs={"model_max_length": 33},
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    edit(directory / "config_sentence_transformers.json", similarity_fn_name="cosine", prompts={"query": None})
    found = read(directory)
    assert found.max_tokens == 33
    assert found.trust_remote_code is False
    assert found.pipeline.prompts == {"query": "", "document": ""}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"there is no config\.json"),
        ({"adapter_config.json": {}}, "an adapter"),
        ({"model.gguf": {}}, "a GGUF model"),
    ],
)
def test_directories_that_are_no_models(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, value in files.items():
        write_json(tmp_path / name, value)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_broken_json_is_named(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m")
    for name in ("config.json", "modules.json", "1_Pooling/config.json"):
        text = (directory / name).read_text()
        (directory / name).write_text(text[:-3])
        with pytest.raises(UserError, match=f"{name} is not JSON"):
            read(directory)
        (directory / name).write_text(text)
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(UserError, match="is missing, which says how to pool"):
        read(directory)


def test_a_transformer_in_a_folder_moves_to_the_root(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "m", transformer_path="0_Transformer", dense=8)
    write_json(directory / "config.json", {"__version__": "0.2"})
    files = tree.walk(directory)
    moved, replaced, found = checkpoint.moved_to_root(files, checkpoint.read(files))
    assert moved["config.json"] == directory / "0_Transformer" / "config.json"
    assert moved["2_Dense/config.json"] == directory / "2_Dense" / "config.json"
    assert replaced == ["config.json"]
    assert found.pipeline.transformer == ""
    assert found.pipeline.dense == ("2_Dense",)


def test_prompts_are_the_librarys(tmp_path: Path) -> None:
    around = pipeline.read(tree.walk(tiny_bert(tmp_path / "m", prompts={"document": "passage: "})))
    assert around is not None
    assert around.prompts == {"query": "", "document": "passage: "}
