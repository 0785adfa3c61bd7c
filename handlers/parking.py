"""A worker steps aside before it is scaled away, so that nothing is running in it when TorchServe kills it.

TorchServe scales down by killing workers, whatever they are doing. But it also hands a describe request
(`GET /models/NAME/VERSION?customized=true`) to whichever worker comes next, alone, and a worker whose answer is marked
as unfinished gets no other work. So `batchserve scale` sends describe requests that name the workers to go; a worker
that is named answers at once, marked so, and then holds still until it is killed, with no request but that one in its
hands. When no kill comes it goes back to work after the seconds it was told.

An inference client may send the same headers. So they count only where a describe request has the batch for itself,
must name the worker's process id, and, where the server asks for tokens, must come with the management API's.
"""

import hmac
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

#: Process ids of the workers to hold, separated by commas. Lower case: TorchServe hands headers on as they were sent.
PARK_HEADER = "x-batchserve-park"
#: For how many seconds.
HOLD_HEADER = "x-batchserve-hold"

LONGEST = 30.0  # seconds
MOST_NAMED = 64  # process ids


def seconds(headers: Mapping[str, Any]) -> float:
    """For how long this worker is asked to hold still; 0.0 when it is not named or the headers make no sense."""
    headers = {name.lower(): value for name, value in headers.items()}
    named = str(headers.get(PARK_HEADER) or "").split(",")
    if len(named) > MOST_NAMED or str(os.getpid()) not in named or not _authorised(headers.get("authorization")):
        return 0.0
    try:
        wanted = float(headers.get(HOLD_HEADER) or LONGEST)
    except ValueError:
        return 0.0
    return min(wanted, LONGEST) if wanted > 0 else 0.0


def _authorised(authorization: Any) -> bool:
    """Whether the request came with the management API's key, which TorchServe writes where it was started."""
    try:
        frontend = psutil.Process().parent()
        text = (Path(frontend.cwd()) / "key_file.json").read_text(encoding="utf-8") if frontend else ""
        key = json.loads(text)["management"]["key"]
    except (OSError, psutil.Error):
        return True  # a server without tokens: whoever reaches this one reaches the management API as well
    except (ValueError, KeyError, TypeError):
        return False
    return hmac.compare_digest(str(authorization).encode(), f"Bearer {key}".encode())


def worker(parked: bool) -> dict[str, Any]:
    """What a describe answer says under the key `worker`: whether it now holds still, and if so, who it is."""
    return {"pid": os.getpid() if parked else 0, "parked": parked}


def hold(duration: float) -> None:
    """Do nothing for `duration` seconds, or until the kill."""
    time.sleep(duration)
