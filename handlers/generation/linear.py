"""Linear layers with weights laid out for a few rows at a time, on a CPU, where a trial at start-up finds them faster.

A step that decodes multiplies a few rows with every weight: it costs what reading the weights costs. Two layouts help:

- Weights that half precision holds exactly, as those of most published checkpoints, are kept so and widened in the
  processor's registers (FBGEMM): half of the bytes are read, and every product and sum stays float32. Where this pays
  for any number of rows, the layer's own weight is let go: it then takes half of the memory too.
- Other weights are copied in oneDNN's blocks, as torch.compile does with frozen weights, by the same operators. The
  stock product reads them in the order that they are stored in, or blocks them anew for each call.
"""

import itertools
import logging
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)

Shape = tuple[int, int, bool, torch.dtype]

GAIN = 0.9  # of the stock product's time, on average, and another layout is worth its memory
REPEATS = 3
LEAST_WEIGHTS = 2**16  # below that, a call costs more than its product
ROWS = (1, 4, 16, 64)  # tried: what steps have that decode, and pieces of prompts
COLD = 2**26  # bytes of weights that a trial goes through in turn: no processor's cache holds as much as a model has
ROUNDING = 2.0**-24  # of float32


class Layout(Protocol):
    """A linear layer's weight and bias in an order of their own.

    Attributes:
        nbytes: what it takes.
    """

    nbytes: int

    def product(self, input: Tensor) -> Tensor:
        """`input` @ weight.T + bias, to rounding."""

    def weight(self) -> Tensor:
        """The weight as it was, made anew."""


class Halves:
    """Weights in half precision, by FBGEMM.

    Args:
        linear: with weights that half precision holds; see `halved`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), bias)
        self.nbytes = linear.weight.nbytes // 2

    def product(self, input: Tensor) -> Tensor:
        """See Layout.product."""
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(input, self._packed)
        return output

    def weight(self) -> Tensor:
        """See Layout.weight."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight.float()


class Blocks:
    """Weights in oneDNN's blocks.

    Args:
        linear: of a dtype that oneDNN computes here.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.nbytes = linear.weight.nbytes

    def product(self, input: Tensor) -> Tensor:
        """See Layout.product."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
        return output

    def weight(self) -> Tensor:
        """See Layout.weight."""
        weight: Tensor = self._packed.to_dense()
        return weight


