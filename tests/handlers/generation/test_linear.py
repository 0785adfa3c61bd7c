"""Packed linear layers give the stock product; they are taken where a trial finds them faster, within their room."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from handlers.generation import linear
from handlers.generation.linear import PackedLinear, pack_linears, packable

WIDE, NARROW = 512, 256
SIZE = WIDE * NARROW * 4


class Block(nn.Module):
    """Two layers of one shape, one of another, one too small to pay, and a subclass that knows better."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE, bias=False)
        self.gate = nn.Linear(NARROW, WIDE, bias=False)
        self.down = nn.Linear(WIDE, NARROW)
        self.small = nn.Linear(8, 8)
        self.special = Special(NARROW, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x) * self.up(x)) + self.special(x).mean()


class Special(nn.Linear):
    """Not nn.Linear itself."""


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the trials measure what the test says: packed ÷ stock for each of ROWS."""

    def say(*shares: float) -> None:
        told = iter(value for _ in range(10) for share in shares for value in (1.0, share))
        monkeypatch.setattr(linear, "_seconds", lambda work: next(told))

    return say


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    least=st.integers(1, 8),
    dtype=st.sampled_from([dtype for dtype in (torch.float32, torch.bfloat16) if packable(dtype)]),
)
def test_the_product_is_the_stock_one(
    rows: int, inputs: int, outputs: int, bias: bool, least: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(1, rows, inputs, dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(layer, least)(x), F.linear(x, layer.weight, layer.bias))


def test_layers_that_gain_are_packed_and_share_their_parameters(times: Callable[..., None]) -> None:
    model, x = Block().eval(), torch.randn(1, 6, NARROW)
    weight = model.up.weight
    with torch.inference_mode():
        before = model(x)
        times(1.2, 0.8, 0.5)
        taken = pack_linears(model, 10 * SIZE)
        torch.testing.assert_close(model(x), before)
    assert taken == 3 * SIZE
    assert type(model.up) is type(model.gate) is type(model.down) is PackedLinear
    assert model.up.weight is weight
    assert model.up.rows == 2  # one row is slower packed
    assert type(model.small) is nn.Linear
    assert type(model.special) is Special


@pytest.mark.parametrize("shares", [(1.0, 1.0, 0.9), (0.5, 0.5, 1.01)], ids=["little", "slower-when-full"])
def test_what_gains_too_little_stays(times: Callable[..., None], shares: tuple[float, ...]) -> None:
    model = Block()
    times(*shares)
    assert pack_linears(model, 10 * SIZE) == 0
    assert type(model.up) is nn.Linear


def test_copies_stay_within_their_room(times: Callable[..., None]) -> None:
    model = Block()
    times(0.5, 0.5, 0.5)
    assert pack_linears(model, SIZE) == SIZE  # the two wide ones would take twice that
    assert type(model.up) is nn.Linear
    assert type(model.down) is PackedLinear


def test_half_precision_is_left_to_torch(times: Callable[..., None]) -> None:
    model = Block().half()
    times(0.5, 0.5, 0.5)
    assert pack_linears(model, 10 * SIZE) == 0


def test_the_trial_leaves_the_threads_as_they_were() -> None:
    threads = torch.get_num_threads()
    pack_linears(Block(), 10 * SIZE)
    assert torch.get_num_threads() == threads
