"""Tiny models of many families, written to disk as a hub would deliver them: config, safetensors and a tokenizer.

Weights are random (a seed) but balanced: a classifier gives every label to some text, a language model varies its
words and ends now and then. A model takes well under a second and needs no network.
"""

from pathlib import Path
from typing import Any

from tests.corpus import SENTENCES
from tests.family_tokenizers import SCHEMES, family_tokenizer, write_family_tokenizer

HEADS = {
    "encoder": "AutoModel",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "causal-lm": "AutoModelForCausalLM",
}
_READING = ("encoder", "sequence-classification", "token-classification", "question-answering")
# Family → the heads that its checkpoints come with.
FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert", "mpnet"), (*_READING, "masked-lm")),
    **dict.fromkeys(("electra", "deberta-v2", "modernbert", "albert"), (*_READING, "masked-lm")),
    "t5": (*_READING, "seq2seq-lm"),
    "bart": ("sequence-classification", "question-answering", "masked-lm", "seq2seq-lm"),
    "marian": ("seq2seq-lm",),
    "pegasus": ("seq2seq-lm",),
    "qwen3": (*_READING, "causal-lm"),
    "llama": (*_READING, "causal-lm"),
}

_SHAPE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_SHAPE |= {"initializer_range": 0.3}
_BART: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "init_std": 0.3}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_SHAPES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "mpnet"), _SHAPE),
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "initializer_range": 0.3},
    "electra": _SHAPE | {"embedding_size": 16},
    "deberta-v2": _SHAPE | {
        "relative_attention": True, "position_buckets": 16, "max_relative_positions": -1, "type_vocab_size": 0,
        "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_biased_input": False,
        "norm_rel_ebd": "layer_norm", "pooler_hidden_size": 32,
    },
    "modernbert": _SHAPE | {"local_attention": 16},
    "albert": _SHAPE | {"embedding_size": 16},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
    "bart": _BART,
    "marian": _BART | {"scale_embedding": True, "activation_function": "swish"},
    "pegasus": _BART | {"scale_embedding": True, "activation_function": "relu"},
    "qwen3": _SHAPE | {"num_key_value_heads": 2, "head_dim": 8},
    "llama": _SHAPE | {"num_key_value_heads": 2, "head_dim": 8},
}  # fmt: skip
# Larger weights, with which generated texts vary more.
_LARGER: dict[str, dict[str, Any]] = {
    "t5": {"initializer_factor": 2.0},
    **{name: {"init_std": 0.5} for name in ("bart", "marian", "pegasus")},
}


def family(
    directory: Path,
    name: str,
    *,
    head: str = "encoder",
    labels: list[str] | None = None,
    problem_type: str | None = None,
    seed: int = 0,
    max_length: int = 64,
    **config: Any,
) -> Path:
    """Write a 2-layer model of width 32 with its tokenizer to `directory` (made if need be) and return it.

    Args:
        directory: where the model goes.
        name: a key of FAMILIES.
        head: a key of HEADS; FAMILIES[name] lists those that make sense.
        labels: names of a classifier's labels; None leaves transformers' own, LABEL_0 and LABEL_1.
        problem_type: single_label_classification, multi_label_classification, regression (one label unless `labels`
            are given) or None, which leaves it out.
        seed: another seed, other weights.
        max_length: the longest input in tokens, special ones included.
        config: further keys of config.json, or other values for those that are set here.

    Raises:
        KeyError: an unknown name or head.
        ValueError: the family has no such head.
    """
    import torch
    import transformers

    auto = getattr(transformers, HEADS[head])
    if (name, head) == ("t5", "encoder"):  # without the decoder, as sentence-t5's checkpoints
        auto = transformers.AutoModelForTextEncoding
    directory.mkdir(parents=True, exist_ok=True)
    ids = write_family_tokenizer(directory, name, generates=head == "causal-lm", max_length=max_length)
    values = _SHAPES[name] | _tokens(name, head, ids) | _positions(name, max_length, ids)
    if head == "seq2seq-lm":
        values |= _LARGER.get(name, {})
    if labels is not None:
        values["id2label"] = dict(enumerate(labels))
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    elif problem_type == "regression":
        values["num_labels"] = 1
    if problem_type is not None:
        values["problem_type"] = problem_type
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = auto.from_config(transformers.AutoConfig.for_model(name, **(values | config))).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms, which start at 0 and 1
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if head in ("sequence-classification", "token-classification"):
            _balance_labels(model, name, max_length)
        if head in ("seq2seq-lm", "causal-lm"):
            _balance_words(model, name, max_length)
            _set_generation(model.generation_config, name, ids, max_length)
    model.save_pretrained(directory)
    return directory