class PackedLinear(nn.Module):
    """A linear layer with its weight in another layout.

    Args:
        linear: the layer; its parameters are shared, not copied.
        layout: of its weight.
        rows: the number of rows from which that is faster; fewer take the stock product. 1 lets the weight go.
    """

    def __init__(self, linear: nn.Linear, layout: Layout, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias: Tensor | None = linear.bias
        self.rows = rows
        self._own: Tensor | None = linear.weight if rows > 1 else None
        self._layout = layout

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs). Where it was let go it is made anew, and stays: who reads it once reads it each step."""
        if self._own is None:
            self._own = self._layout.weight()
        return self._own

    def forward(self, input: Tensor) -> Tensor:
        """`input` @ weight.T + bias, to rounding."""
        if input.numel() < self.rows * self.in_features and self._own is not None:
            return F.linear(input, self._own, self.bias)
        return self._layout.product(input)


def halved(linear: nn.Linear) -> Halves | None:
    """A layer's weights in half precision; None where they, or this machine, do not allow it.

    The weights' own error must stay below what float32 rounds away: every row and every column of the weight differs
    from its half by at most 2⁻²⁴ of its norm. (Columns too: a state may have an entry that outweighs all others.)
    """
    weight = linear.weight.detach()
    if weight.dtype != torch.float32 or not _fbgemm():
        return None
    error = weight.half().float() - weight
    norm = torch.linalg.vector_norm
    held = all(bool((norm(error, dim=dim) <= ROUNDING * norm(weight, dim=dim)).all()) for dim in (0, 1))
    return Halves(linear) if held else None


def blocked(linear: nn.Linear) -> Blocks | None:
    """A layer's weights in oneDNN's blocks; None where it does not compute their dtype on this CPU."""
    return Blocks(linear) if _onednn(linear.weight.dtype) else None


def pack_linears(model: nn.Module, room: int) -> int:
    """Lay a model's linear layers out anew where that pays.

    Each shape is tried once, by the threads that will serve. The widest go first: the head gains most.

    Args:
        model: on a CPU; changed in place.
        room: bytes that copies may take beside the weights that stay.

    Returns:
        Bytes that the new layouts take, whatever was let go for them.
    """
    found: dict[Shape, list[tuple[nn.Module, str]]] = {}
    elsewhere: set[int] = set()  # weights that others use too, such as the embedding
    for parent in model.modules():
        if not isinstance(parent, nn.Linear):
            elsewhere |= {id(parameter) for parameter in parent.parameters(recurse=False)}
        for name, child in parent.named_children():
            # subclasses (quantized, adapters) know better themselves
            if type(child) is nn.Linear and child.weight.numel() >= LEAST_WEIGHTS:
                shape = (child.out_features, child.in_features, child.bias is not None, child.weight.dtype)
                found.setdefault(shape, []).append((parent, name))
    taken = beside = 0
    for shape in sorted(found, key=lambda shape: -shape[0]):
        places = found[shape]
        size = getattr(*places[0]).weight.nbytes
        if beside + size > room:
            continue
        tried = {place: _laid_out(getattr(*place)) for place in places[: max(1, COLD // size)]}
        least = _faster_from([(getattr(*place), layout) for place, layout in tried.items() if layout is not None])
        if least is None:
            continue
        for parent, name in places:  # no list holds the layers: each weight goes when its layout is there
            linear = getattr(parent, name)
            layout = tried.pop((parent, name), None) or _laid_out(linear)
            stays = least > 1 or id(linear.weight) in elsewhere
            if layout is None or (stays and beside + layout.nbytes > room):
                continue
            setattr(parent, name, PackedLinear(linear, layout, least))
            taken += layout.nbytes
            beside += layout.nbytes if stays else 0
    if taken:
        logger.info("Linear layers hold %.0f MiB of weights in layouts for a few rows", taken / 2**20)
    return taken


def _laid_out(linear: nn.Linear) -> Layout | None:
    """The best layout that a layer allows."""
    return halved(linear) or blocked(linear)


def _fbgemm() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and "fbgemm" in torch.backends.quantized.supported_engines


def _onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or bool(native)


@torch.inference_mode()
def _faster_from(layers: Sequence[tuple[nn.Linear, Layout]]) -> int | None:
    """The fewest rows from which on layers of one shape are faster in another layout; None where it is not worth it."""
    if not layers:
        return None
    first = layers[0][0]
    shares = []
    for count in ROWS:
        input = torch.randn(count, first.in_features, dtype=first.weight.dtype)
        stock, other = _seconds(partial(_stock, layers, input), partial(_other, layers, input))
        shares.append(other / stock)
    if statistics.geometric_mean(shares) > GAIN:
        return None
    slower = itertools.takewhile(lambda pair: pair[1] > 1, zip(ROWS, shares, strict=True))
    return max((count for count, _ in slower), default=0) + 1


def _stock(layers: Sequence[tuple[nn.Linear, Layout]], input: Tensor) -> None:
    for layer, _ in layers:
        F.linear(input, layer.weight, layer.bias)


def _other(layers: Sequence[tuple[nn.Linear, Layout]], input: Tensor) -> None:
    for _, layout in layers:
        layout.product(input)


def _seconds(*works: Callable[[], object]) -> list[float]:
    """What each takes at best: in turns, so that a busy moment hits all of them."""
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(REPEATS + 1):
        for work, taken in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            if repeat:  # the first one warms up
                taken.append(time.perf_counter() - started)
    return [max(min(taken), 1e-9) for taken in times]
