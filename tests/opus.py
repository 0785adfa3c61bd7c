"""A tiny Marian checkpoint as opus-mt ships it: source.spm, target.spm, vocab.json and no tokenizer.json."""

import io
import json
import random
from pathlib import Path
from typing import Any

from tests.corpus import SENTENCES
from tests.models import write_json

CODES = (">>fra<<", ">>deu_Latn<<")
# The "foreign" language: the same sentences, every word reversed and in other letters
_OTHER = str.maketrans("aeiou", "äéîøü")
FOREIGN = [" ".join(word[::-1].translate(_OTHER) for word in sentence.split()) for sentence in SENTENCES]


def unigram(texts: list[str], **settings: Any) -> bytes:
    """A trained SentencePiece model, serialised. Needs the sentencepiece package."""
    import sentencepiece

    written = io.BytesIO()
    settings = {"vocab_size": 300, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2} | settings
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=written, **settings)
    return written.getvalue()


def tokenizer_files(directory: Path, *, codes: tuple[str, ...] = CODES, **settings: Any) -> Path:
    """Write source.spm, target.spm, vocab.json and tokenizer_config.json to `directory`, made if need be.

    As in opus-mt's, vocab.json's order is its own, `<pad>` is last, and some of the source's pieces are missing.
    """
    import sentencepiece

    directory.mkdir(parents=True, exist_ok=True)
    pieces: set[str] = set()
    for name, texts in (("source.spm", SENTENCES), ("target.spm", FOREIGN)):
        model = unigram(texts, **settings)
        (directory / name).write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces |= {processor.id_to_piece(index) for index in range(3, processor.get_piece_size())}
    shuffled = sorted(pieces)
    random.Random(0).shuffle(shuffled)
    kept = [piece for piece in shuffled if piece == "▁" or hash_of(piece) % 20]
    table = {piece: index for index, piece in enumerate(["</s>", "<unk>", *kept, *codes, "<pad>"])}
    (directory / "vocab.json").write_text(json.dumps(table), encoding="utf-8")
    write_json(directory / "tokenizer_config.json", {"source_lang": "en", "target_lang": "fr", "model_max_length": 64})
    return directory


def hash_of(piece: str) -> int:
    """The same in every process."""
    return sum(index * ord(character) for index, character in enumerate(piece, 1))
