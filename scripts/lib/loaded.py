"""An archive in this process, as a worker has it, for as long as it is needed."""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scripts.lib import archive, service
from scripts.lib.errors import UserError


@contextmanager
def loaded(path: Path, *, gpu_id: int | None = None) -> Iterator[Any]:
    """Extract an archive and load it with its own code; afterwards this process is as it was, but for torch's threads.

    Args:
        path: the .mar file.
        gpu_id: the CUDA device; None for the CPU.

    Returns:
        A `ts.service.Service`, for `service.predict`.

    Raises:
        UserError: there is no such file, or it does not load; the message has the handler's own words.
    """
    if not path.is_file():
        raise UserError(f"There is no archive {path}.", "Build one with: batchserve build MODEL --name NAME")
    before, entries = Path.cwd(), list(sys.path)
    # The commands have imported parts of this checkout's handlers: the archive's own must run
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "handlers"}
    with tempfile.TemporaryDirectory(prefix="batchserve-") as scratch:
        directory = Path(scratch).resolve()
        archive.extract(path.resolve(), directory)
        for name in ours:
            del sys.modules[name]
        try:
            try:
                with _without_chatter():
                    found = service.load(directory, gpu_id=gpu_id)
            except Exception as error:
                raise UserError(f"The archive does not load: {type(error).__name__}: {error}") from error
            yield found
        finally:
            os.chdir(before)
            sys.path[:] = entries
            for name in [name for name, module in list(sys.modules.items()) if _of(module, name, directory)]:
                del sys.modules[name]
            sys.modules.update(ours)


def _of(module: Any, name: str, directory: Path) -> bool:
    """Whether a module is of the archive that was extracted there."""
    file = getattr(module, "__file__", None)
    return name.partition(".")[0] == "handlers" or (isinstance(file, str) and directory in Path(file).parents)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Load without what TorchServe says of options that nobody chose, and without transformers' progress bars.

    What the handler, or TorchServe's own one in its place, says of the model is heard as ever.
    """
    from transformers.utils import logging as bars

    chatter = logging.getLogger("ts.torch_handler.base_handler")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with suppress(ImportError):  # then the handler's own import, if there is one, says so
            import ts.torch_handler.base_handler  # noqa: F401 - it warns when it is imported first, of what it lacks
    finally:
        chatter.setLevel(level)
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
