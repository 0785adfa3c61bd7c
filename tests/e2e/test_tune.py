"""A tune of a tiny archive on a real TorchServe: interrupted, resumed, applied; nothing stays."""

import json
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import Result
from ruamel.yaml import YAML
from typer.testing import CliRunner

from scripts.__main__ import app
from scripts.lib import archive, profiling
from scripts.lib.serving import Serving
from scripts.lib.trials import Windows
from scripts.lib.tuner import Tuner
from scripts.lib.tuning import Point
from tests.e2e.conftest import serving_mapping

# A rate that any setting serves: the cheapest one is sought. One thread needs a variant of the archive.
WORDS = ("tune", "tiny", "--objective", "p95<=5s", "--rate", "60", "--budget", "10m", "--workers", "1")
SPACE = ("--threads", "1", "--batch-size", "4,8", "--max-batch-delay", "1", "--no-compare", "--apply")


def run() -> Result:
    return CliRunner().invoke(app, [*WORDS, *SPACE, "--serving", "serving.yaml", "--json", "out.json"])


def told() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path("out.json").read_bytes())
    return document


def test_a_tune_is_interrupted_resumed_and_applied(
    tmp_path: Path, tiny_archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("store", "scratch"):
        Path(name).mkdir()
    # As for a tiny budget, without the risk that a busy machine uses it up
    monkeypatch.setattr(Windows, "within", lambda _: Windows(search=1.0, final=2.0, quiet=1.0))
    monkeypatch.setattr(profiling, "SIZES", (1, 4))
    monkeypatch.setattr(profiling, "PER_SIZE", 3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    shutil.copyfile(tiny_archive, "store/tiny.mar")
    model = {"archive": "tiny.mar", "version": "1.0", "workers": 3, "batch_size": 32, "max_batch_delay": 9}
    with Path("serving.yaml").open("w") as file:
        file.write("# ours\n")
        YAML().dump(serving_mapping(Path("store"), {"tiny": model}), file)
    before, children, threads = (
        Path("serving.yaml").read_text(),
        set(psutil.Process().children()),
        torch.get_num_threads(),
    )

    # Ctrl-C when both settings have been served, one after the other by the same server
    keep = Tuner._keep

    def interrupt(tuner: Tuner, point: Point) -> None:
        keep(tuner, point)
        if len(tuner.state.points) == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Tuner, "_keep", interrupt)
        result = run()
    assert result.exit_code == 130, (result.output, result.exception)
    assert "run the same command again" in result.output
    assert Path("serving.yaml").read_text() == before
    interrupted = told()
    assert interrupted["interrupted"]
    kept = interrupted["points"]
    assert [(point["kind"], point["setting"]["batch_size"]) for point in kept] == [("search", 4), ("search", 8)]
    assert all(point["met"] and point["errors"] == point["shed"] == 0 for point in kept)

    result = run()
    assert result.exit_code == 0, (result.output, result.exception)
    found = told()
    assert found["points"][:2] == kept, "what was measured before is not measured again"
    assert [point["kind"] for point in found["points"][-2:]] == ["final", "quiet"]
    winner = found["outcome"]["winner"]
    assert winner["point"] == found["points"][-2]
    assert (winner["rate"], winner["point"]["met"], winner["point"]["errors"]) == (60, True, 0)
    assert winner["point"]["requests"] > 100
    assert 1 <= winner["point"]["batch_size"] <= winner["setting"]["batch_size"]
    assert found["outcome"]["quiet"]["p50_ms"] > 1, "the delay is in it"

    served = Serving.load(Path("serving.yaml")).models["tiny"]
    assert (served.workers, served.max_batch_delay, served.batch_size) == (1, 1, winner["setting"]["batch_size"])
    assert Path("serving.yaml").read_text().startswith("# ours\n")
    assert archive.read(Path("store") / served.archive).settings.get("threads") in (1, None)
    assert Path(".batchserve/tune/tiny.html").is_file()
    assert list(Path("scratch").iterdir()) == []
    deadline = time.monotonic() + 10
    while left := set(psutil.Process().children()) - children:
        if time.monotonic() > deadline:
            pytest.fail(f"left running: {left}")
        time.sleep(0.1)
    torch.set_num_threads(threads)
