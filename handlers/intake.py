"""What a batch takes on: the sizes of texts, their tokenising within its time, and the work that fits into it."""

import time
from collections.abc import Callable, Sequence

from handlers.errors import HandlerFault, Overloaded, RequestError, TooLarge
from handlers.request import Request
from handlers.tokens import Encoding, Text, Tokens
from handlers.work import Slot, placed

MAX_TEXT_CHARACTERS = 1_000_000  # of one text, prompt included: tokenising takes up to 4 µs and 600 bytes for each
MAX_REQUEST_CHARACTERS = 8_000_000  # more than TorchServe lets in, unless a prompt is put before many texts


def parsed(request: Request, asked: Request) -> Request:
    """What `parse` made of a request, if it is one with as many items."""
    if not isinstance(request, Request):
        raise HandlerFault(f"parse returned a {type(request).__name__}; it must return the request")
    if len(request.items) != len(asked.items):
        raise HandlerFault(f"parse made {len(request.items)} items of {len(asked.items)}; their number may not change")
    return request


def checked(texts: Sequence[Text], request: Request, max_items: int) -> Sequence[Text]:
    """The texts of a request, if they are not too many or too long.

    Raises:
        TooLarge: there are too many, or tokenising would take too long or too much memory.
    """
    if len(texts) > max_items:
        raise TooLarge(
            f"The request makes {len(texts)} texts for the model; at most {max_items} fit in one.",
            code="too_many_items",
            param=request.field or texts[max_items].param,
        )
    for text in texts:
        if not isinstance(text, Text):
            raise HandlerFault(f"texts returned a {type(text).__name__}; it must return Text objects")
        if len(text) > MAX_TEXT_CHARACTERS:
            said = f"the text has {len(text)} characters; at most {MAX_TEXT_CHARACTERS} are read."
            raise placed(TooLarge(said, code="text_too_long"), text.param)
    total = sum(map(len, texts))
    if total > MAX_REQUEST_CHARACTERS:
        raise TooLarge(
            f"In all the texts have {total} characters; at most {MAX_REQUEST_CHARACTERS} fit.",
            code="too_large",
            param=request.field or None,
        )
    return texts


def encode(slots: Sequence[Slot], tokens: Tokens, deadline: float, failed: Callable[[Exception], RequestError]) -> None:
    """Tokenise the texts of the batch, in few calls, a request at a time once there is much of it.

    Args:
        deadline: `time.monotonic()` after which no further request is tokenised.
        failed: makes an error of an exception that one request's texts caused.
    """
    waiting: list[Slot] = []
    characters = 0
    for slot in slots:
        if slot.error or not slot.texts:
            continue
        waiting.append(slot)
        characters += sum(map(len, slot.texts))
        if characters > MAX_TEXT_CHARACTERS:
            _tokenise(waiting, tokens, deadline, failed)
            waiting, characters = [], 0
    _tokenise(waiting, tokens, deadline, failed)


def _tokenise(
    waiting: Sequence[Slot], tokens: Tokens, deadline: float, failed: Callable[[Exception], RequestError]
) -> None:
    if time.monotonic() > deadline:
        for slot in waiting:
            slot.error = Overloaded("The batch holds too much text beside this request; try again.")
        return
    try:
        encoded = iter(tokens.encode([text for slot in waiting for text in slot.texts]))
    except Exception as error:  # noqa: BLE001 - a subclass's texts that are none must stay with their request
        if len(waiting) == 1:
            waiting[0].error = failed(error)
            return
        for slot in waiting:
            _tokenise([slot], tokens, deadline, failed)
        return
    for slot in waiting:
        for text, found in zip(slot.texts, [next(encoded) for _ in slot.texts], strict=True):
            if not isinstance(found, RequestError):
                slot.encodings += found
                slot.params += [text.param] * len(found)
            elif slot.error is None:
                slot.error = placed(found, text.param)


def admit(slots: Sequence[Slot], seconds: Callable[[Sequence[Encoding]], float], budget: float, most: float) -> int:
    """Refuse, in order of arrival, what the worker could not finish before TorchServe gives up on it.

    Args:
        seconds: the predicted time of running some encodings.
        budget: seconds that the batch has left.
        most: seconds that a request may take when it is alone.

    Returns:
        How many requests were refused.
    """
    waiting = [(slot, slot.request) for slot in slots if slot.request and not slot.error]
    if seconds([encoding for slot, _ in waiting for encoding in slot.encodings]) <= budget:
        return 0
    taken: list[Encoding] = []
    refused = 0
    for slot, request in waiting:
        needed = seconds(slot.encodings)
        if needed > most:
            tokens = sum(len(encoding) for encoding in slot.encodings)
            slot.error = TooLarge(
                f"{tokens} tokens would take about {needed:.0f} s; at most about "
                f"{int(len(slot.encodings) * most / needed)} texts like these fit in the {most:.0f} s of one request.",
                code="too_much_work",
                param=request.field or None,
            )
            refused += 1
        elif seconds([*taken, *slot.encodings]) > budget:  # work that is shared costs less than its parts
            slot.error = Overloaded("The batch holds too much work beside this request; try again.")
            refused += 1
        else:
            taken += slot.encodings
    return refused
