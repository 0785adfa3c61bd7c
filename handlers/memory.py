"""Whether an error means that memory ran out."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or the host.

    On the CPU torch says so in a plain RuntimeError, by its allocator's text alone.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "can't allocate memory" in text)


def release() -> None:
    """Give cached device memory back, so that a smaller micro-batch finds it in one piece."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
