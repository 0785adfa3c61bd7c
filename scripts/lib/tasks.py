"""The tasks that are served, how a model's files show which one it is for, and what of them the handler must know."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib import encoder_decoder, reranker, splade
from scripts.lib.errors import UserError

Files = Mapping[str, Path]
#: The files and config.json → keys of the `handler:` section, and notes for the person who builds.
Settings = Callable[[Files, Mapping[str, Any]], tuple[dict[str, Any], list[str]]]


def _nothing(files: Files, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return {}, []


@dataclass(frozen=True)
class Task:
    """A task that is served.

    Args:
        module: of its handler.
        models: what a model may be found to be for, when the task is asked for by name; empty for any encoder.
        mapping: transformers' table of the families that have the network, in `modeling_auto`.
        settings: what the handler must know of the model's files.
    """

    module: str
    models: tuple[str, ...]
    mapping: str
    settings: Settings = _nothing


_SEQUENCE = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"

SERVED: Mapping[str, Task] = {
    "embedding": Task("handlers.embedding", (), "MODEL_MAPPING_NAMES"),
    "reranking": Task("handlers.reranking", ("reranking", "classification"), _SEQUENCE, reranker.settings),
    "classification": Task("handlers.classification", ("classification", "reranking"), _SEQUENCE),
    "zero_shot": Task("handlers.zero_shot", ("classification",), _SEQUENCE),
    "token_classification": Task(
        "handlers.token_classification", ("token_classification",), "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"
    ),
    "question_answering": Task(
        "handlers.question_answering", ("question_answering",), "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"
    ),
    "fill_mask": Task("handlers.fill_mask", ("fill_mask",), "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "sparse_embedding": Task(
        "handlers.sparse_embedding",
        ("sparse_embedding", "fill_mask"),
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        splade.settings,
    ),
    "seq2seq": Task(
        "handlers.seq2seq", ("seq2seq",), "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", encoder_decoder.settings
    ),
}

# Ends of the architectures' names → what they are for.
_ARCHITECTURES = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForQuestionAnsweringSimple": "question_answering",
    "ForMultipleChoice": "multiple choice",
    "ForMaskedLM": "fill_mask",
    "ForPreTraining": "pre-training",
    "ForConditionalGeneration": "seq2seq",
    "ForSeq2SeqLM": "seq2seq",
    "MTModel": "seq2seq",
    "ForCausalLM": "generation",
    "LMHeadModel": "generation",
    "ForImageClassification": "image classification",
    "ForSpeechSeq2Seq": "speech recognition",
    "ForCTC": "speech recognition",
    "ForRetrieval": "multi-vector embedding",
}
# transformers' names of its pipelines, where they are other ones
_PIPELINES = {
    "feature-extraction": "embedding",
    "text-classification": "classification",
    "zero-shot-classification": "zero_shot",
    "ner": "token_classification",
    "summarization": "seq2seq",
    "translation": "seq2seq",
    "text2text-generation": "seq2seq",
}


def named(task: str) -> str:
    """The task that a person names, or auto.

    Raises:
        UserError: there is none of that name.
    """
    name = _PIPELINES.get(task, task.replace("-", "_"))
    if name not in ("auto", *SERVED):
        raise UserError(f"the task {task} is not served", f"served are {', '.join(SERVED)}")
    return name


def of_network(config: Mapping[str, Any]) -> str:
    """What the network that config.json describes is for: a task of SERVED, or in words what is not served."""
    architecture = next(iter(config.get("architectures") or []), "")
    if config.get("is_encoder_decoder") and not architecture.endswith(("Classification", "QuestionAnswering")):
        return "seq2seq"
    for end, task in _ARCHITECTURES.items():
        if architecture.endswith(end):
            labels = config.get("id2label") or {}
            one = config.get("num_labels") == 1 or len(labels) == 1
            return "reranking" if task == "classification" and one else task
    return "embedding"


def chosen(asked: str, found: str) -> str:
    """The task to serve, when a person asks for one (or auto) and the model is found to be for another.

    Raises:
        UserError: the model cannot do that.
    """
    if asked == "auto":
        if found not in SERVED:
            hint = "its encoder can serve as an embedding model (mean pooling): --task embedding"
            raise UserError(
                f"this is a model for {found.replace('_', ' ')}, which is not served",
                hint if found == "pre-training" else f"served are {', '.join(SERVED)}",
            )
        return found
    models = SERVED[asked].models
    if models and found not in models:
        said = found.replace("_", " ")
        raise UserError(
            f"this is a model for {said}: it has no head for {asked.replace('_', ' ')}", "take another model"
        )
    return asked
