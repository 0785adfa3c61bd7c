import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from transformers.utils.logging import is_progress_bar_enabled

from scripts.lib import profiling, service
from scripts.lib.errors import UserError
from scripts.lib.loaded import loaded
from scripts.lib.profiling import Texts, Worker, profile, token_lengths
from tests.e2e.archives import ECHO, write_archive


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "SIZES", (1, 4))
    monkeypatch.setattr(profiling, "PER_SIZE", 3)
    monkeypatch.setattr(profiling, "POOL_REQUESTS", 12)


def silent(label: str) -> AbstractContextManager[None]:
    return nullcontext()


def test_loading_leaves_the_process_as_it_was(tiny_archive: Path) -> None:
    before = Path.cwd(), list(sys.path), sys.modules["handlers.batching"]
    with loaded(tiny_archive) as running:
        assert sys.modules["handlers.batching"] is not before[2], "the archive's own code runs"
        home = Path.cwd()
        answer = service.predict(running, [service.Body(b'{"text": "the cat"}')])[0]
        assert answer.status == 200
    assert (Path.cwd(), sys.path, sys.modules["handlers.batching"]) == before
    assert not home.exists()


def test_a_profile_tells_what_ran(tiny_archive: Path) -> None:
    found = profile(tiny_archive, Texts("mixed"), threads=1, progress=silent)
    assert (found.archive, found.task, found.device, found.dtype) == ("tiny.mar", "embedding", "cpu", "float32")
    assert found.threads == 1
    assert found.packed
    assert found.micro_batch_tokens == 1024
    assert len(found.requests) == 12
    assert max(max(lengths) for lengths in found.requests) == found.max_tokens == 48, "longer texts are cut"
    assert len(found.rates) == 1
    assert found.rates[0].seconds(4, 500) > 0


def test_two_workers_are_measured_beside_each_other(
    tiny_archive: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_archive.parent)
    children = set(psutil.Process().children())
    found = profile(Path(tiny_archive.name), Texts("short"), workers=2, progress=silent)
    assert len(found.rates) == 2
    left = set(psutil.Process().children()) - children
    assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]  # Python's own may stay
    assert capfd.readouterr() == ("", ""), "the second one has a process of its own, which is new to everything"


def test_a_second_worker_that_fails_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="does not load"), profiling._neighbour(tmp_path / "gone.mar", [], 1, False):
        pytest.fail("there is none")
    assert f"There is no archive {tmp_path / 'gone.mar'}" in capfd.readouterr().err


def test_loading_hides_progress_bars_and_nothing_that_a_handler_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says = """
        import logging
        from transformers.utils.logging import is_progress_bar_enabled
        logging.getLogger("mine").warning("progress bars: %s", is_progress_bar_enabled())
        logging.getLogger("ts.torch_handler.base_handler").warning("the model was not compiled")
        """
    archive = write_archive(tmp_path / "talks.mar", source=ECHO.replace("        self.where = os.getcwd()", says))
    assert is_progress_bar_enabled()
    with loaded(archive):
        assert is_progress_bar_enabled()
    assert caplog.messages == ["progress bars: False", "the model was not compiled"]
    fails = ECHO.replace("self.where = os.getcwd()", 'raise ValueError("no weights")')
    with (
        pytest.raises(UserError, match="does not load: ValueError: no weights"),
        loaded(write_archive(tmp_path / "fails.mar", source=fails)),
    ):
        pytest.fail("it is not loaded")
    assert is_progress_bar_enabled()


def test_lengths_are_those_that_the_handler_reads(tiny_archive: Path) -> None:
    bodies = [{"text": "the cat"}, {"texts": ["a dog", "the old house is red"]}, "hello", {"text": "cat " * 100}]
    found = token_lengths(tiny_archive, [json.dumps(body).encode() for body in bodies])
    assert found == [(4,), (4, 7), (3,), (48,)]


def test_reading_lengths_leaves_the_handler_as_it_was(tiny_archive: Path) -> None:
    with loaded(tiny_archive) as running:
        worker = Worker(running)
        worker.lengths([b'{"text": "the cat"}'])
        assert service.predict(running, [service.Body(b'{"text": "the cat"}')])[0].json()["embedding"]
        with pytest.raises(UserError, match="Body 2 is refused"):
            worker.lengths([b'{"text": "the cat"}', b'{"texts": []}'])
        assert service.predict(running, [service.Body(b'{"text": "the cat"}')])[0].json()["embedding"]


def test_a_body_that_is_refused_is_named(tiny_archive: Path) -> None:
    with pytest.raises(UserError, match=r"Body 3 is refused: .*texts"):
        profile(tiny_archive, Texts(bodies=(b'"a"', b'"b"', b'{"texts": []}')), progress=silent)


def test_an_unknown_workload_is_refused(tiny_archive: Path) -> None:
    with pytest.raises(UserError, match="no workload wide for embedding"):
        profile(tiny_archive, Texts("wide"), progress=silent)


def test_foreign_handlers_are_refused() -> None:
    class Running:
        @staticmethod
        def _entry_point() -> None: ...

    with pytest.raises(UserError, match="not of this tool"):
        Worker(Running())
