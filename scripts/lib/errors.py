"""The error a person at the terminal can act on."""


class UserError(Exception):
    """Something the person who ran the command must change.

    Printed without a traceback; the command exits 1.

    Args:
        message: what is wrong, one sentence.
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
