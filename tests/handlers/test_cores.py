import os
from pathlib import Path

import pytest

from handlers import cores


def test_cores_stay_within_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= cores.cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for text, expected in (("150000 100000", 2), ("max 100000", 8), ("50000 100000", 1), ("9900000 100000", 8)):
        monkeypatch.setattr(Path, "read_text", lambda self, encoding, text=text: text)
        assert cores.cores() == expected


def test_spinning_is_bounded_unless_the_environment_says_how_long() -> None:
    assert cores.spinning({"A": "b"}) == {"GOMP_SPINCOUNT": "2000"}
    for said in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        assert cores.spinning(said) == {}
