"""scripts.lib.calibration: a file of texts → the vectors that an archive takes its ranges from."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import load
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from handlers.quantization import VECTORS
from scripts.build import build
from scripts.lib import archive, calibration
from scripts.lib.errors import UserError
from tests.corpus import SENTENCES
from tests.families import family
from tests.models import tiny_bert

TEXTS = [*SENTENCES[:20], "a dog runs in the old house " * 20]
APP = typer.Typer(pretty_exceptions_enable=False)
APP.command()(build)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(APP, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_texts_are_lines(tmp_path: Path, mark: str) -> None:
    (tmp_path / "t.txt").write_bytes(f"{mark}the cat\r\n\n  a dog\u2028runs\n \n".encode())
    assert calibration.read(tmp_path / "t.txt") == ["the cat", "  a dog\u2028runs"]


def test_files_that_do_not_do(tmp_path: Path) -> None:
    for content in (b"", b"one", b"a\n" * (calibration.MOST + 1), b"\xff\xfe\x00"):
        (tmp_path / "t.txt").write_bytes(content)
        with pytest.raises(UserError, match=r"t\.txt (holds \d+ texts|can't be read)"):
            calibration.read(tmp_path / "t.txt")
    with pytest.raises(UserError, match="can't be read"):
        calibration.read(tmp_path / "none.txt")


def test_only_embeddings_are_calibrated(tmp_path: Path) -> None:
    model = family(tmp_path / "m", "bert", head="sequence-classification")
    (tmp_path / "t.txt").write_text("a\nb")
    with pytest.raises(UserError, match="--calibrate is for embeddings"):
        run(model, "--name", "m", "--store", tmp_path / "store", "--calibrate", tmp_path / "t.txt")


@pytest.mark.usefixtures("unverified")
def test_a_build_keeps_the_vectors_before_they_are_cut_and_normalised(tmp_path: Path) -> None:
    model = tiny_bert(tmp_path / "m", prompts={"query": "query: "}, default_prompt_name="query")
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    output = run(model, "--name", "m", "--store", tmp_path / "store", "--calibrate", tmp_path / "t.txt")
    assert "calibrated with 21 texts" in output
    path = tmp_path / "store" / "m.mar"
    settings = archive.read(path).settings
    with archive.opened(path) as content:
        found = load(content.read(settings["calibration"]))[VECTORS]
    oracle = SentenceTransformer(str(model), device="cpu")
    plain = SentenceTransformer(modules=list(oracle)[:2], device="cpu")
    np.testing.assert_allclose(found, plain.encode(TEXTS, prompt="query: "), rtol=0, atol=1e-5)


def test_no_command_waits_for_torch() -> None:
    program = (
        "import sys; from scripts.__main__ import app; app(['--help'], standalone_mode=False); "
        "sys.exit('scripts.bench' not in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).resolve().parents[3], check=True)
