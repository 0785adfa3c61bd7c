"""Small archives of trivial handlers, so that tests of the server need no model."""

import json
import zipfile
from pathlib import Path

ECHO = """
import json, os, sys
from pathlib import Path

class Echo:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        self.where = os.getcwd()
        self.initialized = True

    def handle(self, rows, context):
        answer = {"batch": len(rows), "pid": os.getpid(), "path": sys.path,
                  "pythonpath": os.environ.get("PYTHONPATH", "")}
        return [json.dumps(answer).encode() for _ in rows]
"""

RAISES = """
class Broken:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        raise RuntimeError("the weights are not there")

    def handle(self, rows, context):
        return rows
"""

EXITS = RAISES.replace('raise RuntimeError("the weights are not there")', "__import__('os')._exit(3)")
IMPORTS = "import a_module_that_is_not_there\n" + ECHO
FAILS = ECHO.replace("answer = {", 'raise ValueError("cannot handle this")\n        answer = {')
SLOW = ECHO.replace("self.where = os.getcwd()", "__import__('time').sleep(600)")


def write_archive(
    path: Path,
    *,
    name: str = "echo",
    version: str = "1.0",
    source: str = ECHO,
    config: str | None = None,
    requirements: str | None = None,
) -> Path:
    """Write a .mar of one handler file; returns its path."""
    model = {"modelName": name, "modelVersion": version, "handler": "trivial_handler.py"}
    members = {"trivial_handler.py": source}
    if config is not None:
        model["configFile"] = "model-config.yaml"
        members["model-config.yaml"] = config
    if requirements is not None:
        model["requirementsFile"] = "requirements.txt"
        members["requirements.txt"] = requirements
    manifest = {"createdOn": "01/01/1980 00:00:00", "runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    members["MAR-INF/MANIFEST.json"] = json.dumps(manifest)
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return path
