import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from handlers import threads


def test_workers_are_the_frontends_children(tmp_path: Path) -> None:
    """A parent with three workers: each sees three; another process of the parent's does not count."""
    worker = tmp_path / "model_service_worker.py"
    checkout = Path(threads.__file__).parents[1]
    worker.write_text(
        f"import sys, time\nsys.path.insert(0, {str(checkout)!r})\nfrom handlers.threads import workers\n"
        "time.sleep(float(sys.argv[1])); print(workers(), flush=True); time.sleep(30)\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"ps = [subprocess.Popen([sys.executable, {str(worker)!r}, d], stdout=subprocess.PIPE) for d in '022']\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])\n"
        "print([int(p.stdout.readline()) for p in ps[1:]], flush=True)\n"
        "[p.kill() for p in [*ps, other]]\n"
    )
    result = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[3, 3]"


def test_threads_follow_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "workers", lambda: 1)
    try:
        share = threads.Threads(None)
        assert torch.get_num_threads() == 4
        monkeypatch.setattr(threads, "workers", lambda: 3)
        share.follow()
        assert torch.get_num_threads() == 4, "the last count is fresh"
        now = time.monotonic() + threads.INTERVAL + 1
        monkeypatch.setattr(threads.time, "monotonic", lambda: now)
        share.follow()
        assert torch.get_num_threads() == share.count == 1
        assert threads.Threads(2).count == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
