import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from handlers import parking

ME = str(os.getpid())


@pytest.fixture(autouse=True)
def frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the worker's parent was started in."""
    monkeypatch.setattr(psutil.Process, "cwd", lambda self: str(tmp_path))
    return tmp_path


def key_file(directory: Path, content: Any) -> None:
    (directory / "key_file.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 0.0),
        ({"x-batchserve-park": "1,2"}, 0.0),
        ({"x-batchserve-park": ME}, parking.LONGEST),
        ({"X-Batchserve-Park": f"1,{ME}", "x-batchserve-hold": "7"}, 7.0),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "1e9"}, parking.LONGEST),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "-1"}, 0.0),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "soon"}, 0.0),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "nan"}, 0.0),
        ({"x-batchserve-park": ",".join([ME, *map(str, range(100))])}, 0.0),
    ],
)
def test_who_is_asked_to_hold_and_for_how_long(headers: dict[str, str], expected: float) -> None:
    assert parking.seconds(headers) == expected


def test_where_there_are_tokens_only_the_management_apis_counts(frontend: Path) -> None:
    key_file(frontend, {"management": {"key": "secret"}, "inference": {"key": "other"}})
    for sent, expected in (("Bearer secret", 30.0), ("Bearer other", 0.0), ("secret", 0.0), (None, 0.0), ("é", 0.0)):
        assert parking.seconds({"x-batchserve-park": ME, "Authorization": sent}) == expected
    key_file(frontend, "not json")
    assert parking.seconds({"x-batchserve-park": ME, "Authorization": "Bearer secret"}) == 0.0
