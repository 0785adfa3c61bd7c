"""The yardstick runs in a process of its own, answers what was asked, and never outlives its context."""

from pathlib import Path

import psutil
import pytest

from scripts.lib.offline import Offline, OfflineError

pytest.importorskip("sentence_transformers")


def test_it_measures_and_ends(tiny_model: Path) -> None:
    with Offline(tiny_model, "float32", threads=1) as offline:
        pid = offline.pid
        assert offline.run(["one text", "another"] * 5) > 0
        single = offline.single(["one text", "another"])
        assert single.forward_ms > 0
        assert single.encode_ms > 0
        one, other, again = offline.values(["one text", "something else entirely", "one text"])
        assert one == pytest.approx(again, abs=1e-6)
        assert one != pytest.approx(other, abs=1e-3)
        assert sum(x * x for x in one) == pytest.approx(1.0, abs=1e-5)
    assert not psutil.pid_exists(pid)
    with pytest.raises(OfflineError, match="isn't running"):
        offline.run(["late"])


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(OfflineError, match="could not load the model"), Offline(tmp_path, "float32", threads=1):
        pytest.fail("entered without a model")
