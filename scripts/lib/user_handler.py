"""A handler file of the user's own: would TorchServe load the class that the user means?

TorchServe's loader takes a module-level function `handle` before any class, wants exactly one class defined in the
module, and hides an ImportError behind a search among its own handlers. So everything is checked before the file is
packed: first its text, then its import in a process of its own.
"""

import ast
import json
import keyword
import os
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

from scripts.lib.errors import UserError

_SECONDS = 120
_BASE = "handlers.base.TransformerHandler"

# Runs in the clean process. argv: directory that holds the file and the handlers package, module name.
_PROBE = """
import importlib, json, sys
directory, name = sys.argv[1:]
sys.path.insert(0, directory)
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__name__", "").lower()
                    and "editable" not in type(finder).__module__.lower()]
from ts.utils.util import list_classes_from_module
from handlers.base import TransformerHandler
module = importlib.import_module(name)
classes = list_classes_from_module(module)
print(json.dumps({
    "file": module.__file__,
    "classes": [kind.__name__ for kind in classes],
    "ours": [issubclass(kind, TransformerHandler) for kind in classes],
    "handle": hasattr(module, "handle"),
}))
"""


def check_text(path: Path) -> str:
    """Check a handler file without running it, and return its module's name.

    Raises:
        UserError: it isn't there, isn't Python, has a name that can't be imported or means another module, defines no
            class or several, or a function `handle`.
    """
    if not path.is_file():
        raise UserError(f"there is no handler file {path}", "check --handler")
    module = path.stem
    if path.suffix != ".py" or not module.isidentifier() or keyword.iskeyword(module) or not module.isascii():
        raise UserError(f"{path.name} can't be imported", "a handler's file is named like my_handler.py")
    if taken := _taken(module):
        raise UserError(f"{path.name} has the name of {taken}", "rename the file, e.g. my_handler.py")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{path}{line}: {getattr(error, 'msg', error)}", "correct the file") from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    _judge(path, classes, any(_defines_handle(node) for node in tree.body))
    return module


def _taken(module: str) -> str:
    """What else is imported under this name in a worker; "" for nothing."""
    if module in ("handlers", "model"):
        return "a part of the archive"
    if module in sys.stdlib_module_names:
        return "a module of Python"
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if PathFinder.find_spec(module, folders) is not None:
        return "an installed package"
    if any((Path(folder) / "ts" / "torch_handler" / f"{module}.py").exists() for folder in folders):
        return "a handler of TorchServe's own"
    return ""


def _defines_handle(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == "handle"
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "handle" for target in targets)


def _judge(path: Path, classes: list[str], handle: bool) -> None:
    """Raise UserError unless there is one class and no function `handle`."""
    if handle:
        raise UserError(
            f"{path.name} has a function `handle`, which TorchServe would call instead of your class", "rename it"
        )
    if len(classes) > 1:
        raise UserError(
            f"{path.name} defines the classes {', '.join(classes)}; TorchServe wants exactly one",
            "move the others into the handler's class",
        )
    if not classes:
        raise UserError(
            f"{path.name} defines no class (imported ones don't count)",
            "define one subclass, as class MyHandler(EmbeddingHandler)",
        )


def check_import(directory: Path, module: str) -> None:
    """Import the module in a process that knows nothing but `directory` and what is installed, as a worker would.

    Args:
        directory: holds MODULE.py and the handlers package.
        module: the module's name.

    Raises:
        UserError: the import fails (the error is shown), or the module isn't one subclass of our handlers.
    """
    path = directory / f"{module}.py"
    # -I: neither PYTHONPATH nor the current directory
    command = [sys.executable, "-I", "-B", "-c", _PROBE, str(directory), module]
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"importing {path.name} takes more than {_SECONDS} s", "move that work into initialize"
        ) from error
    if done.returncode != 0:
        raise UserError(f"{path.name} can't be imported:\n{done.stderr.strip()}", "a worker would fail the same way")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if Path(found["file"]).resolve() != path.resolve():
        raise UserError(f"`import {module}` finds {found['file']} instead of your file", "rename it")
    _judge(path, found["classes"], found["handle"])
    if not found["ours"][0]:
        raise UserError(
            f"{path.name}: {found['classes'][0]} is no subclass of {_BASE}",
            "derive it from one of ours: from handlers.embedding import EmbeddingHandler",
        )


def clean_environment(temporary: Path | None = None) -> dict[str, str]:
    """The environment of a process that must not see this checkout; `temporary` becomes its temporary directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    if temporary is not None:
        kept |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    return kept
