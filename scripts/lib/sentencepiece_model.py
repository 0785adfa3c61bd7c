"""A SentencePiece model file, read without the sentencepiece package: its pieces and what it does to a text."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from scripts.lib.errors import UserError

SPACE = "▁"
UNIGRAM = 1


class Kind(IntEnum):
    """What a piece is for; the values are the format's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """A piece of text, a space being `SPACE`, and the logarithm of its probability."""

    text: str
    score: float
    kind: Kind = Kind.NORMAL


@dataclass
class SentencePieceModel:
    """What a .spm or .model file says; the defaults are the format's.

    Args:
        pieces: by id.
        model_type: `UNIGRAM`, or another.
        suffix: whether words end with a space instead of beginning with one.
        byte_fallback: whether unknown characters become bytes.
        normalization: the rules' name.
        charsmap: the rules themselves; empty for none.
        dummy_prefix: whether a text gets a space before it.
        strip: whether leading, trailing and repeated spaces go.
        escape: whether spaces become `SPACE`.
        denormalizes: whether decoded texts are rewritten.
    """

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = UNIGRAM
    suffix: bool = False
    byte_fallback: bool = False
    normalization: str = ""
    charsmap: bytes = b""
    dummy_prefix: bool = True
    strip: bool = True
    escape: bool = True
    denormalizes: bool = False


def read(path: Path) -> SentencePieceModel:
    """Read a model file.

    Args:
        path: a serialised `sentencepiece.ModelProto`.

    Raises:
        UserError: it is none.
    """
    model = SentencePieceModel()
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                model.pieces.append(_piece(_message(value)))
            elif number == 2:
                _trainer(model, _message(value))
            elif number == 3:
                _normalizer(model, _message(value))
            elif number == 5:
                model.denormalizes = any(number == 2 and value for number, value in _fields(_message(value)))
    except (ValueError, IndexError, struct.error) as error:
        raise UserError(f"{path} is no SentencePiece model", "complete the download") from error
    if not model.pieces:
        raise UserError(f"{path} is no SentencePiece model: it has no pieces", "complete the download")
    return model


def _piece(data: bytes) -> Piece:
    found = dict(_fields(data))
    (score,) = struct.unpack("<f", _message(found.get(2, bytes(4))))
    return Piece(_message(found.get(1, b"")).decode(), score, Kind(_number(found.get(3, Kind.NORMAL))))


def _trainer(model: SentencePieceModel, data: bytes) -> None:
    found = dict(_fields(data))
    model.model_type = _number(found.get(3, UNIGRAM))
    model.suffix = bool(found.get(24, False))
    model.byte_fallback = bool(found.get(35, False))


def _normalizer(model: SentencePieceModel, data: bytes) -> None:
    found = dict(_fields(data))
    model.normalization = _message(found.get(1, b"")).decode()
    model.charsmap = _message(found.get(2, b""))
    model.dummy_prefix = bool(found.get(3, True))
    model.strip = bool(found.get(4, True))
    model.escape = bool(found.get(5, True))


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes are due")
    return value


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number is due")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """A protobuf message's fields in order: number → integer, or bytes (of a string, a message, a fixed number)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"no wire type: {wire}")
        if at + size > len(data):
            raise ValueError("truncated")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
