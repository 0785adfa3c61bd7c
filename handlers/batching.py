"""Lengths → micro-batches. Pure integers: no torch, no I/O.

A forward pass costs about `launch_cost + tokens run`, in units of one token. Padded, a micro-batch runs its longest
length × its count; packed, the sum of its lengths. With the lengths sorted, an optimal plan consists of neighbours, so
cutting the sorted list at the cheapest places (a dynamic programme) is optimal under that model.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True)
class Limits:
    """What one micro-batch may hold and what it costs.

    Args:
        max_tokens: budget of tokens run at once, padding counted. A text alone may exceed it.
        max_items: most texts at once.
        launch_cost: fixed cost of a forward pass, in tokens.
        multiple_of: padded lengths are rounded up to a multiple of this.
        packed: whether texts run without padding.
    """

    max_tokens: int
    max_items: int
    launch_cost: int = 0
    multiple_of: int = 1
    packed: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_items < 1 or self.launch_cost < 0 or self.multiple_of < 1:
            raise ValueError(f"impossible limits: {self}")


@dataclass(frozen=True)
class MicroBatch:
    """Texts that run together.

    Args:
        indices: positions in the planner's input, by ascending length.
        length: the longest length among them, in tokens (rounded up where padded).
        tokens: tokens that the forward pass runs, padding counted.
    """

    indices: tuple[int, ...]
    length: int
    tokens: int


def plan(lengths: Sequence[int], limits: Limits) -> list[MicroBatch]:
    """Cut `lengths` (tokens per text) into micro-batches of least predicted cost, shortest texts first.

    Every index appears once. Equal lengths keep their order. Each micro-batch is within the limits unless it holds a
    single text.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    sizes = [lengths[i] for i in order]
    ends = _packed_ends(sizes, limits) if limits.packed else _padded_ends(sizes, limits)
    batches = []
    start = 0
    for end in ends:
        length = sizes[end - 1] if limits.packed else _rounded(sizes[end - 1], limits.multiple_of)
        tokens = sum(sizes[start:end]) if limits.packed else length * (end - start)
        batches.append(MicroBatch(tuple(order[start:end]), length, tokens))
        start = end
    return batches


def plan_apart(
    lengths: Sequence[int], keys: Sequence[Hashable], limits: Callable[[Hashable], Limits]
) -> list[MicroBatch]:
    """As `plan`, but only texts of equal keys run together, each key under its own limits."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return [
        replace(batch, indices=tuple(members[i] for i in batch.indices))
        for key, members in groups.items()
        for batch in plan([lengths[i] for i in members], limits(key))
    ]


def cost(batches: Sequence[MicroBatch], limits: Limits) -> int:
    """Predicted cost of a plan, in tokens."""
    return sum(limits.launch_cost + batch.tokens for batch in batches)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _padded_ends(sizes: list[int], limits: Limits) -> list[int]:
    """Ends of the cheapest cuts of ascending `sizes`, each micro-batch padded to its last size."""
    count = len(sizes)
    padded = [_rounded(size, limits.multiple_of) for size in sizes]
    best = [0] * (count + 1)
    cut = [0] * (count + 1)
    for end in range(1, count + 1):
        length = padded[end - 1]
        start = end - 1
        best[end], cut[end] = best[start] + limits.launch_cost + length, start
        lowest = max(0, end - limits.max_items)
        while start > lowest:
            # Once the next text is shorter by more than a launch costs, a cut right after it (or after any earlier
            # one) saves more padding than the extra launch costs: no longer group can be optimal.
            if length - padded[start] > limits.launch_cost:
                break
            start -= 1
            if length * (end - start) > limits.max_tokens:
                break
            here = best[start] + limits.launch_cost + length * (end - start)
            if here < best[end]:
                best[end], cut[end] = here, start
    ends = []
    end = count
    while end:
        ends.append(end)
        end = cut[end]
    return ends[::-1]


def _packed_ends(sizes: list[int], limits: Limits) -> list[int]:
    """Ends of the fewest micro-batches under the budgets, their token sums as even as can be.

    Without padding the sum of lengths is the same however it is cut, so the fewest launches cost least; of those, the
    smallest budget that still needs no more launches spreads the tokens evenly and needs the least memory.
    """
    if not sizes:
        return []
    sums = [0, *accumulate(sizes)]

    def ends_under(budget: int) -> list[int]:
        ends, start = [], 0
        while start < len(sizes):
            end = bisect_right(sums, sums[start] + budget) - 1
            start = max(start + 1, min(end, start + limits.max_items))
            ends.append(start)
        return ends

    ends = ends_under(limits.max_tokens)
    low, high = 1, limits.max_tokens
    while low < high:
        middle = (low + high) // 2
        tried = ends_under(middle)
        if len(tried) > len(ends):
            low = middle + 1
        else:
            high, ends = middle, tried
    return ends
