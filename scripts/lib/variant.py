"""An archive with other settings of its handler: the same model, its checksums made anew."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from handlers.config import ConfigError, HandlerConfig
from scripts.lib import archive
from scripts.lib.archive import CONFIG, PROVENANCE, Archive
from scripts.lib.errors import UserError

_CHUNK = 1 << 20


def write(about: Archive, changes: Mapping[str, Any], path: Path) -> None:
    """Write the variant of an archive of ours.

    Args:
        about: the archive.
        changes: keys of the `handler:` section and their new values.
        path: of the variant; must not exist.

    Raises:
        UserError: the archive is not of ours, or its handler knows no such setting.
    """
    origin, config = about.provenance, dict(about.config)
    if origin is None or CONFIG not in about.sizes or "handler" not in config:
        raise UserError(f"{about.path} was not built by this tool: its settings can't be changed", "build it anew")
    settings = {**about.settings, **changes}
    try:
        HandlerConfig.from_mapping(settings)
    except ConfigError as error:
        raise UserError(str(error)) from error
    timeouts = {
        "response_timeout": config.pop("responseTimeout"),
        "startup_timeout": config.pop("startupTimeout"),
    }
    del config["handler"]
    replaced = {CONFIG: archive.model_config(settings, **timeouts, mode=config)}
    members = dict(origin["members"])
    changed = archive.measure(replaced)[CONFIG]
    members[CONFIG] = {"sha256": changed.sha256, "size": changed.size}
    replaced[PROVENANCE] = archive.sealed({**origin, "members": members})
    sizes = {**about.sizes, **{name: len(content) for name, content in replaced.items()}}
    with archive.opened(about.path) as source, path.open("xb") as file:

        def chunks(name: str) -> Iterable[bytes]:
            if name in replaced:
                yield replaced[name]
                return
            with source.open(name) as member:
                while chunk := member.read(_CHUNK):
                    yield chunk

        archive.pack(file, sizes, chunks)
