"""Attention without padding, registered with transformers as `packed`.

The texts of a micro-batch lie behind each other in one row; every layer but attention works on single tokens and never
notices. Attention runs within each text: on a CPU one SDPA call per run of equal lengths (the planner hands them over
sorted, so there are few), on CUDA in half precision torch's varlen kernel over the cumulative lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "packed"


class CannotPack(NotImplementedError):
    """The model wants something of attention that the packed function does not apply; run it padded."""


@dataclass(frozen=True)
class Segments:
    """Where the texts of a packed row begin and end.

    Args:
        runs: (start, texts, length) of neighbours of equal length, in tokens.
        ends: cumulative lengths from 0, int32 on the model's device, for the varlen kernel; None elsewhere.
        longest: longest length.
    """

    runs: tuple[tuple[int, int, int], ...]
    ends: Tensor | None
    longest: int


def segments(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Segments:
    """Describe a packed row of texts of these lengths."""
    runs = []
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        runs.append((start, count, length))
        start += count * length
    ends = None
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return Segments(tuple(runs), ends, max(lengths))


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attend within each text.

    Args:
        query: (1, heads, tokens, head dimension); key and value likewise, with as many or fewer heads.
        segments: where each text lies.

    Returns:
        (1, tokens, heads, head dimension), and no weights.

    Raises:
        CannotPack: the model wants a bias, a soft cap or a window that this function does not apply.
    """
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if any(rest.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "alibi")):
        raise CannotPack("packed attention applies no bias, soft cap or sink")
    if sliding_window is not None and segments.longest > sliding_window:
        raise CannotPack("packed attention applies no sliding window")
    grouped = key.shape[1] != query.shape[1]
    if segments.ends is not None:
        from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (tokens, heads, head dimension)
        window = (-1, 0) if causal else (-1, -1)
        ends, longest = segments.ends, segments.longest
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out[None], None
    heads, tokens, dim = query.shape[1:]
    mixed = query.new_empty(1, tokens, heads, dim)
    for start, count, length in segments.runs:
        end = start + count * length
        q, k, v = (_split(x, start, end, count, length) for x in (query, key, value))
        o = F.scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=causal, enable_gqa=grouped)
        mixed[0, start:end] = o.transpose(1, 2).reshape(end - start, heads, dim)
    return mixed, None


def _split(x: Tensor, start: int, end: int, count: int, length: int) -> Tensor:
    """(1, heads, tokens, dim) → (texts, heads, length, dim) of one run."""
    return x[0, :, start:end].reshape(x.shape[1], count, length, x.shape[3]).transpose(0, 1)


def register() -> None:
    """Make `attn_implementation="packed"` known to transformers; the row needs no mask."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
