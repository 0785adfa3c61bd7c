"""Reads a deployment: files, archives, log and machine. The live server is read by the command, with its client."""

import os
from dataclasses import replace
from pathlib import Path

from scripts.lib.diagnosis import archives, host, logfile, properties_file
from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.settings import properties
from scripts.lib.errors import UserError

#: Where config.properties is when nobody says: written by `batchserve configure`, or TorchServe's own default.
USUAL_PLACES = (Path("config/config.properties"), Path("config.properties"))


def gather(ts_config: Path | None, model_store: Path | None, log: Path | None, *, local: bool) -> Deployment:
    """Read what was named.

    Args:
        ts_config: a config.properties.
        model_store: the model store; None: the one that the file names.
        log: the server's log.
        local: whether the server runs on this machine.

    Raises:
        UserError: something named cannot be read. An archive that cannot is in the result.
    """
    deployment = Deployment(
        file=properties_file.read(ts_config) if ts_config else None,
        store_argument=model_store,
        environment=dict(os.environ),
        log=logfile.read_log(log) if log else None,
        host=host.this_host() if local else None,
        snapshots=host.snapshots([Path(), ts_config.parent] if ts_config else [], log),
    )
    named = properties(deployment).get("model_store")
    if named is None or not str(named.value):
        return deployment
    try:
        found, unreadable, others = archives.read_store(Path(str(named.value)))
    except UserError as error:
        if model_store is not None:
            raise
        return replace(deployment, store_fault=str(error))  # perhaps the file is another machine's
    return replace(deployment, archives=found, unreadable=unreadable, passed_over=others)
