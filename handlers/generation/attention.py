"""Attention over a paged cache on a CPU, each sequence within its own keys; registered with transformers as
`paged_split`.

transformers' continuous batching hands the keys and values of all sequences over in one row. Its SDPA path attends over
the whole row under a mask, so that a step costs the square of the company. Here a prompt's piece attends to its own
part of the row, and sequences with a single new token in groups of about one length: a group is one call. Heads that
share keys and values become rows of one product.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from handlers.generation.cache_reader import Handed
from handlers.generation.layout import Group, Layout, Piece

NAME = "paged_split"


def split_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    handed: Handed | None = None,
    **refused: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence.

    Args:
        query: (1, heads, new tokens, head dimension), the sequences behind each other.
        key, value: (1, key heads, keys, head dimension): cached and new, the sequences behind each other, or as
            `layout` says.
        attention_mask: None.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,) cumulative lengths of both; the keys' for each kind of layer
            where a layer read nothing by itself, or reads in the cache.
        scaling: of the products; None is 1 / √(head dimension).
        sliding_window: a token sees so many tokens, itself included; None sees all before it.
        layout: of the keys. None, and for layers that it does not hold for, as the cumulative lengths say.
        handed: what a layer that the layout holds for got from its cache. Where that is to be read, `key` and `value`
            are the new ones alone.

    Returns:
        (1, new tokens, heads, value dimension), and None for the weights.

    Raises:
        NotImplementedError: the layer wants something that this does not apply.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if refused.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    if attention_mask is not None:  # transformers makes none for this function: the layer has one of its own
        raise NotImplementedError("a layer with a mask of its own")
    number, cached = getattr(module, "layer_idx", None), None
    if layout is not None and sliding_window is None and number is not None:
        sliding_window = layout.windows.get(number)
    if handed is not None and layout is not None:
        cached = handed.read_there(key, value)
    elif isinstance(cu_seq_lens_k, Mapping) or (layout is not None and number in layout.layers):
        raise NotImplementedError("a layer that reads another's keys")
    else:
        ends = zip(itertools.pairwise(cu_seq_lens_q.tolist()), itertools.pairwise(cu_seq_lens_k.tolist()), strict=True)
        layout = Layout((), [Piece(*new, *all) for new, all in ends if new[1] > new[0]])
    group_masks, piece_masks = layout.masks(sliding_window, query.dtype)
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for place, (group, mask) in enumerate(zip(layout.groups, group_masks, strict=True)):
        if cached is None:
            keys, values = (_of_group(x, group) for x in (key, value))
        else:
            keys, values = (_of_cache(x, layout, place) for x in cached)
        attended = _attend_group(group, mask, query, keys, values, scaling)
        if group.rows is None:
            return attended[None], None
        out[0].index_copy_(0, group.rows, attended)
    first = 0
    if cached is not None and layout.pieces:
        key, value = (x.index_select(0, layout.of_pieces()).transpose(0, 1)[None] for x in cached)
        first = layout.first
    for piece, mask in zip(layout.pieces, piece_masks, strict=True):
        keys, values = (x[:, :, piece.k0 - first : piece.k1 - first] for x in (key, value))
        attended = _attend_piece(query[:, :, piece.q0 : piece.q1], mask, keys, values, scaling)
        out[:, piece.q0 : piece.q1] = attended.transpose(1, 2)
    return out, None


def _of_group(row: Tensor, group: Group) -> Tensor:
    """(sequences, key heads, length, head dimension) of a row in which a group's sequences lie behind each other."""
    part = row[0].transpose(0, 1)[group.start : group.end]
    return part.view(-1, group.length, *part.shape[1:]).transpose(1, 2)


def _of_cache(cached: Tensor, layout: Layout, place: int) -> Tensor:
    """(sequences, key heads, length, head dimension) of a group, read from the cache head by head."""
    _, kv_heads, size = cached.shape
    read = cached.view(-1, size).index_select(0, layout.by_head(kv_heads)[place])
    return read.view(-1, kv_heads, layout.groups[place].length, size)


def _attend_group(
    group: Group, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """(sequences, heads, value dimension) of a group."""
    sequences, kv_heads, length, size = key.shape
    tokens = query[0].transpose(0, 1)
    if group.rows is not None:
        tokens = tokens.index_select(0, group.rows)
    # a single token needs no causality, so the heads that share keys can be rows
    q = tokens.reshape(sequences, kv_heads, -1, size)
    if key.dtype == torch.float32 and key.is_contiguous() and value.is_contiguous():
        # few rows on many keys: two products in a batch are faster than SDPA, which makes small ones of them
        scale = 1 / math.sqrt(size) if scaling is None else scaling
        q = (q * scale).reshape(sequences * kv_heads, -1, size)
        scores = torch.bmm(q, key.view(-1, length, size).transpose(1, 2)).view(sequences, -1, length)
        if mask is not None:
            scores += mask[:, 0]
        weights = scores.softmax(-1).view(sequences * kv_heads, -1, length)
        attended = torch.bmm(weights, value.view(-1, length, value.shape[-1]))
    else:
        attended = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scaling)
    return attended.reshape(sequences, query.shape[1], -1)


def _attend_piece(q: Tensor, mask: Tensor | None, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """(1, heads, new tokens, value dimension) of a piece."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling)


def register() -> None:
    """Make the function known to transformers."""
    AttentionInterface.register(NAME, split_attention)
