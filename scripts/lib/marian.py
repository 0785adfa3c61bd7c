"""A Marian checkpoint's tokenizer (source.spm, target.spm, vocab.json) → one that workers load: tokenizer.json.

Source texts are taken apart by source.spm's unigram model; ids are vocab.json's, which holds both languages' pieces.
transformers has only a slow tokenizer for this, and it needs the sentencepiece package. Its ids are met but for texts
whose combining marks stand in another order than Unicode's: these are put in order first.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from scripts.lib import sentencepiece_model
from scripts.lib.errors import UserError
from scripts.lib.pipeline import load_json
from scripts.lib.sentencepiece_model import SPACE, UNIGRAM, Kind, SentencePieceModel

SOURCE, TARGET, VOCABULARY, CONFIG = "source.spm", "target.spm", "vocab.json", "tokenizer_config.json"
_NFKC = ("nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")  # SentencePiece's own rules
_SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_MAX_LENGTH = 512  # MarianTokenizer's own, where no file tells it
_PRIVATE = range(0xE000, 0xF900)
# Characters that Unicode puts into one cluster with the one before them
_EXTENDING = "[\\p{M}\u200c\u200d\uff9e\uff9f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"


@dataclass(frozen=True)
class _Marks:
    """Private characters with which the tokenizer's steps talk to each other; no piece has them.

    Args:
        begin, end: stand for the `>>` and `<<` of a language's code at the text's start.
        own: around a run of characters that the source doesn't have, and before what no text spells.
        apart: keeps characters from being rewritten as one.
        other: stands for all five in a text: unknown like they.
    """

    begin: str
    end: str
    own: str
    apart: str
    other: str


def present(files: Mapping[str, Path]) -> bool:
    """Whether these are a Marian checkpoint's files, by path below the network's directory."""
    return SOURCE in files and VOCABULARY in files


def convert(files: Mapping[str, Path], directory: Path) -> dict[str, Path]:
    """Write the fast tokenizer.

    Args:
        files: path below the network's directory → file.
        directory: where the new files go.

    Returns:
        tokenizer.json and tokenizer_config.json → the new files. The latter's `unknown_from` is the first id of the
        source's pieces that vocab.json lacks: they stand for the unknown token.

    Raises:
        UserError: the files are damaged, or ask for what a fast tokenizer can't do.
    """
    config = load_json(files, CONFIG)
    named = load_json(files, "special_tokens_map.json")
    special = {role: _content((config | named).get(role) or token) for role, token in _SPECIAL.items()}
    vocabulary = _vocabulary(files[VOCABULARY])
    _check_config(config, special, vocabulary)
    source = sentencepiece_model.read(files[SOURCE])
    _check(source, files[SOURCE])
    tokenizer = _tokenizer(source, vocabulary, special)
    about = {"model_max_length": _MAX_LENGTH} | config | special
    about |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    about |= {"unknown_from": len(vocabulary)}
    made = {"tokenizer.json": directory / "tokenizer.json", CONFIG: directory / CONFIG}
    tokenizer.save(str(made["tokenizer.json"]))
    made[CONFIG].write_text(json.dumps(about, indent=2, sort_keys=True, ensure_ascii=False), encoding="utf-8")
    return made


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _vocabulary(path: Path) -> list[str]:
    """The pieces by id."""
    try:
        table = dict(json.loads(path.read_text(encoding="utf-8")).items())
        pieces = sorted(table, key=table.__getitem__)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no vocabulary", "complete the download") from error
    if [table[piece] for piece in pieces] != list(range(len(pieces))):
        raise UserError(f"the ids in {path} are not 0, 1, 2, …", "complete the download")
    return pieces


def _check_config(config: Mapping[str, Any], special: Mapping[str, str], vocabulary: list[str]) -> None:
    save = "save a fast tokenizer beside the model with save_pretrained"
    if config.get("separate_vocabs"):
        raise UserError(
            "this Marian model's languages have a vocabulary each (separate_vocabs), which isn't served", save
        )
    added = [_content(token) for token in (config.get("added_tokens_decoder") or {}).values()]
    known = set(vocabulary)
    for token in [*special.values(), *added]:
        if token not in known:
            raise UserError(f"{VOCABULARY} lacks the token {token!r}, which {CONFIG} names", "complete the download")


def _check(model: SentencePieceModel, path: Path) -> None:
    reasons = {
        "it is no unigram model": model.model_type != UNIGRAM,
        "it falls back to bytes": model.byte_fallback,
        "its words end with a space": model.suffix,
        "it treats spaces in a way of its own": not (model.escape and model.strip and model.dummy_prefix),
        "it rewrites what it decodes": model.denormalizes,
        "it has symbols that its user defined": any(piece.kind is Kind.USER_DEFINED for piece in model.pieces),
        f"its rules of normalisation are its own ({model.normalization})": bool(model.charsmap)
        and model.normalization not in _NFKC,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UserError(
            f"{path} can't be converted: {found[0]}", "save a fast tokenizer beside the model with save_pretrained"
        )


def _tokenizer(source: SentencePieceModel, vocabulary: list[str], special: Mapping[str, str]) -> Tokenizer:
    """Ids as in `vocabulary`, then the pieces that only the source has."""
    normal = {piece.text: piece.score for piece in source.pieces if piece.kind is Kind.NORMAL}
    silent = {piece.text for piece in source.pieces if piece.kind is Kind.CONTROL} - set(special.values())
    letters = set("".join(normal))
    codes = {piece for piece in vocabulary if piece.startswith(">>") and piece.find("<<") == len(piece) - 2}
    marks = _marks([*vocabulary, *normal], source.charsmap)
    normalizer = _normalizer(_rules(source, marks), codes, letters, marks)
    table: list[tuple[str, float]] = []
    for index, piece in enumerate(vocabulary):
        if piece in special.values():
            table.append((piece, 0.0))
        elif piece in codes:
            table.append((normalizer.normalize_str(piece), 0.0))
        elif piece in normal:
            table.append((piece, normal[piece]))
        elif piece in silent:  # nor is it written
            table.append((marks.own * (index + 1), 0.0))
        else:  # the target's: MarianTokenizer finds one that is all of an unknown run
            table.append((marks.own + piece + (marks.own if letters.isdisjoint(piece) else ""), 0.0))
    absent = normal.keys() - set(vocabulary)
    table += [(piece, score) for piece, score in normal.items() if piece in absent]
    tokenizer = Tokenizer(models.Unigram(table, unk_id=vocabulary.index(special["unk_token"]), byte_fallback=False))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = _pre_tokenizer(normal, marks)
    tokenizer.decoder = _decoder(marks)
    eos = special["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, vocabulary.index(eos))]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special.values()])
    return tokenizer


def _marks(pieces: Iterable[str], charsmap: bytes) -> _Marks:
    used = set("".join(pieces))
    rewrite = normalizers.Precompiled(charsmap).normalize_str if charsmap else str
    free = (character for character in map(chr, _PRIVATE) if character not in used and rewrite(character) == character)
    return _Marks(*(next(free) for _ in range(5)))


def _rules(source: SentencePieceModel, marks: _Marks) -> Any:
    """SentencePiece's rewriting of characters, or None for none.

    The rules are NFKC, some of them for several characters; a `Precompiled` normaliser applies the first that fits the
    start of a cluster of up to five bytes to all of it, and drops the rest. So it gets one character at a time here,
    and what belongs together is composed before and after.
    """
    if not source.charsmap:
        return None
    return normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(rf"(?!\A)(?={_EXTENDING})"), marks.apart),
            normalizers.Precompiled(source.charsmap),
            normalizers.Replace(marks.apart, ""),
            normalizers.NFC(),
        ]
    )


def _normalizer(rules: Any, codes: Collection[str], letters: set[str], marks: _Marks) -> Any:
    """A language's code at the text's start set apart, then what SentencePiece does to the text behind it.

    Nothing is put in at a text's very start but by `Prepend`: `Replace` there leaves a text that later steps panic on.
    """
    known = "|".join(re.escape(code[2:]) for code in sorted(codes)) or "(?!)"
    begin, end, own = marks.begin, marks.end, marks.own
    has = "[" + "".join(f"\\x{{{ord(letter):x}}}" for letter in sorted({*letters, SPACE, begin, end})) + "]"
    lacks = "[^" + has[1:]
    steps = [
        normalizers.Replace(Regex(f"[{begin}{end}{own}{marks.apart}]"), marks.other),
        # MarianTokenizer takes any code from the text, and one that it does not know is the unknown token
        normalizers.Replace(Regex(rf"\A>>(?!{known})[\s\S]*?<<"), begin + end),
        normalizers.Replace(Regex(rf"\A>>(?={known})"), begin),
        normalizers.Replace(Regex(rf"\A{begin}(?!{end})[\s\S]*?\K<<"), end),
        *([rules] if rules is not None else []),
        normalizers.Replace(Regex(rf"\A +|(?<={end}) +| +\z"), ""),
        normalizers.Replace(Regex(" {2,}"), " "),
        normalizers.Prepend(SPACE),
        normalizers.Replace(Regex(rf"\A{SPACE}(?={begin})"), ""),
        normalizers.Replace(Regex(rf"{end}(?=[\s\S])"), end + SPACE),
        normalizers.Replace(" ", SPACE),
        normalizers.Replace(Regex(rf"{SPACE}+\z"), ""),  # also one that the text spells itself
        normalizers.Replace(Regex(rf"(?<={has})(?={lacks})|(?<={lacks})(?={has}|\z)"), own),
    ]
    return normalizers.Sequence(steps)


def _pre_tokenizer(normal: Mapping[str, float], marks: _Marks) -> Any:
    """The code apart from the rest; and words, where no piece spans two, which a cache makes fast."""
    steps = [pre_tokenizers.Split(Regex(marks.end), behavior="merged_with_previous")]
    if SPACE in normal and all(SPACE not in piece[1:] for piece in normal):
        steps.append(pre_tokenizers.Split(SPACE, behavior="merged_with_next"))
    return pre_tokenizers.Sequence(steps)


def _decoder(marks: _Marks) -> Any:
    return decoders.Sequence(
        [
            decoders.Fuse(),
            decoders.Replace(marks.own, ""),
            decoders.Replace(marks.begin, ">>"),
            decoders.Replace(marks.end, "<<"),
            decoders.Replace(SPACE, " "),
            decoders.Replace(Regex(r"\A\s+|\s+\z"), ""),
        ]
    )
