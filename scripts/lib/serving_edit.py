"""Changes to a serving.yaml that keep its comments, its order and its quotation marks."""

import io
import os
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML

from scripts.lib.errors import UserError
from scripts.lib.serving import Serving

_WIDE = 4096  # columns: long lines stay lines


def change_model(path: Path, name: str, values: Mapping[str, str | int]) -> None:
    """Set keys of a model's entry, and write the file, whole or not at all.

    Args:
        path: the serving.yaml, which must declare the model.
        name: of the model.
        values: keys of its entry.

    Raises:
        UserError: the file can't be read or written, or would not be valid afterwards.
    """
    declared = Serving.load(path)
    if name not in declared.models:
        raise UserError(f"{path} declares no model {name} (it has {', '.join(declared.models)})")
    text = path.read_bytes().decode("utf-8")
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDE
    document = yaml.load(text)
    entry = document["models"][name]
    for key, value in values.items():
        if key in entry:
            entry[key] = value
        else:  # at the end it would stand below comments that are not of this entry
            entry.insert(1, key, value)
    Serving.from_mapping(document, str(path))
    written = io.StringIO()
    yaml.dump(document, written)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(written.getvalue(), encoding="utf-8")
        partial.chmod(path.stat().st_mode & 0o777)
        partial.replace(path.resolve())
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
