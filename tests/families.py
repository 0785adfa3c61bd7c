"""Tiny models of many families, written to disk as a hub would deliver them: config, safetensors and a tokenizer.

Weights are random (a seed), tokenizers are trained on `tests.corpus`. Special tokens, their ids, pair forms and
classes are those of the families' public checkpoints; a model takes well under a second and needs no network.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.corpus import SENTENCES
from tests.models import write_json

PIECES = 640
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

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@dataclass(frozen=True)
class Scheme:
    """How a family tokenizes.

    Args:
        build: special tokens before and after the trained pieces → a tokenizer without a post-processor.
        first, last: the special tokens before and after the trained pieces, by id.
        named: the special tokens' roles, as in tokenizer_config.json.
        single, pair: templates of one text and of two.
        tokenizer_class: what tokenizer_config.json says.
        types: whether the model takes token_type_ids.
        more: further entries of tokenizer_config.json.
    """

    build: Callable[[tuple[str, ...], tuple[str, ...]], Any]
    first: tuple[str, ...]
    last: tuple[str, ...]
    named: dict[str, str]
    single: str
    pair: str
    tokenizer_class: str = "PreTrainedTokenizerFast"
    types: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@functools.cache
def _word_pieces() -> tuple[str, ...]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(vocab_size=PIECES, show_progress=False))
    return tuple(sorted(tokenizer.get_vocab()))  # the trainer's own order differs between processes


@functools.cache
def _byte_pairs() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return tuple(model["vocab"]), tuple(map(tuple, model["merges"]))


@functools.cache
def _unigrams(*, lowercase: bool) -> tuple[tuple[str, float], ...]:
    import json

    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    if lowercase:
        steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=PIECES, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    # The trainer gives rare characters the lowest scores in an order that differs between processes: make them equal.
    floor = min(score for piece, score in pieces if piece != "<unk>")
    scores = {piece: round(floor if score < floor + 0.1 else score, 4) for piece, score in pieces if piece != "<unk>"}
    return tuple(sorted(scores.items(), key=lambda item: (-item[1], item[0])))


def _wordpiece(first: tuple[str, ...], last: tuple[str, ...]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {piece: index for index, piece in enumerate((*first, *_word_pieces(), *last))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _bytelevel(first: tuple[str, ...], last: tuple[str, ...], *, split: str = "", nfc: bool = False) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces, merges = _byte_pairs()
    vocabulary = {piece: index for index, piece in enumerate((*first, *pieces, *last))}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    if split:
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated"), level]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _unigram(first: tuple[str, ...], last: tuple[str, ...], *, unk: str = "<unk>", style: str = "t5") -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = [(token, 0.0) for token in first]
    pieces += [(piece, score) for piece, score in _unigrams(lowercase=style == "albert")]
    pieces += [(token, 0.0) for token in last]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=[piece for piece, _ in pieces].index(unk), byte_fallback=False))
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.pre_tokenizer = metaspace
    steps: list[Any] = []
    if style in ("t5", "albert"):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    if style == "albert":
        steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    elif style == "deberta":
        steps = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC()]
        steps += [normalizers.Strip(left=False, right=True)]
    elif style == "pegasus":
        steps = [normalizers.Replace(Regex(r"\n"), " "), normalizers.Replace(Regex(r" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


_BRACKETS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
_BRACKETS |= {"mask_token": "[MASK]"}
_ANGLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"}
_ANGLES |= {"cls_token": "<s>", "mask_token": "<mask>"}
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BERT_FORM = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")
_ROBERTA_FORM = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")
_SENTINELS = tuple(f"<extra_id_{index}>" for index in reversed(range(100)))
_GAPS = ("<mask_1>", "<mask_2>", *(f"<unk_{index}>" for index in range(2, 103)))
_SCHEMES = {
    "bert": Scheme(_wordpiece, _BERT, (), _BRACKETS, *_BERT_FORM, "BertTokenizer", types=True),
    "electra": Scheme(_wordpiece, _BERT, (), _BRACKETS, *_BERT_FORM, "ElectraTokenizer", types=True),
    "distilbert": Scheme(_wordpiece, _BERT, (), _BRACKETS, *_BERT_FORM, "DistilBertTokenizer"),
    "mpnet": Scheme(
        _wordpiece, (*_ROBERTA, "[UNK]"), ("<mask>",), _ANGLES | {"unk_token": "[UNK]"}, *_ROBERTA_FORM, "MPNetTokenizer"
    ),
    "roberta": Scheme(_bytelevel, _ROBERTA, ("<mask>",), _ANGLES, *_ROBERTA_FORM, "RobertaTokenizer"),
    "bart": Scheme(_bytelevel, _ROBERTA, ("<mask>",), _ANGLES, *_ROBERTA_FORM, "BartTokenizer"),
    "modernbert": Scheme(
        functools.partial(_bytelevel, nfc=True), (), ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"), _BRACKETS,
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]",
    ),
    "qwen3": Scheme(
        functools.partial(_bytelevel, split=QWEN_SPLIT, nfc=True), (), ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "$A <|endoftext|>", "$A <|endoftext|> $B:1 <|endoftext|>:1", "Qwen2Tokenizer", more={"chat_template": QWEN_CHAT},
    ),
    "llama": Scheme(
        functools.partial(_bytelevel, split=LLAMA_SPLIT), (),
        ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"},
        "<|begin_of_text|> $A", "<|begin_of_text|> $A <|begin_of_text|>:1 $B:1", more={"chat_template": LLAMA_CHAT},
    ),
    "xlm-roberta": Scheme(_unigram, _ROBERTA, ("<mask>",), _ANGLES, *_ROBERTA_FORM, "XLMRobertaTokenizer"),
    "deberta-v2": Scheme(
        functools.partial(_unigram, unk="[UNK]", style="deberta"), ("[PAD]", "[CLS]", "[SEP]", "[UNK]"), ("[MASK]",),
        _BRACKETS | {"bos_token": "[CLS]", "eos_token": "[SEP]"}, *_BERT_FORM, "DebertaV2Tokenizer", types=True,
    ),
    "albert": Scheme(
        functools.partial(_unigram, style="albert"), ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"), (),
        _BRACKETS | {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "[CLS]", "eos_token": "[SEP]"},
        *_BERT_FORM, "AlbertTokenizer", types=True,
    ),
    "t5": Scheme(
        _unigram, ("<pad>", "</s>", "<unk>"), _SENTINELS,
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, "$A </s>", "$A </s> $B </s>", "T5Tokenizer",
        more={"extra_ids": 100, "additional_special_tokens": sorted(_SENTINELS)},
    ),
    "marian": Scheme(
        functools.partial(_unigram, style="marian"), ("</s>", "<unk>"), ("<pad>",),
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, "$A </s>", "$A $B </s>",
    ),
    "pegasus": Scheme(
        functools.partial(_unigram, style="pegasus"), ("<pad>", "</s>", *_GAPS, "<unk>"), (),
        {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask_2>"},
        "$A </s>", "$A $B </s>", "PegasusTokenizer",
        more={"mask_token_sent": "<mask_1>", "offset": 103, "additional_special_tokens": ["<mask_1>", *_GAPS[2:]]},
    ),
}  # fmt: skip


@functools.cache
def _tokenizer(name: str, *, generates: bool) -> Any:
    from tokenizers import AddedToken, processors

    scheme = _SCHEMES[name]
    tokenizer = scheme.build(scheme.first, scheme.last)
    special = [*scheme.first, *scheme.last]
    # RoBERTa's mask takes the space before it, as the words that it stands for do.
    strips = name in ("roberta", "bart", "mpnet", "xlm-roberta", "modernbert")
    mask = scheme.named.get("mask_token")
    tokenizer.add_special_tokens(
        [AddedToken(token, lstrip=strips and token == mask, normalized=False, special=True) for token in special]
    )
    if name in ("roberta", "bart", "mpnet"):
        ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
        tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False)
        return tokenizer
    single, pair = scheme.single, scheme.pair
    if name == "qwen3" and generates:  # only the embedding checkpoints end a text
        single, pair = "$A", "$A $B:1"
    used = [(token, tokenizer.token_to_id(token)) for token in special if token in f"{single} {pair}"]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return tokenizer


def _write_tokenizer(directory: Path, name: str, *, head: str, max_length: int) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json.

    Returns:
        The special tokens' ids by role (`pad_token_id`, …) and `vocab_size`.
    """
    scheme = _SCHEMES[name]
    generates = head == "causal-lm"
    tokenizer = _tokenizer(name, generates=generates)
    tokenizer.save(str(directory / "tokenizer.json"))
    inputs = ["input_ids", *(["token_type_ids"] if scheme.types else []), "attention_mask"]
    more = {key: value for key, value in scheme.more.items() if generates or key != "chat_template"}
    about = {"tokenizer_class": scheme.tokenizer_class, "model_max_length": max_length, "model_input_names": inputs}
    write_json(directory / "tokenizer_config.json", about | scheme.named | more)
    ids = {f"{role}_id": tokenizer.token_to_id(token) for role, token in scheme.named.items()}
    return ids | {"vocab_size": tokenizer.get_vocab_size()}


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
    "albert": _SHAPE | {"embedding_size": 16, "num_hidden_groups": 1},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
    "bart": _BART,
    "marian": _BART | {"scale_embedding": True, "activation_function": "swish"},
    "pegasus": _BART | {"scale_embedding": True, "activation_function": "relu"},
    "qwen3": _SHAPE | {"num_key_value_heads": 2, "head_dim": 8},
    "llama": _SHAPE | {"num_key_value_heads": 2, "head_dim": 8},
}  # fmt: skip


