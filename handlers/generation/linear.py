"""Linear layers with weights packed for oneDNN, on a CPU, where a trial at start-up finds them faster.

The stock product of a few rows with a large weight reads the weight in the order that it is stored in, or packs it anew
for each call. oneDNN's packing, made once, computes a language model's head for 4 to 16 sequences in half the time (49k
tokens, AVX2). torch.compile packs frozen weights the same way, by the same operators.
"""

import logging
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)

GAIN = 0.9  # of the stock product's time, on average, and a copy of the weight is worth its memory
REPEATS = 3
LEAST_WEIGHTS = 2**16  # below that, a call costs more than its product
ROWS = (1, 4, 16)  # tried: what steps have that decode

Shape = tuple[int, int, bool]


class PackedLinear(nn.Module):
    """A linear layer that has its weight twice: as it was, and packed.

    Args:
        linear: the layer; its parameters are shared, not copied.
        rows: the number of rows from which the packed weight is faster; fewer take the stock product.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.rows = rows
        self._packed = pack(linear.weight)

    def forward(self, input: Tensor) -> Tensor:
        """`input` @ weight.T + bias, to rounding."""
        if input.numel() < self.rows * self.in_features:
            return F.linear(input, self.weight, self.bias)
        return product(input, self._packed, self.bias)


def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and computes in a dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or bool(native)


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)  # type: ignore[no-any-return]


def product(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`input` @ weight.T + bias with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def pack_linears(model: nn.Module, room: int) -> int:
    """Give a model's linear layers packed weights where that pays.

    Each shape is tried once, on one thread and by its processor time, so that a busy machine decides nothing. The
    widest go first: the head gains most.

    Args:
        model: on a CPU; changed in place.
        room: bytes that the copies may take.

    Returns:
        Bytes that the copies take.
    """
    found: dict[Shape, list[tuple[nn.Module, str, nn.Linear]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            # subclasses (quantized, adapters) know better themselves
            if type(child) is nn.Linear and child.weight.numel() >= LEAST_WEIGHTS and packable(child.weight.dtype):
                shape = (child.out_features, child.in_features, child.bias is not None)
                found.setdefault(shape, []).append((parent, name, child))
    taken = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for shape in sorted(found, key=lambda shape: -shape[0]):
            places = found[shape]
            size = sum(linear.weight.nbytes for _, _, linear in places)
            if taken + size > room:
                continue
            least = _faster_from(places[0][2])
            if least is None:
                continue
            for parent, name, linear in places:
                setattr(parent, name, PackedLinear(linear, least))
            taken += size
    finally:
        torch.set_num_threads(threads)
    if taken:
        logger.info("Linear layers hold %.0f MiB of packed weights beside their own", taken / 2**20)
    return taken


@torch.inference_mode()
def _faster_from(linear: nn.Linear) -> int | None:
    """The fewest rows from which on the packed product is faster; None where it is not worth its memory."""
    packed = pack(linear.weight)
    shares = []
    for count in ROWS:
        input = torch.randn(count, linear.in_features, dtype=linear.weight.dtype)
        stock = _seconds(partial(F.linear, input, linear.weight, linear.bias))
        shares.append(_seconds(partial(product, input, packed, linear.bias)) / stock)
    if statistics.geometric_mean(shares) > GAIN or shares[-1] > 1:
        return None
    slower = [count for count, share in zip(ROWS, shares, strict=True) if share > 1]
    return max(slower, default=0) + 1


def _seconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return max(min(times), 1e-9)
