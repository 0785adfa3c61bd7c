"""How a step's keys are best read from a paged cache: sequences with a single new token in groups of about one length.

Most steps have only such sequences. A group is padded to its longest one's length and is one call of attention.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from handlers.batching import Limits, plan

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

    @property
    def end(self) -> int:
        """Where their keys end in what is read."""
        return self.start + self.lengths.shape[0] * self.length

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
    """How a step's keys lie in what is read from the cache: the groups' first, then the pieces'.

    Args:
        groups, pieces: of the step's sequences.
        layers: the numbers of the layers that it holds for.
        windows: layer → the window of its cache, whether or not the layer tells it.
        places: (keys,) where in the cache they are.

    Attributes:
        first: where the pieces' keys begin.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        pieces: Sequence[Piece],
        layers: Collection[int] = (),
        windows: Mapping[int, int] | None = None,
        places: Tensor | None = None,
    ) -> None:
        self.groups, self.pieces = tuple(groups), tuple(pieces)
        self.layers, self.windows = layers, windows or {}
        self.first = self.groups[-1].end if self.groups else 0
        self._places = torch.empty(0, dtype=torch.int64) if places is None else places
        self._masks: dict[tuple[int | None, torch.dtype], tuple[list[Tensor | None], list[Tensor | None]]] = {}
        self._by_head: dict[int, list[Tensor]] = {}

    def masks(self, window: int | None, dtype: torch.dtype) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The masks of groups and pieces, made once for all layers of a step that have the same window."""
        key = window, dtype
        if key not in self._masks:
            groups = [group.mask(window, dtype) for group in self.groups]
            self._masks[key] = groups, [piece.mask(window) for piece in self.pieces]
        return self._masks[key]

    def by_head(self, kv_heads: int) -> list[Tensor]:
        """For each group (sequences × key heads × length,) places in a cache of (tokens × key heads, head dimension).

        Made once for all layers of a step.
        """
        if kv_heads not in self._by_head:
            heads = torch.arange(kv_heads)[:, None]
            places = [self._places[group.start : group.end].view(-1, 1, group.length) for group in self.groups]
            self._by_head[kv_heads] = [(place * kv_heads + heads).flatten() for place in places]
        return self._by_head[kv_heads]

    def of_pieces(self) -> Tensor:
        """(keys,) places in a cache of (tokens, …), of the pieces' keys."""
        return self._places[self.first :]


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
