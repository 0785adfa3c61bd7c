"""The vectors of representative texts, from which an archive takes the ranges of int8 and uint8."""

import base64
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from handlers.quantization import VECTORS
from scripts.lib.archive import Content
from scripts.lib.errors import UserError
from scripts.lib.verification import answer_all

MEMBER = "calibration.safetensors"
FEW = 100  # texts below which ranges say little
MOST = 10_000  # texts; every worker holds their vectors
_AT_ONCE = 16  # texts in a request


def read(path: Path) -> list[str]:
    """The texts in a file, one a line; blank lines don't count.

    Raises:
        UserError: it cannot be read, or holds too few or too many.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}", "it holds texts in UTF-8, one a line") from error
    texts = [line.rstrip("\r") for line in lines if line.strip()]
    if not 2 <= len(texts) <= MOST:
        raise UserError(f"{path} holds {len(texts)} texts", f"some hundreds do; from 2 to {MOST} are taken")
    return texts


def member(texts: list[str], contents: Mapping[str, Content], work: Path) -> bytes:
    """What the archive's own handler makes of the texts, before it cuts and normalises: a safetensors file.

    Args:
        texts: representative of what will be embedded; its model's default prompt is put before them.
        contents: the archive's members, manifest and configuration among them.
        work: a directory of the build's own.

    Raises:
        UserError: the archive does not load, or refuses a text.
    """
    home = work / "calibrating"
    for name, content in contents.items():
        target = home / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        elif name.endswith(".py"):  # code must lie where the archive does; the weights may be large
            shutil.copyfile(content, target)
        else:
            target.symlink_to(content.resolve())
    temporary = work / "calibrating-tmp"
    temporary.mkdir()
    options = {"normalize": False, "encoding_format": "base64"}
    starts = range(0, len(texts), _AT_ONCE)
    answers = answer_all(home, temporary, [{"texts": texts[i : i + _AT_ONCE], **options} for i in starts])
    rows = []
    for start, answer in zip(starts, answers, strict=True):
        if answer["status"] != 200:
            raise UserError(
                f"the model refuses a text among those from {start + 1} on: {answer['body'].get('message')}",
                "take it out of the file",
            )
        rows += [np.frombuffer(base64.b64decode(coded), "<f4") for coded in answer["body"]["embeddings"]]
    shutil.rmtree(home)
    return save({VECTORS: np.stack(rows)})
