"""Attention within each sequence equals attention under one mask, however the keys are laid out."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from handlers.generation import layout as layouts
from handlers.generation.attention import split_attention
from handlers.generation.cache_reader import Handed
from handlers.generation.layout import Layout, lay_out

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


def check(step: Step, *, laid_out: bool = False, cached: bool = False, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(len(step.lengths))
    new = [a for a, _ in step.lengths]
    total = [a + b for a, b in step.lengths]
    if step.window is not None and not laid_out:
        # the cache hands over so many: a window's earlier tokens are gone
        total = [min(t, a + step.window - 1) for a, t in zip(new, total, strict=True)]
    query = torch.randn(1, step.kv_heads * step.group, sum(new), DIMENSION, dtype=dtype)
    key, value = torch.randn(2, 1, step.kv_heads, sum(total), DIMENSION, dtype=dtype)
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
    layout = handed = None
    if laid_out:
        groups, pieces, places = lay_out(q_ends.tolist(), k_ends.tolist())
        assert set(places.tolist()) == set(range(sum(total)))
        layout = Layout(groups, pieces, {LAYER})
        if cached:  # its tokens lie about in a larger cache, and the layer hands over the new ones alone
            index = torch.randperm(2 * sum(total))[: sum(total)]
            layout = Layout(groups, pieces, {LAYER}, None, index[places])
            cache = torch.randn(2, 2 * sum(total), step.kv_heads, DIMENSION, dtype=dtype)
            cache[:, index] = torch.stack([key, value])[:, 0].transpose(1, 2)
            key, value = torch.randn(2, 1, step.kv_heads, sum(new), DIMENSION, dtype=dtype)
            handed = Handed(key, value, (cache[0], cache[1]), lambda as_they_are: None)
        else:
            key, value = (x[:, :, places] for x in (key, value))
            handed = Handed(key, value, None, lambda as_they_are: None)
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
        handed=handed,
    )
    assert weights is None
    torch.testing.assert_close(out, expected, **({} if dtype != torch.bfloat16 else {"rtol": 0.02, "atol": 0.02}))


@settings(deadline=None)
@given(steps(most_new=7))
def test_prompts_beside_answers(step: Step) -> None:
    check(step)


@settings(deadline=None)
@given(steps(most_new=1))
def test_answers_alone(step: Step) -> None:
    check(step)


@settings(deadline=None)
@given(
    steps(most_new=4), st.integers(0, 8), st.booleans(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
)
def test_keys_laid_out_in_groups(step: Step, call: int, cached: bool, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:  # the dearer a call, the fewer groups
        patch.setattr(layouts, "_LIMITS", replace(layouts._LIMITS, launch_cost=call))
        check(step, laid_out=True, cached=cached, dtype=dtype)


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


@pytest.mark.parametrize("number", [None, 3])
def test_a_layer_that_reads_anothers_keys_is_refused(number: int | None) -> None:
    """In a step that only has prompts, and in one that reads the cache."""
    query, ends = torch.zeros(1, 1, 1, DIMENSION), cumulated([1])
    module = torch.nn.Module() if number is None else layer(number)
    of_kinds = {"full_attention": ends} if number is None else ends
    layout = Layout(*lay_out([0, 1], [0, 1])[:2], {3})
    with pytest.raises(NotImplementedError, match="another's keys"):
        split_attention(module, query, query, query, None, cu_seq_lens_q=ends, cu_seq_lens_k=of_kinds, layout=layout)


def test_a_mask_of_the_layers_own_is_refused() -> None:
    query, ends = torch.zeros(1, 1, 1, DIMENSION), cumulated([1])
    with pytest.raises(NotImplementedError, match="mask of its own"):
        split_attention(layer(0), query, query, query, query, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_a_layer_wants_beyond_is_refused(name: str) -> None:
    query, ends = torch.zeros(1, 1, 1, DIMENSION), cumulated([1])
    with pytest.raises(NotImplementedError, match=name):
        split_attention(
            torch.nn.Module(), query, query, query, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **{name: query}
        )
