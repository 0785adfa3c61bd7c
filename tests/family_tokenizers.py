"""Tokenizers of many model families, trained on `tests.corpus`; their special tokens, pair forms and classes are real.

What is trained is the same in every process: trainers number what they find in an order that is not.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.corpus import SENTENCES
from tests.models import write_json

PIECES = 640

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
        strips: whether the mask takes the space before it, as the words that it stands for do.
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
    strips: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@functools.cache
def _word_pieces() -> tuple[str, ...]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer breaks ties by ids and numbers continuations in an order that differs between processes: fix it.
    letters = sorted(set(tokenizer.normalizer.normalize_str("".join(SENTENCES))) - {" "})
    continued = [f"##{letter}" for letter in letters]
    trainer = trainers.WordPieceTrainer(vocab_size=PIECES, special_tokens=continued, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    vocabulary = tokenizer.get_vocab()
    return tuple(sorted(vocabulary, key=vocabulary.__getitem__))


@functools.cache
def _byte_pairs() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
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
SCHEMES = {
    "bert": Scheme(_wordpiece, _BERT, (), _BRACKETS, *_BERT_FORM, "BertTokenizer", types=True),
    "electra": Scheme(_wordpiece, _BERT, (), _BRACKETS, *_BERT_FORM, "ElectraTokenizer", types=True),
    "distilbert": Scheme(_wordpiece, _BERT, (), _BRACKETS, *_BERT_FORM, "DistilBertTokenizer"),
    "mpnet": Scheme(
        _wordpiece, (*_ROBERTA, "[UNK]"), ("<mask>",), _ANGLES | {"unk_token": "[UNK]"}, *_ROBERTA_FORM,
        "MPNetTokenizer", strips=True,
    ),
    "roberta": Scheme(_bytelevel, _ROBERTA, ("<mask>",), _ANGLES, *_ROBERTA_FORM, "RobertaTokenizer", strips=True),
    "bart": Scheme(_bytelevel, _ROBERTA, ("<mask>",), _ANGLES, *_ROBERTA_FORM, "BartTokenizer", strips=True),
    "modernbert": Scheme(
        functools.partial(_bytelevel, nfc=True), (), ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"), _BRACKETS,
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", strips=True,
    ),
    "qwen3": Scheme(
        functools.partial(_bytelevel, split=QWEN_SPLIT, nfc=True), (),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "$A <|endoftext|>", "$A <|endoftext|> $B:1 <|endoftext|>:1", "Qwen2Tokenizer",
        more={"chat_template": QWEN_CHAT},
    ),
    "llama": Scheme(
        functools.partial(_bytelevel, split=LLAMA_SPLIT), (),
        ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>",
         "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"},
        "<|begin_of_text|> $A", "<|begin_of_text|> $A <|begin_of_text|>:1 $B:1", more={"chat_template": LLAMA_CHAT},
    ),
    "xlm-roberta": Scheme(_unigram, _ROBERTA, ("<mask>",), _ANGLES, *_ROBERTA_FORM, "XLMRobertaTokenizer", strips=True),
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
def family_tokenizer(name: str, *, generates: bool = False) -> Any:
    """The `tokenizers.Tokenizer` of family `name`, the same object each time.

    `generates` leaves out the end that only Qwen3's embedding checkpoints put behind a text.
    """
    from tokenizers import AddedToken, processors

    scheme = SCHEMES[name]
    tokenizer = scheme.build(scheme.first, scheme.last)
    special = [*scheme.first, *scheme.last]
    mask = scheme.named.get("mask_token") if scheme.strips else None
    tokenizer.add_special_tokens([AddedToken(token, lstrip=token == mask, normalized=False) for token in special])
    if name in ("roberta", "bart", "mpnet"):
        ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
        tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False)
        return tokenizer
    single, pair = scheme.single, scheme.pair
    if name == "qwen3" and generates:
        single, pair = "$A", "$A $B:1"
    used = [(token, tokenizer.token_to_id(token)) for token in special if token in f"{single} {pair}"]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return tokenizer


def write_family_tokenizer(directory: Path, name: str, *, generates: bool, max_length: int) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json, the latter with a chat template where the model `generates`.

    Returns:
        The special tokens' ids by role (`pad_token_id`, …).
    """
    scheme = SCHEMES[name]
    tokenizer = family_tokenizer(name, generates=generates)
    tokenizer.save(str(directory / "tokenizer.json"))
    inputs = ["input_ids", *(["token_type_ids"] if scheme.types else []), "attention_mask"]
    more = {key: value for key, value in scheme.more.items() if generates or key != "chat_template"}
    about = {"tokenizer_class": scheme.tokenizer_class, "model_max_length": max_length, "model_input_names": inputs}
    write_json(directory / "tokenizer_config.json", about | scheme.named | more)
    return {f"{role}_id": tokenizer.token_to_id(token) for role, token in scheme.named.items()}
