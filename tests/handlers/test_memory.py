from pathlib import Path
from types import SimpleNamespace

import pytest

from handlers import memory


@pytest.mark.parametrize(
    ("most", "expected"), [("1000", 1000 - 700 + 50), ("max", 5000), ("90000", 5000), ("600", 0), (None, 5000)]
)
def test_memory_stays_within_what_is_free_and_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str | None, expected: int
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    if most is not None:
        (tmp_path / "memory.max").write_text(f"{most}\n")
        (tmp_path / "memory.current").write_text("700\n")
        (tmp_path / "memory.stat").write_text("anon 600\nfile 100\ninactive_file 50\n")
    assert memory.available() == expected
