"""Vectors in one byte or one bit per dimension, as sentence-transformers' `quantize_embeddings` makes them.

One byte: each dimension's range, as a set of calibration vectors spans it, is cut into 255 steps. The ranges belong to
the archive: those of a batch would let its neighbours change a vector. One bit: whether a number is positive, eight to
a byte.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from handlers.pooling import finish

DTYPES = ("float32", "int8", "uint8", "binary", "ubinary")
CALIBRATED = ("int8", "uint8")
VECTORS = "vectors"  # the tensor in the calibration's file
_KEPT = 64  # ranges that are remembered; a client may ask for any number of dimensions

Ranges = NDArray[np.float32]


class Calibration:
    """The ranges of a set of vectors, for every way that vectors may leave.

    Args:
        path: a safetensors file with the pooled vectors of representative texts, (texts, dimension), fp32, neither cut
            nor normalised.
        dimension: length of the model's vectors.
    """

    def __init__(self, path: Path, dimension: int) -> None:
        self._vectors = load_file(path)[VECTORS].float()
        if self._vectors.ndim != 2 or self._vectors.shape[1] != dimension or not len(self._vectors):
            raise ValueError(f"{path.name} holds no vectors of {dimension} numbers: calibrate the archive again")
        self._found: OrderedDict[tuple[bool, int | None], Ranges] = OrderedDict()

    def ranges(self, *, normalize: bool, dimensions: int | None) -> Ranges:
        """(2, dimensions): least and largest number of each dimension, once cut and normalised as `finish` does."""
        key = (normalize, dimensions)
        if key not in self._found:
            finished = finish(self._vectors, normalize=normalize, dimensions=dimensions)
            if len(self._found) == _KEPT:
                self._found.popitem(last=False)
            self._found[key] = torch.stack([finished.amin(0), finished.amax(0)]).numpy()
        return self._found[key]


def quantize(vectors: NDArray[np.float32], dtype: str, ranges: Ranges | None = None) -> NDArray[Any]:
    """Vectors, (texts, dimension), in the form `dtype`.

    Args:
        vectors: fp32, finite.
        dtype: one of DTYPES.
        ranges: (2, dimension), least and largest number of each dimension; for those in CALIBRATED.

    Returns:
        (texts, dimension) of float32, int8 or uint8; for `binary` (int8) and `ubinary` (uint8) (texts, dimension ÷ 8),
        rounded up, the first dimension in the highest bit.
    """
    if dtype in CALIBRATED:
        if ranges is None:
            raise ValueError(f"{dtype} needs ranges")
        steps = (ranges[1] - ranges[0]) / 255
        steps = np.where(steps == 0, 1, steps)
        with np.errstate(over="ignore"):  # far outside a narrow range is its end all the same
            levels = np.clip(np.floor((vectors - ranges[0]) / steps), 0, 255)
        return np.asarray(levels, np.uint8) if dtype == "uint8" else np.asarray(levels - 128, np.int8)
    if dtype == "float32":
        return vectors
    bits: NDArray[Any] = np.packbits(vectors > 0, axis=-1)
    return bits if dtype == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)


def width(dimensions: int, dtype: str) -> int:
    """Numbers of one vector in that form."""
    return -(-dimensions // 8) if dtype in ("binary", "ubinary") else dimensions
