"""Attention over a paged cache on a CPU, each sequence within its own keys; registered with transformers as
`paged_split`.

transformers' continuous batching hands the keys and values of all sequences over in one row. Its SDPA path attends over
the whole row under a mask, so that a step costs the square of the company. Here a prompt's piece attends to its own
part of the row, and sequences with a single new token, which most steps have only, are read from the cache in groups of
about one length, padded to it: a group is one call. Heads that share keys and values become rows of one product.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
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
        lengths: (sequences, 1) how many keys are theirs.
        length: how many are read for each, the shorter ones' last key repeated.
    """

    rows: Tensor | None
    start: int
    lengths: Tensor
    length: int

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """(sequences, 1, 1, length) to be added to the scores; None where all keys count."""
        place = torch.arange(self.length)[None]
        hidden = place >= self.lengths
        if window is not None:
            hidden |= place < self.lengths - window
        if not bool(hidden.any()):
            return None
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt: where its new tokens begin and end, and its keys in what is read."""

    q0: int
    q1: int
    k0: int
    k1: int

    def mask(self, window: int | None) -> Tensor | None:
        """(new, keys) whether a token sees another; None where plain causality says it or nothing needs to."""
        new, total = self.q1 - self.q0, self.k1 - self.k0
        if new in (1, total) and (window is None or total <= window):
            return None
        seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        return seen if window is None else seen.triu(total - new - window + 1)


class Layout:
    """How a step's keys lie in what is read from the cache.

    Args:
        groups, pieces: of the step's sequences.
        layers: the numbers of the layers that it holds for.
        windows: layer → the window of its cache, whether or not the layer tells it.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        pieces: Sequence[Piece],
        layers: Collection[int] = (),
        windows: Mapping[int, int] | None = None,
    ) -> None:
        self.groups, self.pieces = tuple(groups), tuple(pieces)
        self.layers, self.windows = layers, windows or {}
        self._masks: dict[tuple[int | None, torch.dtype], tuple[list[Tensor | None], list[Tensor | None]]] = {}

    def masks(self, window: int | None, dtype: torch.dtype) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The masks of groups and pieces, made once for all layers of a step that have the same window."""
        key = window, dtype
        if key not in self._masks:
            groups = [group.mask(window, dtype) for group in self.groups]
            self._masks[key] = groups, [piece.mask(window) for piece in self.pieces]
        return self._masks[key]


@dataclass(frozen=True)
class Caches:
    """Which layers read which cache.

    Args:
        full: the numbers, in `PagedAttentionArgs`, of the caches that hold everything.
        layers: the layers that read those.
        windows: each other layer → its window.
    """

    full: tuple[int, ...]
    layers: frozenset[int]
    windows: Mapping[int, int]

    @classmethod
    def of(cls, cache: Any) -> "Caches":
        """Of transformers' `PagedAttentionCache`."""
        kinds = cache.layer_to_allocator
        full = {number for number, allocator in kinds.items() if allocator.layer_type == FULL}
        windows = {number: int(kinds[number].sliding_window) for number in kinds.keys() - full}
        return cls(tuple({kinds[number].index for number in full}), frozenset(full), windows)


def lay_out(q_ends: list[int], k_ends: list[int]) -> tuple[list[Group], list[Piece], Tensor]:
    """Say how the keys of a step are best read.

    Args:
        q_ends, k_ends: cumulative lengths from 0 of the sequences' new tokens and of all their tokens.

    Returns:
        The groups and pieces, and for each of their keys the place in the row where all sequences' keys lie behind each
        other.
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
        lengths = torch.tensor([total[number] for number in members])[:, None]
        places.append((starts + torch.arange(batch.length)[None].minimum(lengths - 1)).flatten())
        rows = None if everything else torch.tensor([q_ends[number] for number in members])
        groups.append(Group(rows, read, lengths, batch.length))
        read += batch.tokens
    for number, count in enumerate(new):
        if count > 1:
            pieces.append(Piece(q_ends[number], q_ends[number + 1], read, read + total[number]))
            places.append(torch.arange(k_ends[number], k_ends[number + 1]))
            read += total[number]
    return groups, pieces, torch.cat(places)


def arranged(step: Mapping[str, Any], caches: Caches) -> dict[str, Any]:
    """A step's arguments as transformers makes them → with a layout, by which the cache is read.

    Args:
        step: `PagedAttentionArgs`.
        caches: the model's.
    """
    indices = list(step["read_index"])
    if not caches.full or not all(indices[number].numel() for number in caches.full):
        return {**step, "layout": Layout((), (), (), caches.windows)}  # nothing is cached: what is new comes as it is
    groups, pieces, places = lay_out(step["cu_seq_lens_q"].tolist(), step["cu_seq_lens_k"][FULL].tolist())
    for number in caches.full:
        indices[number] = indices[number][places]
    return {**step, "read_index": indices, "layout": Layout(groups, pieces, caches.layers, caches.windows)}


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
        layout: of the keys; None, and for layers that it does not hold for, as the cumulative lengths say.

    Returns:
        (1, new tokens, heads, value dimension), and None for the weights.

    Raises:
        NotImplementedError: the layer wants something that this does not apply.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if refused.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    number = getattr(module, "layer_idx", None)
    if layout is not None and sliding_window is None and number is not None:
        sliding_window = layout.windows.get(number)
    if layout is None or number not in layout.layers:
        ends = zip(itertools.pairwise(cu_seq_lens_q.tolist()), itertools.pairwise(cu_seq_lens_k.tolist()), strict=True)
        layout = Layout((), [Piece(*new, *all) for new, all in ends if new[1] > new[0]])
    group_masks, piece_masks = layout.masks(sliding_window, query.dtype)
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for group, mask in zip(layout.groups, group_masks, strict=True):
        attended = _attend_group(group, mask, query, key, value, scaling)
        if group.rows is None:
            return attended[None], None
        out[0].index_copy_(0, group.rows, attended)
    for piece, mask in zip(layout.pieces, piece_masks, strict=True):
        out[:, piece.q0 : piece.q1] = _attend_piece(piece, mask, query, key, value, scaling).transpose(1, 2)
    return out, None


def _attend_group(
    group: Group, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """(sequences, heads, value dimension) of a group."""
    sequences, kv_heads = group.lengths.shape[0], key.shape[1]
    tokens = query[0].transpose(0, 1)
    if group.rows is not None:
        tokens = tokens.index_select(0, group.rows)
    # a single token needs no causality, so the heads that share keys can be rows
    q = tokens.reshape(sequences, kv_heads, -1, query.shape[3])
    end = group.start + sequences * group.length
    k, v = (
        x[0].transpose(0, 1)[group.start : end].view(sequences, group.length, kv_heads, -1).transpose(1, 2)
        for x in (key, value)
    )
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return attended.reshape(sequences, query.shape[1], -1)


def _attend_piece(
    piece: Piece, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """(1, heads, new tokens, value dimension) of a piece."""
    q, k, v = query[:, :, piece.q0 : piece.q1], key[:, :, piece.k0 : piece.k1], value[:, :, piece.k0 : piece.k1]
    group = query.shape[1] // key.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling)


def register() -> None:
    """Make the function known to transformers."""
    AttentionInterface.register(NAME, split_attention)


def attend_in_groups(compute: Callable[..., None], caches: Caches) -> Callable[..., None]:
    """What computes a step, `(model, arguments)` → the same with the step's keys laid out for `split_attention`."""

    def compute_arranged(model: Any, step: Mapping[str, Any]) -> None:
        compute(model, arranged(step, caches))

    return compute_arranged
