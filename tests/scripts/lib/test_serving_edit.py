from pathlib import Path

import pytest

from scripts.lib.errors import UserError
from scripts.lib.serving import Serving
from scripts.lib.serving_edit import change_model

REPOSITORY = Path(__file__).resolve().parents[3]

TEXT = """\
# what we serve
models:
  m: {archive: "m.mar", version: '1.0'}   # short

  b:
    archive: b.mar        # the file
    version: "1"
    workers: 3            # processes
    # batch_size: 8

# the end
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "serving.yaml"
    path.write_text(TEXT)
    path.chmod(0o640)
    return path


def test_values_change_and_nothing_else(path: Path) -> None:
    change_model(path, "b", {"workers": 12, "archive": "b-2-threads.mar"})
    expected = TEXT.replace("workers: 3 ", "workers: 12").replace("b.mar        #", "b-2-threads.mar #")
    assert path.read_text().split() == expected.split()
    assert [line.split("#")[0].rstrip() for line in path.read_text().splitlines()] == [
        line.split("#")[0].rstrip() for line in expected.splitlines()
    ]
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_keys_that_were_not_there_stand_in_their_own_entry(path: Path) -> None:
    for name in ("m", "b"):
        change_model(path, name, {"workers": 2, "batch_size": 16, "max_batch_delay": 5})
    found = Serving.load(path).models
    for name in ("m", "b"):
        assert (found[name].workers, found[name].batch_size, found[name].max_batch_delay) == (2, 16, 5)
    text = path.read_text()
    assert text.index("# the end") > text.index("max_batch_delay: 5", text.index("  b:"))
    for comment in ("# what we serve", "# short", "# the file", "# processes", "# batch_size: 8"):
        assert comment in text


def test_the_repository_s_own_file_keeps_every_line(tmp_path: Path) -> None:
    path = tmp_path / "serving.yaml"
    text = (REPOSITORY / "config" / "serving.yaml").read_text()
    path.write_text(text)
    change_model(path, "minilm", {"batch_size": 8})
    changed = [(a, b) for a, b in zip(text.splitlines(), path.read_text().splitlines(), strict=True) if a != b]
    assert [(a.split()[:2], b.split()[:2]) for a, b in changed] == [(["batch_size:", "32"], ["batch_size:", "8"])]


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [("x", {"workers": 1}, "declares no model x"), ("b", {"workers": 2000}, "queue 1000 is smaller")],
)
def test_what_would_not_be_valid_is_not_written(path: Path, name: str, values: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        change_model(path, name, values)
    assert path.read_text() == TEXT
