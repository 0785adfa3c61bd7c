"""Names and versions that TorchServe can route, and that a file in the model store can have."""

import re

from scripts.lib.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: TorchServe takes a management path that holds /token for its token API: such a model cannot be seen or scaled.
RESERVED = "token"
_LONGEST = 100  # a file's name has 255 bytes, and a build in progress adds its own marks


def check_model_name(name: str) -> str:
    """`name` if it can stand in a URL, in a file's name and in the keys of config.properties.

    Raises:
        UserError: it can't; the message says what may stand in it.
    """
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise UserError(
            f"{name!r} can't be a model's name",
            f"letters, digits, '.', '_' and '-', a letter or digit first, at most {_LONGEST} characters",
        )
    if name.startswith(RESERVED):
        raise UserError(
            f"{name!r} can't be a model's name",
            f"TorchServe takes /{RESERVED}… for its token API, so that such a model can't be managed: my-{name}",
        )
    if name.endswith(".mar"):
        raise UserError(f"{name!r} can't be a model's name", f"leave out .mar: --name {name.removesuffix('.mar')}")
    return name


def check_version(version: str) -> str:
    """`version` if it can stand in a URL; kept as the exact string: "1" and "1.0" are two versions to TorchServe.

    Raises:
        UserError: it can't; the message says what may stand in it.
    """
    if not _NAME.fullmatch(version) or len(version) > _LONGEST:
        raise UserError(
            f"{version!r} can't be a version", "letters, digits, '.', '_' and '-', a letter or digit first: 1.0"
        )
    return version
