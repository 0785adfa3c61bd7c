"""Run micro-batches: halve what fails, repair rows that came out non-finite, restore the order of the input."""

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handlers import memory
from handlers.batching import MicroBatch
from handlers.errors import HandlerFault, ModelFailure, OutOfMemory, Overloaded, RequestError, place, reason
from handlers.tokens import Encoding

logger = logging.getLogger(__name__)

# forward(encodings, precise) → one row per encoding, fp32: a tensor of them, or tensors of any shapes and errors
Forward = Callable[[Sequence[Encoding], bool], Tensor | Sequence[Tensor | RequestError]]


@dataclass
class Tally:
    """What happened while a plan ran.

    Args:
        tokens: tokens run, padding counted; what a deadline left out is not in it.
        real_tokens: those that are not padding.
        micro_batches: forward passes.
        splits: micro-batches that were halved because memory ran out.
        retries: texts run again in fp32.
    """

    tokens: int = 0
    real_tokens: int = 0
    micro_batches: int = 0
    splits: int = 0
    retries: int = 0


def run(
    encodings: Sequence[Encoding],
    batches: Sequence[MicroBatch],
    forward: Forward,
    *,
    deadline: float = float("inf"),
    tally: Tally | None = None,
) -> list[Tensor | RequestError]:
    """Run every micro-batch.

    Args:
        encodings: all texts of all requests of the batch.
        batches: a plan over them: every index once.
        forward: one row per encoding. May raise: memory that runs out and any other exception are traced to the text
            that causes them by halving, so that only that text fails.
        deadline: `time.monotonic()` after which nothing more is begun.
        tally: counts what happened.

    Returns:
        A row on the CPU or an error per encoding, in input order: OutOfMemory (507) for a text that does not fit
        alone, ModelFailure (500) for one whose forward pass fails or whose row is non-finite in fp32 too, Overloaded
        (503) for one that was not begun in time.
    """
    tally = tally if tally is not None else Tally()
    results: list[Tensor | RequestError | None] = [None] * len(encodings)
    for batch in batches:
        if time.monotonic() >= deadline:
            late = Overloaded("The batch took longer than the worker may spend on it; try again.", code="deadline")
            results_of: list[Tensor | RequestError] = [late] * len(batch.indices)
        else:
            texts = [encodings[i] for i in batch.indices]
            results_of = _repaired(texts, forward, tally)
            tally.tokens += batch.tokens
            tally.real_tokens += sum(len(text) for text in texts)
        for index, result in zip(batch.indices, results_of, strict=True):
            results[index] = result
    missing = [i for i, result in enumerate(results) if result is None]
    if missing:
        raise ValueError(f"the plan leaves out {len(missing)} of {len(encodings)} texts")
    return [result for result in results if result is not None]


def _attempt(
    encodings: Sequence[Encoding], forward: Forward, precise: bool, tally: Tally
) -> list[Tensor | RequestError]:
    """Rows of one micro-batch; on failure those of its halves, down to single texts."""
    tally.micro_batches += 1
    try:
        rows = forward(encodings, precise)
        if len(rows) != len(encodings):
            raise HandlerFault(f"forward returned {len(rows)} rows for {len(encodings)} texts")
        return [_row(row) for row in (rows.cpu() if isinstance(rows, Tensor) else rows)]
    except torch.AcceleratorError as error:
        # A failed kernel leaves the process without its device: only a new worker can answer again
        logger.critical("The device failed: %s. The worker ends, and TorchServe starts a new one.", error)
        raise SystemExit(1) from error
    except Exception as error:  # noqa: BLE001 - whatever it is, it must stay with the text that caused it
        out_of_memory = memory.is_out_of_memory(error)
        if len(encodings) == 1:
            if out_of_memory:
                return [OutOfMemory(f"the text's {len(encodings[0])} tokens do not fit into memory.")]
            # The message may quote the text, so it stays out of the log; the place does not
            trace = "".join(traceback.format_tb(error.__traceback__))
            logger.error("forward (%s) failed on one text: %s\n%s", place(forward), reason(error), trace)
            return [ModelFailure("The model failed on this text.")]
    # Outside the except clause: the exception's frames hold the tensors that filled the memory
    if out_of_memory:
        memory.release()
    tally.splits += out_of_memory
    middle = len(encodings) // 2
    halves = (encodings[:middle], encodings[middle:])
    return [row for half in halves for row in _attempt(half, forward, precise, tally)]


def _row(row: Any) -> Tensor | RequestError:
    if isinstance(row, Tensor):
        return row.cpu()
    if isinstance(row, RequestError):
        return row
    raise HandlerFault(f"forward returned a {type(row).__name__} for a text; rows are tensors")


def _repaired(encodings: Sequence[Encoding], forward: Forward, tally: Tally) -> list[Tensor | RequestError]:
    """Rows of one micro-batch; non-finite ones are run again in fp32, and what stays non-finite becomes an error."""
    rows = _attempt(encodings, forward, False, tally)
    bad = [i for i, row in enumerate(rows) if _is_spoilt(row)]
    if bad:
        tally.retries += len(bad)
        for i, row in zip(bad, _attempt([encodings[i] for i in bad], forward, True, tally), strict=True):
            overflow = ModelFailure("The model's numbers overflow on this text, in fp32 too.", code="non_finite")
            rows[i] = overflow if _is_spoilt(row) else row
    return rows


def _is_spoilt(row: Tensor | RequestError) -> bool:
    return isinstance(row, Tensor) and not bool(torch.isfinite(row).all())