def _tokens(name: str, head: str, ids: dict[str, int]) -> dict[str, Any]:
    """The config's special tokens and size of vocabulary."""
    values: dict[str, Any] = {"vocab_size": family_tokenizer(name).get_vocab_size()}
    values |= {role: ids[role] for role in ("pad_token_id", "bos_token_id", "eos_token_id") if role in ids}
    if name == "modernbert":
        ends = {role: ids[role] for role in ("cls_token_id", "sep_token_id")}
        values |= ends | {"bos_token_id": ids["cls_token_id"], "eos_token_id": ids["sep_token_id"]}
    elif name == "qwen3":
        values["bos_token_id"] = ids["pad_token_id"]
        if head != "causal-lm":
            values["eos_token_id"] = ids["pad_token_id"]
    elif name == "bart":
        values["decoder_start_token_id"] = ids["eos_token_id"]
    elif name in ("t5", "marian", "pegasus"):
        values["decoder_start_token_id"] = ids["pad_token_id"]
    if name == "marian":
        values["decoder_vocab_size"] = values["vocab_size"]
    if name in ("bart", "marian", "pegasus"):
        values["forced_eos_token_id"] = ids["eos_token_id"]
    return values


def _positions(name: str, max_length: int, ids: dict[str, int]) -> dict[str, int]:
    if name == "t5":
        return {"n_positions": max_length}
    if name in ("roberta", "xlm-roberta", "mpnet"):  # their positions start behind the padding's id
        return {"max_position_embeddings": max_length + ids["pad_token_id"] + 1}
    return {"max_position_embeddings": max_length}


def _set_generation(generation: Any, name: str, ids: dict[str, int], max_length: int) -> None:
    if name in ("bart", "marian", "pegasus"):
        generation.max_length = max_length
    if name == "bart":
        generation.forced_bos_token_id = ids["bos_token_id"]
    elif name == "marian":
        generation.bad_words_ids = [[ids["pad_token_id"]]]
    elif name == "qwen3":
        generation.eos_token_id = [ids["eos_token_id"], ids["pad_token_id"]]
    elif name == "llama":
        generation.eos_token_id = [family_tokenizer(name).token_to_id("<|end_of_text|>"), ids["eos_token_id"]]


def _states(model: Any, layer: Any, name: str, max_length: int) -> tuple[Any, Any]:
    """What goes into `layer` and comes out of it for some of the corpus, (vectors, width) each."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tokenizer = family_tokenizer(name)
    rows = [tokenizer.encode(text).ids for text in SENTENCES[::6]]
    rows = [row if len(row) <= max_length else row[: max_length - 1] + row[-1:] for row in rows]
    mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    inputs = {"attention_mask": mask, "input_ids": torch.full_like(mask, model.config.pad_token_id)}
    inputs["input_ids"][mask.bool()] = torch.tensor([token for row in rows for token in row])
    if model.config.is_encoder_decoder and model.get_output_embeddings() is layer:
        words = torch.randint(tokenizer.get_vocab_size(), (len(rows), min(12, max_length)))
        words[:, 0] = model.config.decoder_start_token_id
        inputs["decoder_input_ids"] = words
        mask = torch.ones_like(words)
    seen: list[Any] = []
    hook = layer.register_forward_hook(lambda _, given, out: seen.extend((given[0], out)))
    model(**inputs)
    hook.remove()
    given, out = (states[mask.bool()] if states.dim() == 3 else states for states in seen)
    return given, out


def _balance_labels(model: Any, name: str, max_length: int) -> None:
    """Make each label's logits 0 ± 1 over the corpus; else many a random classifier has one label for all texts."""
    import torch

    layer = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    _, logits = _states(model, layer, name, max_length)
    layer.weight.div_(logits.std(0)[:, None])
    if layer.bias is not None:  # decoders' have none, and vary enough without
        layer.bias.sub_(logits.mean(0)).div_(logits.std(0))


def _balance_words(model: Any, name: str, max_length: int) -> None:
    """Let greedy texts neither repeat one word for ever nor go on for ever.

    A head that is tied to the embeddings repeats its input unless these are small beside what the layers add. Every
    word's mean logit is taken off where there is a bias for it. Special tokens never come up but for the end, which
    wins at one place in 16: its row is made at right angles to the mean state (and to that of a first word, lest texts
    are empty), and as long as that takes.
    """
    import torch

    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings:
        head.weight.mul_(0.3)
    scheme = SCHEMES[name]
    vocabulary = family_tokenizer(name)
    special = [vocabulary.token_to_id(token) for token in (*scheme.first, *scheme.last)]
    head.weight[special] *= 0.1
    given, logits = _states(model, head, name, max_length)
    bias = dict(model.named_buffers()).get("final_logits_bias")
    if bias is not None:
        bias.copy_(-logits.mean(0, keepdim=True))
        logits = logits + bias
    end = model.config.eos_token_id
    means = [given.mean(0)]
    if model.config.is_encoder_decoder:
        means.append(given[:: min(12, max_length)].mean(0))
    basis = torch.linalg.qr(torch.stack(means, dim=1)).Q
    row = torch.randn_like(means[0])
    row -= basis @ (basis.T @ row)
    logits[:, special] = -torch.inf
    best, own = logits.max(-1).values, given @ row
    head.weight[end] = row * torch.where(own > 0, best / own, torch.inf).quantile(1 / 16)
    if bias is not None:
        bias[0, end] = 0
