"""Attention over a paged cache on a CPU, each sequence within its own keys; registered with transformers as
`paged_split`.

transformers' continuous batching hands the keys and values of all sequences over in one row. Its SDPA path attends over
the whole row under a mask, so that a step costs the square of the company. Here a prompt's piece attends to its own
part of the row, and sequences with a single new token, which most steps have only, are read from the cache in groups of
about one length, padded to it: a group is one call. Heads that share keys and values become rows of one product.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from handlers.batching import Limits, plan

NAME = "paged_split"

FULL = "full_attention"  # the kind of a layer that sees everything, as transformers calls it
CALL = 256  # cached tokens that are read and attended to in the time that one more call takes
_LIMITS = Limits(max_tokens=2**24, max_items=2**16, launch_cost=CALL)


@dataclass(frozen=True)
class Group:
    """Sequences with a single new token each.

    Args:
        rows: (sequences,) the places of their tokens; None for all tokens of the step in their order.
        start: where their keys begin in what is read.
        sequences, length: so many times so many keys are theirs, the shorter ones' last key repeated.
        mask: (sequences, 1, 1, length), -inf at repeated keys; None where there are none.
    """

    rows: Tensor | None
    start: int
    sequences: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt: its new tokens, its keys in what is read, and which of them each token sees; None where
    plain causality says it.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Tensor | None


@dataclass(frozen=True)
class Layout:
    """How a step's keys lie in what is read from the cache, for layers that see everything."""

    groups: tuple[Group, ...]
    pieces: tuple[Piece, ...]


def lay_out(q_ends: list[int], k_ends: list[int], dtype: torch.dtype) -> tuple[Layout, Tensor]:
    """Say how the keys of a step are best read.

    Args:
        q_ends, k_ends: cumulative lengths from 0 of the sequences' new tokens and of all their tokens.
        dtype: the query's.

    Returns:
        The layout, and for each of its keys the place in the row where all sequences' keys lie behind each other.
    """
    new = [end - start for start, end in itertools.pairwise(q_ends)]
    total = [end - start for start, end in itertools.pairwise(k_ends)]
    single = [number for number, count in enumerate(new) if count == 1]
    groups, pieces, places = [], [], []
    read = 0
    for batch in plan([total[number] for number in single], _LIMITS):
        members = [single[index] for index in batch.indices]
        everything = len(members) == q_ends[-1]
        if everything:
            members.sort()
        starts = torch.tensor([k_ends[number] for number in members])[:, None]
        last = torch.tensor([total[number] - 1 for number in members])[:, None]
        steps = torch.arange(batch.length)[None]
        places.append((starts + steps.minimum(last)).flatten())
        mask = None
        if int(last.min()) + 1 < batch.length:
            mask = torch.zeros(len(members), batch.length, dtype=dtype).masked_fill_(steps > last, -torch.inf)
            mask = mask[:, None, None]
        rows = None if everything else torch.tensor([q_ends[number] for number in members])
        groups.append(Group(rows, read, len(members), batch.length, mask))
        read += batch.tokens
    for number, count in enumerate(new):
        if count > 1:
            end = read + total[number]
            mask = _mask(count, total[number], None)
            pieces.append(Piece(q_ends[number], q_ends[number + 1], read, end, mask))
            places.append(torch.arange(k_ends[number], k_ends[number + 1]))
            read = end
    return Layout(tuple(groups), tuple(pieces)), torch.cat(places)


def arranged(step: Mapping[str, Any], full: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """A step's arguments as transformers makes them → with a layout, by which the cache is read.

    Args:
        step: `PagedAttentionArgs`.
        full: the numbers of the caches of layers that see everything.
        dtype: the model's.
    """
    indices = list(step["read_index"])
    if not full or not all(indices[number].numel() for number in full):
        return dict(step)  # nothing is cached yet: what is new comes as it is
    layout, places = lay_out(step["cu_seq_lens_q"].tolist(), step["cu_seq_lens_k"][FULL].tolist(), dtype)
    for number in full:
        indices[number] = indices[number][places]
    return {**step, "read_index": indices, "layout": layout}


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
    layout: Layout | None = None,
    **refused: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence.

    Args:
        query: (1, heads, new tokens, head dimension), the sequences behind each other.
        key, value: (1, key heads, keys, head dimension): cached and new, the sequences behind each other, or as
            `layout` says.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,) cumulative lengths of both.
        scaling: of the products; None is 1 / √(head dimension).
        sliding_window: a token sees so many tokens, itself included; None sees all before it.
        layout: of the keys, where the layer has no window.

    Returns:
        (1, new tokens, heads, value dimension), and None for the weights.

    Raises:
        NotImplementedError: the layer wants something that this does not apply.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if refused.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    if layout is None or sliding_window is not None:
        ends = zip(itertools.pairwise(cu_seq_lens_q.tolist()), itertools.pairwise(cu_seq_lens_k.tolist()), strict=True)
        pieces = [Piece(*new, *all, _mask(new[1] - new[0], all[1] - all[0], sliding_window)) for new, all in ends]
        layout = Layout((), tuple(piece for piece in pieces if piece.q1 > piece.q0))
    for group in layout.groups:
        attended = _attend_group(group, query, key, value, scaling)
        if group.rows is None:
            return attended[None], None
        out[0].index_copy_(0, group.rows, attended)
    for piece in layout.pieces:
        out[:, piece.q0 : piece.q1] = _attend_piece(piece, query, key, value, scaling).transpose(1, 2)
    return out, None


def _attend_group(group: Group, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """(sequences, heads, value dimension) of a group."""
    kv_heads, dimension = key.shape[1], query.shape[3]
    tokens = query[0].transpose(0, 1)
    if group.rows is not None:
        tokens = tokens.index_select(0, group.rows)
    # a single token needs no causality, so the heads that share keys can be rows
    q = tokens.reshape(group.sequences, kv_heads, -1, dimension)
    end = group.start + group.sequences * group.length
    k, v = (
        x[0].transpose(0, 1)[group.start : end].view(group.sequences, group.length, kv_heads, -1).transpose(1, 2)
        for x in (key, value)
    )
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
    return attended.reshape(group.sequences, query.shape[1], -1)


def _attend_piece(piece: Piece, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """(1, heads, new tokens, value dimension) of a piece."""
    q, k, v = query[:, :, piece.q0 : piece.q1], key[:, :, piece.k0 : piece.k1], value[:, :, piece.k0 : piece.k1]
    group = query.shape[1] // key.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=piece.mask, is_causal=piece.mask is None and q.shape[2] > 1, scale=scaling
    )


def _mask(new: int, total: int, window: int | None) -> Tensor | None:
    """(new, total) whether a token sees another; None where plain causality, or for a single token nothing, says it."""
    if (new in (1, total)) and (window is None or total <= window):
        return None
    seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    return seen if window is None else seen.triu(total - new - window + 1)


def register() -> None:
    """Make the function known to transformers."""
    AttentionInterface.register(NAME, split_attention)


def attend_in_groups(compute: Callable[..., None], full: list[int], dtype: torch.dtype) -> Callable[..., None]:
    """What computes a step, `(model, arguments)` → the same with the step's keys laid out for `split_attention`."""

    def compute_arranged(model: Any, step: Mapping[str, Any]) -> None:
        compute(model, arranged(step, full, dtype))

    return compute_arranged
