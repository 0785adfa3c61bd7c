"""Checkpoints with a SentencePiece model and no tokenizer.json: the one that is made has the same ids.

Oracle: transformers' tokenizer of the checkpoint itself.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, utils

from scripts.lib import weights
from scripts.lib.errors import UserError
from tests.corpus import SENTENCES
from tests.models import write_json
from tests.opus import unigram

MODEL = {"unk_id": 0, "bos_id": 1, "eos_id": 2}
PADDED = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ALBERT = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]}
DEBERTA = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
DEBERTA |= {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
# Family → the model's file, how it is trained, more of tokenizer_config.json
FAMILIES = {
    "t5": ("spiece.model", PADDED, {"tokenizer_class": "T5Tokenizer", "extra_ids": 100}),
    "pegasus": ("spiece.model", PADDED, {"tokenizer_class": "PegasusTokenizer"}),
    "mbart": ("sentencepiece.bpe.model", MODEL, {"tokenizer_class": "MBartTokenizer", "src_lang": "en_XX"}),
    "xlm-roberta": ("sentencepiece.bpe.model", MODEL, {}),
    "albert": ("spiece.model", ALBERT, {"tokenizer_class": "AlbertTokenizer", "do_lower_case": True}),
    "deberta-v2": ("spm.model", DEBERTA, {"tokenizer_class": "DebertaV2Tokenizer"}),
}
TEXTS = [*SENTENCES[:8], "", "  two  spaces ", "ünïcödé ☃ ①ﬁ", "a <extra_id_3> <mask>[MASK] b", "a\nb", "1,234,"]


def checkpoint(directory: Path, family: str) -> dict[str, Path]:
    file, settings, more = FAMILIES[family]
    directory.mkdir()
    (directory / file).write_bytes(unigram(list(SENTENCES), **settings))
    write_json(directory / "config.json", {"model_type": family})
    write_json(directory / "tokenizer_config.json", {"model_max_length": 64, **more})
    return {path.name: path for path in directory.iterdir()}


WITHOUT = """
import importlib.util, json, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("sentencepiece", "google") else find(name, *more)
from transformers import AutoTokenizer, utils
assert not utils.is_sentencepiece_available()
for directory in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    print(json.dumps([tokenizer(text).input_ids for text in json.loads(sys.argv[1])]))
assert "sentencepiece" not in sys.modules
"""


def test_ids_are_the_checkpoints_own_without_its_packages(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="trains models and converts them: pip install sentencepiece protobuf")
    pytest.importorskip("google.protobuf", reason="converts models: pip install sentencepiece protobuf")
    expected = []
    for family in FAMILIES:
        files = checkpoint(tmp_path / family, family)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / family, local_files_only=True)
        expected.append([tokenizer(text).input_ids for text in TEXTS])
        made = weights.tokenizer(files, tmp_path / family, tmp_path, trust_remote_code=False)
        assert list(made) == ["tokenizer.json"]
        made["tokenizer.json"].rename(tmp_path / family / "tokenizer.json")
    directories = [str(tmp_path / family) for family in FAMILIES]
    command = [sys.executable, "-c", WITHOUT, json.dumps(TEXTS), *directories]
    worker = subprocess.run(command, capture_output=True, text=True, check=False)
    assert worker.returncode == 0, worker.stderr
    found = [json.loads(line) for line in worker.stdout.splitlines()]
    for family, ids, own in zip(FAMILIES, found, expected, strict=True):
        assert ids == own, family


def test_packages_that_are_absent_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "spiece.model"
    model.write_bytes(b"")
    monkeypatch.setattr(utils, "is_protobuf_available", lambda: False)
    monkeypatch.setattr(utils, "is_sentencepiece_available", lambda: True)
    with pytest.raises(UserError, match=r"spiece\.model can't be converted without protobuf") as refused:
        weights.tokenizer({"spiece.model": model}, tmp_path, tmp_path, trust_remote_code=False)
    assert "pip install protobuf" in str(refused.value.hint)


def test_a_family_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="trains models: pip install sentencepiece protobuf")
    pytest.importorskip("google.protobuf", reason="converts models: pip install sentencepiece protobuf")
    (tmp_path / "sentencepiece.bpe.model").write_bytes(unigram(list(SENTENCES)))
    write_json(tmp_path / "vocab.json", {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁the": 4})
    write_json(tmp_path / "config.json", {"model_type": "m2m_100"})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"})
    files = {path.name: path for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="no fast tokenizer like M2M100Tokenizer"):
        weights.tokenizer(files, tmp_path, tmp_path, trust_remote_code=False)
