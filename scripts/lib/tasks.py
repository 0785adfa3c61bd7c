"""The tasks that are served, how a model's files show which one it is for, and what of them the handler must know."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handlers.config import HandlerConfig, Section
from handlers.generation.settings import GenerationConfig
from scripts.lib import encoder_decoder, nli, reranker, splade
from scripts.lib.errors import UserError

Files = Mapping[str, Path]
#: The files and config.json → keys of the `handler:` section, and notes for the person who builds.
Settings = Callable[[Files, Mapping[str, Any]], tuple[dict[str, Any], list[str]]]


def _nothing(files: Files, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return {}, []


def _anywhere(settings: Mapping[str, Any]) -> None:
    pass


def _engine_is_here(settings: Mapping[str, Any]) -> None:
    if settings.get("engine") == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("the engine vllm is not installed here", "pip install vllm, or leave out --engine")


@dataclass(frozen=True)
class Task:
    """A task that is served.

    Args:
        module: of its handler.
        models: what a model may be found to be for, when the task is asked for by name; empty for any encoder.
        mapping: transformers' table of the families that have the network, in `modeling_auto`.
        settings: what the handler must know of the model's files.
        config: reads the `handler:` section.
        mode: what model-config.yaml says beside it and the timeouts.
        check: raises UserError where something that a `handler:` section asks for is missing here.
    """

    module: str
    models: tuple[str, ...]
    mapping: str
    settings: Settings = _nothing
    config: type[Section] = HandlerConfig
    mode: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Mapping[str, Any]], None] = _anywhere


SEQUENCE = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"

SERVED: Mapping[str, Task] = {
    "embedding": Task("handlers.embedding", (), "MODEL_MAPPING_NAMES"),
    "reranking": Task("handlers.reranking", ("reranking", "classification"), SEQUENCE, reranker.settings),
    "classification": Task("handlers.classification", ("classification", "reranking"), SEQUENCE, nli.classification),
    "zero_shot": Task("handlers.zero_shot", ("classification",), SEQUENCE, nli.zero_shot),
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
    "generation": Task(
        "handlers.generation.handler",
        ("generation",),
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        config=GenerationConfig,
        # the mode that carries streams, in which a second worker would stall the first one's
        mode={"continuousBatching": True, "minWorkers": 1, "maxWorkers": 1},
        check=_engine_is_here,
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
    "text-generation": "generation",
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
