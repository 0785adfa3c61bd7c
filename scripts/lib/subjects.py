"""What the benchmark serves for each task: a model, the requests it is sent, and what their answers are worth.

No package brings trained models for all tasks, and speed doesn't depend on the weights: where no model is named,
MiniLM's encoder gets an untrained head, and seq2seq an untrained model of opus-mt's shape with MiniLM's tokenizer.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.source import resolve

LABELS = 9  # of the token classifier, as CoNLL-2003 has
NEW_TOKENS = 32  # that every seq2seq request generates at most


@dataclass(frozen=True)
class Subject:
    """A task under measurement.

    Args:
        task: its name in a build.
        workloads: those of `workloads.WORKLOADS` that it is measured on.
        clients: how many send at once, when nothing else is said.
        list_items: texts of a request of the workload lists.
        one: a text → the body of a request.
        many: texts → the body of one request.
        values: an answer and the number of its texts → one list of numbers, or of words, per text.
        yardstick: what runs the same offline, in words.
        stand_in: writes a model to measure where none is named; None takes bundled:minilm.
        query: whether every text is read together with a query.
    """

    task: str
    workloads: tuple[str, ...]
    clients: tuple[int, ...]
    one: Callable[[str], dict[str, Any]]
    many: Callable[[Sequence[str]], dict[str, Any]]
    values: Callable[[Any, int], list[list[Any]]]
    yardstick: str
    list_items: int = 32
    stand_in: Callable[[Path], None] | None = None
    query: bool = False


#: Put before every document of a reranking request.
QUERY = "which of these is about the old house"


def _headed(architecture: str, labels: Sequence[str]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        import torch
        import transformers

        minilm = resolve("bundled:minilm").directory
        torch.manual_seed(0)
        auto: Any = getattr(transformers, architecture)
        names = dict(enumerate(labels))
        net = auto.from_pretrained(minilm, id2label=names, label2id={name: i for i, name in names.items()})
        net.save_pretrained(directory)
        _tokenizer(minilm, directory, max_tokens=512)

    return write


def _translator(directory: Path) -> None:
    import torch
    import transformers

    minilm = resolve("bundled:minilm").directory
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=30522, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512,
        activation_function="swish", scale_embedding=True, pad_token_id=0, eos_token_id=102, decoder_start_token_id=0,
        forced_eos_token_id=102,
    )  # fmt: skip
    net = transformers.MarianMTModel(config)
    net.generation_config.max_new_tokens = NEW_TOKENS
    net.save_pretrained(directory)
    _tokenizer(minilm, directory, max_tokens=512)


def _tokenizer(source: Path, directory: Path, *, max_tokens: int) -> None:
    """MiniLM's tokenizer, with the limit of the network rather than of the sentence embedder."""
    for name in ("tokenizer.json", "vocab.txt", "special_tokens_map.json"):
        if (source / name).exists():
            shutil.copy(source / name, directory / name)
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": max_tokens}))


def _text(text: str) -> dict[str, Any]:
    return {"text": text}


def _texts(texts: Sequence[str]) -> dict[str, Any]:
    return {"texts": list(texts)}


def _embeddings(answer: Any, count: int) -> list[list[Any]]:
    return [list(map(float, vector)) for vector in answer["embeddings"]]


def _in_order(answer: Any, count: int) -> list[list[Any]]:
    scores: list[list[Any]] = [[0.0]] * count
    for entry in _first(answer):
        scores[entry["index"]] = [entry["score"]]
    return scores


def _first(answer: Any) -> Any:
    return next(iter(answer.values()))


SUBJECTS: Mapping[str, Subject] = {
    "embedding": Subject(
        "embedding", ("short", "mixed", "lists"), (1, 8, 64), _text, _texts, _embeddings,
        "sentence-transformers' encode, sorted",
    ),
    "reranking": Subject(
        "reranking", ("lists",), (8,), lambda text: {"query": QUERY, "documents": [text]},
        lambda texts: {"query": QUERY, "documents": list(texts)}, _in_order,
        "sentence-transformers' CrossEncoder.predict, sorted", list_items=64, query=True,
        stand_in=_headed("AutoModelForSequenceClassification", ["LABEL_0"]),
    ),
    "classification": Subject(
        "classification", ("short", "mixed", "lists"), (64,), _text, _texts,
        lambda answer, count: [[value["score"]] for value in _first(answer)],
        "transformers' pipeline, unsorted",
        stand_in=_headed("AutoModelForSequenceClassification", ["negative", "positive"]),
    ),
    "token_classification": Subject(
        "token_classification", ("short", "mixed", "lists"), (64,), _text, _texts,
        lambda answer, count: [[entity["score"] for entity in value] for value in _first(answer)],
        "transformers' pipeline, unsorted",
        stand_in=_headed("AutoModelForTokenClassification", [f"LABEL_{i}" for i in range(LABELS)]),
    ),
    "seq2seq": Subject(
        "seq2seq", ("mixed", "short"), (64,), _text, _texts,
        lambda answer, count: [str(value).split() for value in _first(answer)],
        "generate, unsorted", stand_in=_translator,
    ),
}  # fmt: skip
