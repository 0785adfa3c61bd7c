"""Attention over a paged cache on a CPU, sequence by sequence; registered with transformers as `paged_split`.

transformers' continuous batching hands the keys and values of all sequences over in one row. Its SDPA path attends over
the whole row under a mask, so that a step costs the square of the company; here each sequence attends to its own part.
A single new token needs no mask at all, and the heads that share keys and values become rows of one product.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "paged_split"


def split_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **refused: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence.

    Args:
        query: (1, heads, new tokens, head dimension), the sequences behind each other.
        key, value: (1, key heads, cached and new tokens, head dimension), likewise.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,) cumulative lengths of both.
        scaling: of the products; None is 1 / √(head dimension).
        sliding_window: a token sees so many tokens, itself included; None sees all before it.

    Returns:
        (1, new tokens, heads, value dimension), and None for the weights.

    Raises:
        NotImplementedError: the layer wants something that this does not apply.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if refused.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    heads, dimension = query.shape[1], value.shape[-1]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    q_ends, k_ends = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    sequences = len(q_ends) - 1
    if q_ends[-1] == sequences == query.shape[2] and sliding_window is None:
        # every sequence has one new token: this is most steps; views made all at once cost half of those made singly
        singles = query[0].transpose(0, 1).reshape(sequences, 1, kv_heads, group, -1).unbind()
        lengths = [end - start for start, end in itertools.pairwise(k_ends)]
        parts = zip(singles, torch.split(key, lengths, 2), torch.split(value, lengths, 2), strict=True)
        each = [F.scaled_dot_product_attention(one, k, v, scale=scaling) for one, k, v in parts]
        return torch.cat(each).reshape(1, sequences, heads, dimension), None
    out = query.new_empty(1, query.shape[2], heads, dimension)
    for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
        if q0 == q1:
            continue
        q, k, v = query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1]
        if q1 - q0 == 1:
            if sliding_window is not None:
                k, v = k[:, :, -sliding_window:], v[:, :, -sliding_window:]
            rows = q.reshape(1, kv_heads, group, -1)
            out[:, q0] = F.scaled_dot_product_attention(rows, k, v, scale=scaling).reshape(1, heads, dimension)
            continue
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mask = _mask(q1 - q0, k1 - k0, sliding_window)
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        out[:, q0:q1] = part.transpose(1, 2)
    return out, None


def _mask(new: int, total: int, window: int | None) -> Tensor | None:
    """(new, total) whether a token sees another; None where plain causality says it."""
    if new == total and (window is None or total <= window):
        return None
    seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    return seen if window is None else seen.triu(total - new - window + 1)


def register() -> None:
    """Make the function known to transformers."""
    AttentionInterface.register(NAME, split_attention)
