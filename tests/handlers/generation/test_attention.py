"""Attention sequence by sequence equals attention under one mask."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from handlers.generation.attention import split_attention

DIMENSION = 8


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


def check(step: Step) -> None:
    torch.manual_seed(len(step.lengths))
    new = [a for a, _ in step.lengths]
    total = [a + b for a, b in step.lengths]
    if step.window is not None:
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
    out, weights = split_attention(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        cu_seq_lens_q=q_ends,
        cu_seq_lens_k=k_ends,
        scaling=step.scaling,
        sliding_window=step.window,
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


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_a_layer_wants_beyond_is_refused(name: str) -> None:
    query, ends = torch.zeros(1, 1, 1, DIMENSION), cumulated([1])
    with pytest.raises(NotImplementedError, match=name):
        split_attention(
            torch.nn.Module(), query, query, query, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **{name: query}
        )
