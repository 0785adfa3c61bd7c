"""What TorchServe's refusals mean, where its statuses do not say it."""

import json


def token_rejected(status: int, body: bytes) -> bool:
    """Whether an answer of any of its APIs says that the token is missing or wrong.

    TorchServe 0.12 answers 400 with its exception's name; the message says "Token Authentication failed" or "Token
    Authorization failed", depending on where the check broke off, so the name is what counts.
    """
    if status not in (400, 401, 403) or b"InvalidKeyException" not in body:
        return False
    try:
        content = json.loads(body)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("type") == "InvalidKeyException"
