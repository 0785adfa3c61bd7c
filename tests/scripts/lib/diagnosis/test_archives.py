"""Archives of all sorts, read without running anything."""

import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.lib.diagnosis.archives import handler_module, read_archive, read_store, weights
from scripts.lib.diagnosis.deployment import StoredArchive
from scripts.lib.errors import UserError
from tests.e2e.archives import write_archive


def test_a_foreign_archive(tmp_path: Path) -> None:
    source = (
        "import torch\ntorch.set_num_threads(1)\nraise SystemExit\ndef handle(data, context):\n    return [data[0]]\n"
    )
    path = write_archive(tmp_path / "a.mar", source=source, config="batchSize: 4\n", requirements="emoji\n# c\n")
    found = read_archive(path)
    assert found.archive.config == {"batchSize": 4}
    assert found.requirements == ("emoji", "# c")
    assert found.sets_threads
    assert found.handler is not None
    assert found.handler.first_row == 5


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("a.py", ("a.py", "handle")),
        ("a.py:entry", ("a.py", "entry")),
        ("handlers.embedding", ("handlers/embedding.py", "handle")),
        ("text_classifier", ("text_classifier.py", "handle")),
        ("", ("", "handle")),
    ],
)
def test_a_handlers_file(handler: str, expected: tuple[str, str]) -> None:
    assert handler_module(handler) == expected


def archive_with_handler(path: Path, handler: object) -> StoredArchive:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"modelName": "m", "handler": handler}}))
        file.writestr("model.pt", b"12345")
    return read_archive(path)


def test_torchserves_own_handler_is_looked_at(tmp_path: Path) -> None:
    found = archive_with_handler(tmp_path / "a.mar", "text_classifier")
    assert found.handler is not None
    assert found.handler.first_row is not None
    assert weights(found.archive) == 5
    assert found.version == "1.0"


@pytest.mark.parametrize("handler", ["gone.py", "../../etc/x", "sub.module", "", None, ["x"], 7])
def test_a_handler_that_is_nowhere(tmp_path: Path, handler: object) -> None:
    assert archive_with_handler(tmp_path / "a.mar", handler).handler is None


def test_a_store(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.mar")
    (tmp_path / "b.mar").write_bytes(b"no")
    (tmp_path / "README.md").touch()
    (tmp_path / ".hidden.mar").touch()
    (tmp_path / "c.tar.gz").touch()
    (tmp_path / "d" / "MAR-INF").mkdir(parents=True)
    (tmp_path / "d" / "MAR-INF" / "MANIFEST.json").touch()
    (tmp_path / "e.mar").mkdir()
    found, unreadable, others = read_store(tmp_path)
    assert list(found) == ["a.mar"]
    assert [one.path.name for one in unreadable] == ["b.mar", "e.mar"]
    assert others == ("c.tar.gz", "d")
    with pytest.raises(UserError, match="No such file"):
        read_store(tmp_path / "gone")


YAMLS = ["a: 2026-99-99", "? [a]\n: b", "&a [*a]", "a: !!python/object:os.x {}", "- 1", "[" * 3000, "\x00", "a: 1e999",
         "1: 2", "a: &b {c: *b}", "<<: 1",
         "a: &a [x, x]\nb: &b [*a, *a]\nbatchSize: *b"]  # fmt: skip


@pytest.mark.parametrize("text", YAMLS)
def test_odd_configurations(tmp_path: Path, text: str) -> None:
    try:
        read_archive(write_archive(tmp_path / "a.mar", config=text))
    except UserError as error:
        assert "a.mar" in str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.binary(max_size=100), st.integers(0, 10**6), st.binary(max_size=8))
def test_no_bytes_break_it(tmp_path: Path, noise: bytes, at: int, patch: bytes) -> None:
    whole = write_archive(tmp_path / "whole.mar", config="batchSize: 4\n").read_bytes()
    at %= len(whole)
    for content in (noise, whole[:at], whole[:at] + patch + whole[at + len(patch) :]):
        path = tmp_path / "a.mar"
        path.write_bytes(content)
        try:
            assert read_archive(path).file == "a.mar"
        except UserError as error:
            assert "a.mar" in str(error)
