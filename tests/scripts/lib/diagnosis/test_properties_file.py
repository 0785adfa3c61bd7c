"""config.properties kept as it stands."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.diagnosis import properties_file
from scripts.lib.diagnosis.properties_file import parse
from scripts.lib.errors import UserError
from scripts.lib.properties import loads

PATH = Path("config.properties")
CUT = """a=1
models={
  # the first
  "m": {\\
    "1.0": {"batchSize": 8}\\\x20
  }
}
b=2
"""


@given(st.text(st.characters(max_codepoint=255), max_size=80) | st.text(st.sampled_from("a=: \\\r\n#!"), max_size=30))
def test_the_text_is_kept_and_read_as_java_does(text: str) -> None:
    try:
        file = parse(PATH, text)
    except UserError:
        return
    assert file.text == text
    assert {entry.key: entry.value for entry in file.entries} == loads(text)
    assert all(entry.source in text for entry in file.own)


def test_lines_are_counted_through_continuations_and_every_line_end() -> None:
    file = parse(PATH, "# c\r\na=1 \\\r\n  2\rb=3\n\nc=4")
    assert [(entry.key, entry.value, entry.line) for entry in file.entries] == [
        ("a", "1 2", 2),
        ("b", "3", 4),
        ("c", "4", 6),
    ]


def test_a_cut_models_is_put_together() -> None:
    cut = parse(PATH, CUT).rejoined
    assert cut is not None
    assert (cut.first, cut.last, cut.comments) == (2, 7, ("  # the first",))
    assert json.loads(cut.value) == {"m": {"1.0": {"batchSize": 8}}}
    assert [entry.key for entry in parse(PATH, CUT).own] == ["a", "models", "b"]


@pytest.mark.parametrize(
    "text", ["a=1\n", 'models={"m":{}}\nb=2\n', "models={\nb=2\n", "models={\n}\n", "models=}{\n}"]
)
def test_nothing_is_put_together_where_nothing_is_cut(text: str) -> None:
    assert parse(PATH, text).rejoined is None


@pytest.mark.parametrize("kind", ["missing", "directory", "escape", "long"])
def test_what_cannot_be_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.properties"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_text("a=\\u12" if kind == "escape" else "# long")
    if kind == "long":
        monkeypatch.setattr(properties_file, "_MOST_BYTES", 3)
    with pytest.raises(UserError, match=r"config\.properties"):
        properties_file.read(path)


def test_writing_keeps_permissions_links_and_leaves_no_rest(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "config.properties"
    real.write_bytes(b"a=\xe9\r\n")
    real.chmod(0o640)
    link.symlink_to(real)
    file = properties_file.read(link)
    properties_file.write(file.with_text(file.text + "b=2\r\n"))
    assert real.read_bytes() == b"a=\xe9\r\nb=2\r\n"
    assert real.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.properties", "real"]
