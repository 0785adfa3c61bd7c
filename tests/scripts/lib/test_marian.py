"""Marian's fast tokenizer. Oracle: transformers' own MarianTokenizer, which runs the sentencepiece package."""

import json
import shutil
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from handlers.tokens import Encoding, Text, Tokens
from scripts.lib import marian
from scripts.lib.errors import UserError
from tests.corpus import SENTENCES
from tests.opus import CODES, FOREIGN, tokenizer_files, unigram

pytest.importorskip("sentencepiece", reason="trains models and is the oracle: pip install sentencepiece protobuf")
pytest.importorskip("google.protobuf", reason="transformers reads models with it: pip install sentencepiece protobuf")

TEXTS = [
    *SENTENCES[:20], *FOREIGN[:5], "", " ", "x", "  two  spaces ", "lines\nand\r\nmore\t.", "▁a ▁ b▁", "▁",
    ">>fra<< the cat", ">>fra<<the cat >>fra<<", ">>deu_Latn<<", ">>xyz<< the cat", ">>xyz<<>>fra<< the cat",
    ">>fra<<>>fra<< a", ">>fra<<☃ a", " >>fra<< the cat", ">>fra the cat", ">><< a", "the</s>cat</s> >>fra<< c",
    "</s>>>fra<<c", "<pad> <unk>a<s>", "ø", "øø ø aøb", "☃☃ ☃ø", "\ue000 \ue001>>fra<<\ue002\ue003 \ue004a", "\x01 a",
    "e\u0323\u0302 ﬁ ½ ｶﾞ か\u3099 \u1100\u1161\u11a8 ①\u0301 a\u00a0\u0301b", "🇩🇪👩\u200d👩 ™\ufe0f", "\u0301a",
]  # fmt: skip


class Both:
    """The slow tokenizer of `directory` and the worker's reading of what is made of it."""

    def __init__(self, directory: Path, made: Path) -> None:
        files = {path.name: path for path in directory.iterdir() if path.is_file()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sacremoses, which tokenizing does not use
            from transformers import MarianTokenizer

            self.slow = MarianTokenizer.from_pretrained(directory)
        marian.convert(files, made)
        self.fast = AutoTokenizer.from_pretrained(made)
        self.size = len(json.loads((directory / "vocab.json").read_text()))
        self.tokens = Tokens(self.fast, 100_000, rows=self.size)

    def ids(self, text: str) -> list[int]:
        (found,) = self.tokens.encode([Text(text)])
        assert isinstance(found, list), found
        encoding: Encoding = found[0]
        return encoding.ids

    def expected(self, text: str) -> list[int]:
        found: list[int] = self.slow(text).input_ids
        return found


@pytest.fixture(scope="module")
def opus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_files(tmp_path_factory.mktemp("opus"))


@pytest.fixture(scope="module")
def both(opus: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(opus, tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_marians_own_tokenizer(both: Both, text: str) -> None:
    assert both.ids(text) == both.expected(text)


def ordered(text: str) -> bool:
    """Whether canonical normalisation leaves the order of the marks as it is."""
    classes = [unicodedata.combining(character) for character in unicodedata.normalize("NFKD", text)]
    apart = [unicodedata.combining(c) for character in text for c in unicodedata.normalize("NFKD", character)]
    return classes == apart and "\u0344" not in text


assigned = st.characters(exclude_categories=("Cs", "Cn"))
words = st.lists(st.sampled_from(" ".join([*SENTENCES, *FOREIGN[:20]]).split()), max_size=8).map(" ".join)
pieces = st.one_of(words, st.text(assigned, max_size=6), st.sampled_from([*CODES, ">>xyz<<", "</s>", "▁", "ø", "  "]))


@settings(deadline=None, max_examples=250)
@given(st.lists(pieces, max_size=5).map("".join).filter(ordered))
def test_any_text_is_tokenized_alike(both: Both, text: str) -> None:
    assert both.ids(text) == both.expected(text)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_ids_are_decoded_alike(both: Both, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, both.size - 1), max_size=20))
    assert both.fast.decode(ids, skip_special_tokens=True) == both.slow.decode(ids, skip_special_tokens=True)


def test_the_vocabulary_is_the_models(both: Both, opus: Path) -> None:
    table = json.loads((opus / "vocab.json").read_text())
    assert both.tokens.vocabulary == len(table)
    unknown = [piece for piece in both.fast.get_vocab() if both.fast.get_vocab()[piece] >= len(table)]
    assert unknown, "the source has pieces that the model was trained without"
    assert both.fast.unk_token_id in both.ids(" ".join(unknown))
    for role in ("eos_token", "unk_token", "pad_token"):
        assert getattr(both.fast, f"{role}_id") == table[getattr(both.slow, role)]
    assert both.fast.model_max_length == 64


@pytest.mark.parametrize("name", ["identity", "nfkc_cf"])
def test_normalisation_is_the_source_models(name: str, tmp_path: Path) -> None:
    directory = tokenizer_files(tmp_path / "opus", codes=(), normalization_rule_name=name)
    made = tmp_path / "made"
    made.mkdir()
    both = Both(directory, made)
    for text in [*TEXTS, "THE Cat ÄẞSS"]:
        if name != "identity" or "\u00a0" not in text:
            assert both.ids(text) == both.expected(text)


def test_a_piece_of_spaces_alone_or_across_words_is_found(tmp_path: Path) -> None:
    """Then words can't be taken one by one."""
    directory = tokenizer_files(tmp_path / "opus", split_by_whitespace=False, vocab_size=500)
    made = tmp_path / "made"
    made.mkdir()
    both = Both(directory, made)
    assert any("▁" in piece[1:] for piece in both.fast.get_vocab())
    for text in TEXTS:
        assert both.ids(text) == both.expected(text)


def _cut(directory: Path) -> None:
    data = (directory / "source.spm").read_bytes()
    (directory / "source.spm").write_bytes(data[: len(data) // 2])


def _table(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "vocab.json"
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return apply


def _config(**entries: Any) -> Callable[[Path], None]:
    return lambda directory: (directory / "tokenizer_config.json").write_text(json.dumps(entries)) and None


def _source(**options: Any) -> Callable[[Path], None]:
    return lambda directory: (directory / "source.spm").write_bytes(unigram(list(SENTENCES), **options)) and None


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_cut, "no SentencePiece model"),
        (_table(lambda table: table.update({"more": 100_000})), "not 0, 1, 2"),
        (_table(lambda table: table.pop("<pad>")), "lacks the token '<pad>'"),
        (lambda directory: (directory / "vocab.json").write_text("[]") and None, "no vocabulary"),
        (_config(separate_vocabs=True), "a vocabulary each"),
        (_config(added_tokens_decoder={"9999": {"content": "<new>"}}), "lacks the token '<new>'"),
        (_source(model_type="bpe"), "no unigram model"),
        (_source(byte_fallback=True, vocab_size=600), "falls back to bytes"),
        (_source(add_dummy_prefix=False), "spaces"),
        (_source(user_defined_symbols=["<sep>"]), "symbols that its user defined"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    opus: Path, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    directory = tmp_path / "opus"
    shutil.copytree(opus, directory)
    spoil(directory)
    with pytest.raises(UserError, match=why):
        marian.convert({path.name: path for path in directory.iterdir()}, tmp_path)
