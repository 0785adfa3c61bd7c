"""What a model's files say of it, for its card."""

import json
from pathlib import Path
from typing import Any


def origin(model: Path, archive: Path) -> dict[str, Any]:
    """What the model is and where it comes from.

    Args:
        model: directory of the model's files.
        archive: the extracted archive; one of ours tells what it was built from.

    Returns:
        `base_model` (as config.json names it), `source` (what the archive was built from), `model_type` and
        `architecture`, as far as they are known. A path of the machine that saved the model is not told.
    """
    config = _object(model / "config.json")
    name = str(config.get("_name_or_path") or "")
    local = name.startswith((".", "/", "~")) or "\\" in name or ":" in name
    found = {
        "base_model": "" if local else name,
        "source": _object(archive / "MAR-INF" / "PROVENANCE.json").get("source"),
        "model_type": config.get("model_type"),
        "architecture": next(iter(config.get("architectures") or []), None),
    }
    return {key: value for key, value in found.items() if value}


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