def _values(name: str, ids: dict[str, int], max_length: int) -> dict[str, Any]:
    """The config's keys: the shape, the tokenizer's ids and the longest input."""
    roles = ["pad_token_id", "bos_token_id", "eos_token_id", "vocab_size"]
    if name == "modernbert":
        roles += ["cls_token_id", "sep_token_id"]
        ids = ids | {"bos_token_id": ids["cls_token_id"], "eos_token_id": ids["sep_token_id"]}
    values = _SHAPES[name] | {role: ids[role] for role in roles if role in ids}
    if name in ("roberta", "xlm-roberta", "mpnet"):  # their positions start behind the padding's id
        max_length += ids["pad_token_id"] + 1
    if name == "t5":
        values |= {"n_positions": max_length, "decoder_start_token_id": ids["pad_token_id"]}
    else:
        values["max_position_embeddings"] = max_length
    if name == "bart":
        values |= {"decoder_start_token_id": ids["eos_token_id"], "forced_bos_token_id": ids["bos_token_id"]}
    if name in ("marian", "pegasus"):
        values["decoder_start_token_id"] = ids["pad_token_id"]
    if name == "marian":
        values["decoder_vocab_size"] = ids["vocab_size"]
    if name in ("bart", "marian", "pegasus"):
        values["forced_eos_token_id"] = ids["eos_token_id"]
    return values


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

    directory.mkdir(parents=True, exist_ok=True)
    auto = getattr(transformers, HEADS[head])
    if (name, head) == ("t5", "encoder"):  # without the decoder, as sentence-t5's checkpoints
        auto = transformers.AutoModelForTextEncoding
    values = _values(name, _write_tokenizer(directory, name, head=head, max_length=max_length), max_length)
    if labels is not None:
        values["id2label"] = dict(enumerate(labels))
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    elif problem_type == "regression":
        values["num_labels"] = 1
    if problem_type is not None:
        values["problem_type"] = problem_type
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(transformers.AutoConfig.for_model(name, **(values | config))).eval()
        _shake(model)
    model.save_pretrained(directory)
    return directory


def _shake(model: Any) -> None:
    """Give biases and norms, which start at 0 and 1, values of their own."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.normal_(std=0.1)
