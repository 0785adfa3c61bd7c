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


def checkpoint(directory: Path, **settings: Any) -> Path:
    """`tokenizer_files`, and a model of 1 + 1 layers with random weights."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    tokenizer_files(directory, **settings)
    size = len(json.loads((directory / "vocab.json").read_text(encoding="utf-8")))
    config = MarianConfig(
        vocab_size=size, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, init_std=0.5,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        pad_token_id=size - 1, eos_token_id=0, forced_eos_token_id=0, decoder_start_token_id=size - 1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MarianMTModel(config).eval()
    model.generation_config.update(max_length=16, num_beams=2, no_repeat_ngram_size=2, bad_words_ids=[[size - 1]])
    model.save_pretrained(directory)
    return directory


def hash_of(piece: str) -> int:
    """The same in every process."""
    return sum(index * ord(character) for index, character in enumerate(piece, 1))
