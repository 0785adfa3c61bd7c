"""What the demo says; that it runs is tested by scripts/quickstart.sh itself."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo import _short_json, describe_batches
from scripts.lib.errors import UserError
from scripts.lib.scrape import BatchingWindow

ROOT = Path(__file__).resolve().parents[2]


def window(batches: int, sizes: dict[float, int]) -> BatchingWindow:
    return BatchingWindow(64, 64, 900, 0, 0, batches, batches, sizes, {}, 0.0, 0.0, 0.0)


def test_batches_in_words() -> None:
    assert describe_batches(window(1, {64.0: 1})) == "1 batch served them (1 of 33–64 requests)"
    assert (
        describe_batches(window(7, {1.0: 1, 2.0: 2, 32.0: 3, math.inf: 1}))
        == "7 batches served them (1 of 1, 2 of 2, 3 of 17–32, 1 of over 128 requests)"
    )
    with pytest.raises(UserError, match="no batch"):
        describe_batches(window(0, {}))


def test_long_answers_are_cut_short() -> None:
    assert _short_json({"embedding": [0.5] * 384}) == '{"embedding": [0.5000, 0.5000, 0.5000, … 384 numbers]}'
    assert _short_json({"texts": ["a", "b" * 100]}) == f'{{"texts": ["a", "{"b" * 57}…"]}}'
    assert _short_json([[1, 2], None]) == "[[1, 2], None]"


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_the_scripts_have_help_and_no_syntax_errors(script: str, tmp_path: Path) -> None:
    path = ROOT / "scripts" / script
    for each in (path, ROOT / "scripts" / "environment.sh"):
        subprocess.run(["bash", "-n", each], check=True)
    done = subprocess.run(["bash", path, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"bash scripts/{script}" in done.stdout


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    """The environment script, in an empty directory, with an interpreter that says no."""
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", "-euc", f'source "{ROOT}/scripts/environment.sh"; environment ""'],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr


def test_a_directory_named_venv_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "mine").write_text("keep")
    done = subprocess.run(
        ["bash", "-euc", f'source "{ROOT}/scripts/environment.sh"; environment ""'],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no virtual environment" in done.stderr
    assert (tmp_path / ".venv" / "mine").read_text() == "keep"
