"""Attention within each sequence equals attention under one mask, however the keys are laid out."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from handlers.generation import attention
from handlers.generation.attention import Caches, Layout, arranged, lay_out, split_attention

DIMENSION, LAYER = 8, 3


def layer(number: int) -> torch.nn.Module:
    """An attention layer, as far as it is looked at."""
    module = torch.nn.Module()
    module.layer_idx = number
    return module


@dataclass(frozen=True)
class Step:
    """(new, cached) tokens of each sequence, and the layer's shape."""

    lengths: list[tuple[int, int]]
    kv_heads: int
    group: int
    window: int | None
    scaling: float | None


def steps(most_new: int) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        st.lists(st.tuples(st.integers(1, most_new), st.integers(0, 12)), min_size=1, max_size=6),
        st.integers(1, 3),
        st.integers(1, 3),
        st.none() | st.integers(1, 10),
        st.none() | st.floats(0.05, 2),
    )


def cumulated(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def check(step: Step, *, laid_out: bool = False) -> None:
    torch.manual_seed(len(step.lengths))
    new = [a for a, _ in step.lengths]
    total = [a + b for a, b in step.lengths]
    if step.window is not None and not laid_out:
        # the cache hands over so many: a window's earlier tokens are gone
        total = [min(t, a + step.window - 1) for a, t in zip(new, total, strict=True)]
    query = torch.randn(1, step.kv_heads * step.group, sum(new), DIMENSION)
    key, value = torch.randn(2, 1, step.kv_heads, sum(total), DIMENSION)
    q_ends, k_ends = cumulated(new), cumulated(total)
    seen = torch.zeros(sum(new), sum(total), dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(q_ends.tolist()), itertools.pairwise(k_ends.tolist()), strict=True
    ):
        for row in range(q0, q1):
            last = k1 - (q1 - row)
            first = k0 if step.window is None else max(k0, last - step.window + 1)
            seen[row, first : last + 1] = True
    many = [t.repeat_interleave(step.group, 1) for t in (key, value)]
    expected = F.scaled_dot_product_attention(query, *many, attn_mask=seen, scale=step.scaling).transpose(1, 2)
    layout = None
    if laid_out:
        groups, pieces, places = lay_out(q_ends.tolist(), k_ends.tolist())
        assert set(places.tolist()) == set(range(sum(total)))
        key, value = (x[:, :, places] for x in (key, value))
        layout = Layout(groups, pieces, {LAYER})
    out, weights = split_attention(
        layer(LAYER),
        query,
        key,
        value,
        None,
        cu_seq_lens_q=q_ends,
        cu_seq_lens_k=k_ends,
        scaling=step.scaling,
        sliding_window=step.window,
        layout=layout,
    )
    assert weights is None
    torch.testing.assert_close(out, expected)


@settings(deadline=None)
@given(steps(most_new=7))
def test_prompts_beside_answers(step: Step) -> None:
    check(step)


@settings(deadline=None)
@given(steps(most_new=1))
def test_answers_alone(step: Step) -> None:
    check(step)


@settings(deadline=None)
@given(steps(most_new=4), st.integers(0, 8))
def test_keys_laid_out_in_groups(step: Step, call: int) -> None:
    with pytest.MonkeyPatch.context() as patch:  # the dearer a call, the fewer groups
        patch.setattr(attention, "_LIMITS", replace(attention._LIMITS, launch_cost=call))
        check(step, laid_out=True)


def test_sequences_of_about_one_length_are_one_call() -> None:
    (group,), pieces, places = lay_out([0, 1, 2, 3], [0, 5, 9, 14])
    assert (pieces, group.rows, group.lengths.flatten().tolist(), group.length) == ([], None, [5, 4, 5], 5)
    assert places.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13]
    mask, windowed = (group.mask(window, torch.float32) for window in (None, 2))
    assert mask is not None
    assert windowed is not None
    assert mask.flatten(1).isinf().int().tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert windowed.flatten(1).isinf().int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 1], [1, 1, 1, 0, 0]]


def test_a_long_sequence_pads_no_short_ones() -> None:
    groups, _, _ = lay_out([0, 1, 2, 3], [0, 10, 5010, 5020])
    assert [(len(group.lengths), group.length) for group in groups] == [(2, 10), (1, 5000)]
    assert groups[0].rows is not None
    assert groups[0].rows.tolist() == [0, 2]


def test_what_reads_no_cache_stays_as_it_is() -> None:
    step = {"read_index": [torch.empty(0, dtype=torch.int64)], "cu_seq_lens_q": cumulated([3])}
    found = arranged(step, Caches((0,), frozenset({0, 1}), {2: 7}))
    layout = found.pop("layout")
    assert found == step
    assert (layout.groups, layout.layers, layout.windows) == ((), (), {2: 7})


def test_a_cache_of_windows_is_read_as_it_was() -> None:
    windows, full = torch.arange(4), torch.arange(10, 16)
    step = {
        "read_index": [windows, full],
        "cu_seq_lens_q": cumulated([1, 1]),
        "cu_seq_lens_k": {"full_attention": cumulated([4, 2]), "sliding_attention": cumulated([2, 2])},
    }
    found = arranged(step, Caches((1,), frozenset({1}), {0: 2}))
    assert found["read_index"][0] is windows
    assert found["read_index"][1].tolist() == [10, 11, 12, 13, 14, 15, 15, 15]
    assert step["read_index"] == [windows, full]  # transformers' own stays


def test_a_layer_that_the_layout_is_not_for_reads_by_the_lengths() -> None:
    """One layer's keys come from a cache of windows, whether the layer tells its window or not."""
    torch.manual_seed(0)
    query, (key, value) = torch.randn(1, 2, 2, DIMENSION), torch.randn(2, 1, 2, 5, DIMENSION)
    ends = {"cu_seq_lens_q": cumulated([1, 1]), "cu_seq_lens_k": cumulated([3, 2])}
    expected, _ = split_attention(layer(0), query, key, value, None, sliding_window=2, **ends)
    groups, pieces, _ = lay_out([0, 1, 2], [0, 40, 90])
    layout = Layout(groups, pieces, {1}, {0: 2})
    for window in (2, None):
        out, _ = split_attention(layer(0), query, key, value, None, sliding_window=window, layout=layout, **ends)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_a_layer_wants_beyond_is_refused(name: str) -> None:
    query, ends = torch.zeros(1, 1, 1, DIMENSION), cumulated([1])
    with pytest.raises(NotImplementedError, match=name):
        split_attention(
            torch.nn.Module(), query, query, query, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **{name: query}
        )
