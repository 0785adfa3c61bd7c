"""The tiny models are what they say: they load from disk, differ between texts, and every library takes them."""

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.corpus import SENTENCES
from tests.families import FAMILIES, HEADS, family
from tests.family_tokenizers import SCHEMES, family_tokenizer

LABELS = ["negative", "neutral", "positive"]
TEXTS = SENTENCES[4::19]
PAIRS = [(name, head) for name, heads in FAMILIES.items() for head in heads]
MASKED = [name for name, head in PAIRS if head == "masked-lm"]
CLASSIFIERS = [name for name, head in PAIRS if head == "sequence-classification"]
TAGGERS = [name for name, head in PAIRS if head == "token-classification"]
GENERATORS = [(name, head) for name, head in PAIRS if head in ("seq2seq-lm", "causal-lm")]
# Two texts, type ids of both (where a model takes them) and the padding's id, as in the public checkpoints.
FORMS = {
    "bert": ("[CLS] A [SEP] B [SEP]", [0, 0, 0, 1, 1], 0),
    "electra": ("[CLS] A [SEP] B [SEP]", [0, 0, 0, 1, 1], 0),
    "distilbert": ("[CLS] A [SEP] B [SEP]", None, 0),
    "mpnet": ("<s> A </s> </s> B </s>", None, 1),
    "roberta": ("<s> A </s> </s> B </s>", None, 1),
    "xlm-roberta": ("<s> A </s> </s> B </s>", None, 1),
    "deberta-v2": ("[CLS] A [SEP] B [SEP]", [0, 0, 0, 1, 1], 0),
    "modernbert": ("[CLS] A [SEP] B [SEP]", None, -2),
    "albert": ("[CLS] A [SEP] B [SEP]", [0, 0, 0, 1, 1], 0),
    "t5": ("A </s> B </s>", None, 0),
    "bart": ("<s> A </s> </s> B </s>", None, 1),
    "marian": ("A B </s>", None, -1),
    "pegasus": ("A B </s>", None, 0),
    "qwen3": ("A <|endoftext|> B <|endoftext|>", None, -3),
    "llama": ("<|begin_of_text|> A <|begin_of_text|> B", None, -4),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, head) → its directory, made once; classifiers have LABELS."""
    root = tmp_path_factory.mktemp("families")

    def build(name: str, head: str) -> Path:
        directory = root / name / head
        if directory.exists():
            return directory
        return family(directory, name, head=head, labels=LABELS if head.endswith("-classification") else None)

    return build


def load(directory: Path, head: str) -> tuple[Any, Any]:
    auto = getattr(transformers, HEADS[head])
    if "T5EncoderModel" in json.loads((directory / "config.json").read_text())["architectures"]:
        auto = transformers.AutoModelForTextEncoding
    model, info = auto.from_pretrained(directory, local_files_only=True, output_loading_info=True)
    assert not any(info.values()), info
    return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True), model.eval()


def answer(model: Any, inputs: Any) -> torch.Tensor:
    if type(model).__name__.endswith(("ForConditionalGeneration", "MTModel")):
        inputs["decoder_input_ids"] = torch.full((len(inputs["input_ids"]), 3), model.config.decoder_start_token_id)
    with torch.no_grad():
        outputs = model(**inputs)
    for field in ("logits", "last_hidden_state"):
        if field in outputs:
            return outputs[field]
    return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)


@pytest.mark.parametrize(("name", "head"), PAIRS)
def test_every_model_loads_and_tells_texts_apart(built: Any, name: str, head: str) -> None:
    tokenizer, model = load(built(name, head), head)
    config = json.loads((built(name, head) / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert config["vocab_size"] == len(tokenizer)
    words = tokenizer(["The dog is old.", "The sky is red."], return_tensors="pt", padding=True)
    left, right = answer(model, words)
    assert left.isfinite().all()
    assert (left - right).abs().max() > 0.05


@pytest.mark.parametrize(("name", "head"), [(name, heads[0]) for name, heads in FAMILIES.items()])
def test_the_longest_input_is_max_length(tmp_path: Path, name: str, head: str) -> None:
    tokenizer, model = load(family(tmp_path, name, head=head, max_length=20), head)
    inputs = tokenizer(" ".join(TEXTS), truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape == (1, 20)
    assert answer(model, inputs).isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_tokenizers_have_their_families_form(built: Any, name: str) -> None:
    directory = built(name, FAMILIES[name][0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    form, types, pad = FORMS[name]
    assert tokenizer.is_fast
    assert tokenizer.model_max_length == 64
    assert tokenizer.pad_token_id == (pad if pad >= 0 else len(tokenizer) + pad)
    assert 400 <= len(tokenizer) <= 800
    pair = tokenizer("dog", "dog dog")
    seen: list[tuple[str, int]] = []
    kinds = pair["token_type_ids"] if types else [0] * len(pair["input_ids"])
    for token, sequence, kind in zip(pair.tokens(), pair.sequence_ids(), kinds, strict=True):
        part = (token if sequence is None else "AB"[sequence], kind)
        if sequence is None or part not in seen:
            seen.append(part)
    assert " ".join(token for token, _ in seen) == form
    assert [kind for _, kind in seen] == (types or [0] * len(seen))
    assert ("token_type_ids" in pair) == (types is not None)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loaded_class_tokenizes_as_tokenizer_json_says(built: Any, name: str) -> None:
    directory = built(name, FAMILIES[name][0])
    loaded = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [*SENTENCES[::3], "  two  spaces\nand lines\t", f"The {loaded.mask_token or 'word'} is here.", "日本 ☃"]
    for text, other in zip(texts, reversed(texts), strict=True):
        assert loaded(text)["input_ids"] == plain.encode(text).ids
        pair, expected = loaded(text, other, return_offsets_mapping=True), plain.encode(text, other)
        assert pair["input_ids"] == expected.ids
        assert pair["offset_mapping"] == expected.offsets
    for role in SCHEMES[name].named:
        assert getattr(loaded, f"{role}_id") == plain.token_to_id(SCHEMES[name].named[role])


def test_tokenizers_do_not_vary_between_processes() -> None:
    program = (
        "import hashlib; from tests.family_tokenizers import SCHEMES, family_tokenizer\n"
        "print(hashlib.sha256(''.join(family_tokenizer(name).to_str() for name in SCHEMES).encode()).hexdigest())"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    here = hashlib.sha256("".join(family_tokenizer(name).to_str() for name in SCHEMES).encode()).hexdigest()
    assert done.stdout.strip() == here


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    def weights(directory: str, seed: int) -> bytes:
        return (family(tmp_path / directory, "bart", head="seq2seq-lm", seed=seed) / "model.safetensors").read_bytes()

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    assert weights("a", 3) == weights("b", 3) != weights("c", 4)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_config_keys_are_overridden(tmp_path: Path) -> None:
    family(tmp_path, "bert", num_hidden_layers=3, hidden_act="relu", summary="odd")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_act"], config["summary"]) == (3, "relu", "odd")


def test_unknown_names_and_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        family(tmp_path, "elmo")
    with pytest.raises(KeyError):
        family(tmp_path, "bert", head="summary")
    with pytest.raises(ValueError, match="AutoModelForSeq2SeqLM"):
        family(tmp_path, "bert", head="seq2seq-lm")


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_use_every_label(built: Any, name: str) -> None:
    classify = transformers.pipeline("text-classification", str(built(name, "sequence-classification")), device="cpu")
    found = classify([*SENTENCES[::6], {"text": TEXTS[0], "text_pair": TEXTS[1]}], top_k=None)
    assert {row[0]["label"] for row in found} == set(LABELS)
    assert all(math.isclose(sum(label["score"] for label in row), 1, abs_tol=1e-4) for row in found)


@pytest.mark.parametrize("name", TAGGERS)
def test_taggers_use_every_label(built: Any, name: str) -> None:
    directory = str(built(name, "token-classification"))
    found = transformers.pipeline("token-classification", directory, ignore_labels=[], device="cpu")(list(TEXTS))
    assert {token["entity"] for row in found for token in row} == set(LABELS)


@pytest.mark.parametrize("name", MASKED)
def test_masks_are_filled_differently(built: Any, name: str) -> None:
    fill = transformers.pipeline("fill-mask", str(built(name, "masked-lm")), device="cpu")
    mask = fill.tokenizer.mask_token
    found = fill([f"{mask} {text}" for text in TEXTS], top_k=1)
    assert len({row[0]["token"] for row in found}) > 1


@pytest.mark.parametrize(("name", "head"), GENERATORS)
def test_greedy_texts_vary_and_some_end_early(built: Any, name: str, head: str) -> None:
    directory = built(name, head)
    tokenizer, model = load(directory, head)
    written = json.loads((directory / "generation_config.json").read_text())
    ends = written["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    assert tokenizer.eos_token_id in ends
    texts = list(SENTENCES[::8])
    inputs = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left" if head == "causal-lm" else "right"
    )
    made = model.generate(**inputs, max_new_tokens=20, max_length=None, do_sample=False)
    made = made[:, 1 if head == "seq2seq-lm" else inputs["input_ids"].shape[1] :].tolist()
    found = [row[: next((place for place, token in enumerate(row) if token in ends), 20)] for row in made]
    early = sum(len(row) < 19 for row in found)
    assert 0.05 < early / len(found) < 0.75
    assert len(set(map(tuple, found))) > len(found) / 2
    assert max(len(set(row)) for row in found) > 4
    assert not {token for row in found for token in row[1:]} & set(tokenizer.all_special_ids)


def test_what_starts_and_ends_a_generated_text_is_written(built: Any) -> None:
    def written(name: str, head: str) -> Any:
        return json.loads((built(name, head) / "generation_config.json").read_text())

    bart = written("bart", "seq2seq-lm")
    assert (bart["decoder_start_token_id"], bart["forced_bos_token_id"], bart["forced_eos_token_id"]) == (2, 0, 2)
    marian = written("marian", "seq2seq-lm")
    assert marian["decoder_start_token_id"] == marian["pad_token_id"] == marian["bad_words_ids"][0][0]
    assert written("t5", "seq2seq-lm")["decoder_start_token_id"] == 0
    assert written("pegasus", "seq2seq-lm")["decoder_start_token_id"] == 0
    assert len(written("qwen3", "causal-lm")["eos_token_id"]) == 2


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_generating_decoders_have_a_chat_template_and_end_no_prompt(built: Any, name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(built(name, "causal-lm"), local_files_only=True)
    messages = [{"role": "user", "content": "The sky?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "The sky?" in text
    assert text.rstrip().endswith(("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>"))
    assert tokenizer("The sky").tokens()[-1] not in tokenizer.all_special_tokens


@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification", "regression"])
def test_the_problem_type_is_written(tmp_path: Path, kind: str) -> None:
    labels = None if kind == "regression" else LABELS
    family(tmp_path, "bert", head="sequence-classification", labels=labels, problem_type=kind)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.problem_type == kind
    assert config.num_labels == (1 if kind == "regression" else 3)
    found = transformers.pipeline("text-classification", str(tmp_path), device="cpu")(list(TEXTS), top_k=None)
    total = [sum(label["score"] for label in row) for row in found]
    assert (max(total) - min(total) < 1e-4) == (kind == "single_label_classification")


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "deberta-v2", "modernbert"])
def test_cross_encoders_take_them(tmp_path: Path, name: str) -> None:
    from sentence_transformers import CrossEncoder

    family(tmp_path, name, head="sequence-classification", labels=["LABEL_0"])
    pairs = [("The sky is blue.", text) for text in TEXTS]
    scores = CrossEncoder(str(tmp_path), device="cpu", local_files_only=True).predict(pairs)
    tokenizer, model = load(tmp_path, "sequence-classification")
    inputs = tokenizer(*map(list, zip(*pairs, strict=True)), return_tensors="pt", padding=True)
    expected = answer(model, inputs).sigmoid()[:, 0].tolist()
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1
