import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.batching import Limits, MicroBatch, cost, plan, plan_apart
from tests.strategies import lengths

limits = st.builds(
    Limits,
    max_tokens=st.integers(1, 2000),
    max_items=st.integers(1, 40),
    launch_cost=st.integers(0, 2000),
    multiple_of=st.sampled_from([1, 8]),
    packed=st.booleans(),
)


def rounded(length: int, limit: Limits) -> int:
    return length if limit.packed else -(-length // limit.multiple_of) * limit.multiple_of


def run(sizes: list[int], limit: Limits) -> int:
    """Tokens that one micro-batch of these sizes runs."""
    return sum(sizes) if limit.packed else rounded(max(sizes), limit) * len(sizes)


def fits(sizes: list[int], limit: Limits) -> bool:
    return len(sizes) == 1 or (len(sizes) <= limit.max_items and run(sizes, limit) <= limit.max_tokens)


@given(lengths, limits)
def test_every_index_once_and_within_the_budgets(sizes: list[int], limit: Limits) -> None:
    batches = plan(sizes, limit)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(sizes)))
    for batch in batches:
        own = [sizes[i] for i in batch.indices]
        assert fits(own, limit)
        assert batch.length == rounded(max(own), limit)
        assert batch.tokens == run(own, limit)


@given(lengths.filter(bool), limits)
def test_never_costlier_than_one_padded_batch(sizes: list[int], limit: Limits) -> None:
    if fits(sizes, limit):
        assert cost(plan(sizes, limit), limit) <= limit.launch_cost + run(sizes, limit)


@given(lengths.filter(bool), limits, st.integers(1, 40))
def test_never_costlier_than_fixed_slices(sizes: list[int], limit: Limits, width: int) -> None:
    ordered = sorted(sizes)
    slices = [ordered[i : i + width] for i in range(0, len(ordered), width)]
    if all(fits(part, limit) for part in slices):
        assert cost(plan(sizes, limit), limit) <= sum(limit.launch_cost + run(part, limit) for part in slices)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), limits)
def test_no_cut_of_the_sorted_list_is_cheaper(sizes: list[int], limit: Limits) -> None:
    """The oracle tries every way to cut the sorted list."""
    ordered = sorted(sizes)
    best = None
    for cuts in itertools.product([False, True], repeat=len(ordered) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(ordered)]
        parts = [ordered[a:b] for a, b in itertools.pairwise(edges)]
        if all(fits(part, limit) for part in parts):
            here = sum(limit.launch_cost + run(part, limit) for part in parts)
            best = here if best is None else min(best, here)
    assert cost(plan(sizes, limit), limit) == best


def test_short_texts_are_cut_from_long_ones_where_that_saves_more_than_a_launch() -> None:
    sizes = [10, 200, 12, 11]
    assert plan(sizes, Limits(4096, 32, launch_cost=100)) == [
        MicroBatch((0, 3, 2), 12, 36),
        MicroBatch((1,), 200, 200),
    ]
    assert len(plan(sizes, Limits(4096, 32, launch_cost=10_000))) == 1


def test_packed_micro_batches_are_as_few_and_as_even_as_can_be() -> None:
    batches = plan([100] * 12, Limits(1000, 32, packed=True))
    assert [batch.tokens for batch in batches] == [600, 600]


def test_a_text_over_the_budget_runs_alone() -> None:
    batches = plan([5, 5000, 7], Limits(100, 8, launch_cost=10))
    assert [batch.indices for batch in batches] == [(0, 2), (1,)]


def test_nothing_to_plan() -> None:
    assert plan([], Limits(100, 8)) == []
    assert plan([], Limits(100, 8, packed=True)) == []


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"max_items": 0}, {"launch_cost": -1}, {"multiple_of": 0}])
def test_impossible_limits(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        Limits(**{"max_tokens": 1, "max_items": 1, **wrong})


def test_keys_run_apart_under_limits_of_their_own() -> None:
    found = plan_apart([5, 1, 5, 5], ["a", "b", "a", "b"], {"a": Limits(10, 8, 1), "b": Limits(100, 1, 1)}.__getitem__)
    assert sorted(batch.indices for batch in found) == [(0, 2), (1,), (3,)]
