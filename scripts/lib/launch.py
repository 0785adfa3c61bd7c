"""How TorchServe's Java process is started: its command line, its environment, its scratch directory."""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from handlers.cores import spinning
from scripts.lib import properties as props
from scripts.lib.serving import LOG_ARGUMENT
from scripts.lib.state import SCRATCH_PREFIX

LOG_CONFIG = props.REPOSITORY / "config" / "log4j2.xml"


def command(java: Path, scratch: Path, path: Path, properties: Mapping[str, str], model_store: Path) -> list[str]:
    """The command that TorchServe's own launcher would run, with our log configuration and temporary directory.

    Args:
        java: the program.
        scratch: where sockets and extracted archives go.
        path, properties: config.properties and what it says.
        model_store: directory of archives.
    """
    import ts

    home = Path(ts.__file__).resolve().parents[1]
    vm_args = properties.get("vmargs", "").split()
    if not any(argument.startswith(LOG_ARGUMENT) for argument in vm_args):
        vm_args.append(LOG_ARGUMENT + LOG_CONFIG.as_uri())
    return [
        str(java),
        f"-Dmodel_server_home={home}",
        f"-Djava.io.tmpdir={scratch}",
        *vm_args,
        "-cp",
        f".:{home}/ts/frontend/*",
        "org.pytorch.serve.ModelServer",
        "--python",
        sys.executable,
        "-f",
        str(path),
        "-s",
        str(model_store),
        "-ncs",
    ]


def environment(scratch: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would change the server's files or code, and `extra` on top."""
    # TS_CONFIG_FILE would replace our file, PYTHONPATH would shadow the code inside the archives.
    unwanted = ("PYTHONPATH", "PYTHONHOME", "LOG_LOCATION", "METRICS_LOCATION")
    env = {key: value for key, value in os.environ.items() if not key.startswith("TS_") and key not in unwanted}
    env.update(TMPDIR=str(scratch), TEMP=str(scratch), TMP=str(scratch))
    if "UTF-8" not in (env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or "").upper():
        # Java takes the encoding of file names from the locale.
        env["LC_ALL"] = "C.UTF-8"
    env.update(extra)
    return {**env, **spinning(env)}


def scratch_directory() -> Path:
    """A new directory for sockets and extracted archives, on a path short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    if len(os.fsencode(directory)) > 80 and Path("/tmp").is_dir():
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir="/tmp"))
    return directory
