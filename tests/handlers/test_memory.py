import ctypes
import subprocess
import sys
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


_SECOND_BLOCK = """
import resource, threading
from handlers import memory
if {kept}:
    assert memory.keep_freed()
def second():
    block = b"x" * 2**24
    del block
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = b"x" * 2**24
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=second)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_is_not_asked_for_again_page_by_page() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for code in (_SECOND_BLOCK.format(kept=True), _SECOND_BLOCK.format(kept=False))
    )
    assert kept < 100
    assert given_back > 1000  # pages of 4 KiB: 4096 of them


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert memory.keep_freed.__wrapped__() is False


_HOLES = """
import ctypes, psutil
from handlers import memory
assert memory.keep_freed()
blocks = [(b"x" * 2**20, b"y" * 2**10) for _ in range(100)]
blocks = [small for _, small in blocks]
before = psutil.Process().memory_info().rss
memory.trim()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_holes_are_given_back_when_asked() -> None:
    told = subprocess.run([sys.executable, "-c", _HOLES], check=True, capture_output=True, text=True)
    assert int(told.stdout) > 50 * 2**20
