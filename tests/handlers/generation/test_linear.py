"""Layers in another layout give the stock product; they are taken where a trial finds them faster."""

import itertools
import math
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from handlers.generation import linear
from handlers.generation.linear import PackedLinear, blocked, halved, pack_linears

WIDE, NARROW = 512, 256
SIZE = WIDE * NARROW * 4
NO_HALVES = not linear._fbgemm()


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


class Tied(nn.Module):
    """A head on the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDE, NARROW)
        self.head = nn.Linear(NARROW, WIDE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def as_published(model: nn.Module) -> nn.Module:
    """Float32 weights that half precision holds exactly."""
    return model.half().float().eval()


class Special(nn.Linear):
    """Not nn.Linear itself."""


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the trials measure what the test says: the other layout ÷ stock for each of ROWS."""

    def say(*shares: float) -> None:
        told = itertools.cycle(shares)
        monkeypatch.setattr(linear, "_seconds", lambda *works: [1.0, next(told)])

    return say


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    least=st.integers(1, 8),
    lay_out=st.sampled_from([blocked, halved]),
)
def test_the_product_is_the_stock_one(
    rows: int, inputs: int, outputs: int, bias: bool, least: int, lay_out: Callable[[nn.Linear], linear.Layout | None]
) -> None:
    torch.manual_seed(rows)
    layer = as_published(nn.Linear(inputs, outputs, bias=bias))
    assert isinstance(layer, nn.Linear)
    x = torch.randn(1, rows, inputs)
    layout = lay_out(layer)
    if layout is None:
        assert lay_out is halved
        assert NO_HALVES
        return
    with torch.inference_mode():
        packed = PackedLinear(layer, layout, least)
        torch.testing.assert_close(packed(x), F.linear(x, layer.weight, layer.bias))
        assert torch.equal(packed.weight, layer.weight)  # also where the layer let it go


@pytest.mark.skipif(not linear._onednn(torch.bfloat16), reason="no bfloat16 instructions")
def test_bfloat16_is_blocked() -> None:
    layer, x = nn.Linear(70, 50, dtype=torch.bfloat16), torch.randn(1, 5, 70, dtype=torch.bfloat16)
    layout = blocked(layer)
    assert layout is not None
    with torch.inference_mode():
        torch.testing.assert_close(layout.product(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.skipif(NO_HALVES, reason="no FBGEMM on this processor")
class TestHalves:
    """Weights are kept in half precision only where that changes nothing that float32 shows."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_published_checkpoints_are_held(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(NARROW, WIDE)
        layer.weight.data = (0.05 * torch.randn(WIDE, NARROW)).to(dtype).float()
        layout, x = halved(layer), torch.randn(3, NARROW)
        assert layout is not None
        with torch.inference_mode():
            exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
            error = (layout.product(x) - exact).norm() / exact.norm()
        assert error < 1e-6  # of float32; of half precision it would be 2e-4

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda weight: weight.normal_(),
            lambda weight: weight[3].fill_(0.1),
            lambda weight: weight[3].fill_(70_000.0),
            lambda weight: weight[3].fill_(1e-7),
            lambda weight: weight[3, 3].fill_(math.nan),
        ],
        ids=["trained in float32", "one row", "too large", "too small", "not a number"],
    )
    def test_others_are_not(self, spoil: Callable[[torch.Tensor], object]) -> None:
        layer = as_published(nn.Linear(NARROW, WIDE))
        assert isinstance(layer, nn.Linear)
        assert halved(layer) is not None
        with torch.no_grad():
            spoil(layer.weight)
        assert halved(layer) is None

    def test_what_is_faster_for_any_rows_lets_its_weight_go(self, times: Callable[..., None]) -> None:
        model, x = as_published(Block()), torch.randn(1, 6, NARROW)
        up = weakref.ref(model.up.weight)
        with torch.inference_mode():
            before = model(x)
            times(0.9, 0.5, 0.5, 0.5)
            assert pack_linears(model, SIZE) == 3 * SIZE // 2  # the three together are larger than the room
            torch.testing.assert_close(model(x), before)
        assert up() is None

    def test_a_weight_that_others_use_stays(self, times: Callable[..., None]) -> None:
        model, x = as_published(Tied()), torch.arange(5)[None]
        with torch.inference_mode():
            before = model(x)
            times(0.5, 0.5, 0.5, 0.5)
            assert pack_linears(model, SIZE) == SIZE // 2
            torch.testing.assert_close(model(x), before, atol=1e-4, rtol=1e-5)


def test_layers_that_gain_are_packed_and_share_their_parameters(times: Callable[..., None]) -> None:
    model, x = Block().eval(), torch.randn(1, 6, NARROW)
    weight = model.up.weight
    with torch.inference_mode():
        before = model(x)
        times(1.2, 0.8, 0.5, 0.5)
        taken = pack_linears(model, 10 * SIZE)
        torch.testing.assert_close(model(x), before)
    assert taken == 3 * SIZE
    assert type(model.up) is type(model.gate) is type(model.down) is PackedLinear
    assert model.up.weight is weight
    assert model.up.rows == 2  # one row is slower packed
    assert type(model.small) is nn.Linear
    assert type(model.special) is Special


@pytest.mark.parametrize("shares", [(1.0, 1.0, 0.9, 0.9), (0.8, 0.8, 1.0, 1.2)], ids=["little", "slower for prompts"])
def test_what_gains_too_little_stays(times: Callable[..., None], shares: tuple[float, ...]) -> None:
    model = Block()
    times(*shares)
    assert pack_linears(model, 10 * SIZE) == 0
    assert type(model.up) is nn.Linear


def test_copies_stay_within_their_room(times: Callable[..., None]) -> None:
    model = Block()
    times(1.1, 0.5, 0.5, 0.5)
    assert pack_linears(model, SIZE) == SIZE
    packed = [type(layer) is PackedLinear for layer in (model.up, model.gate, model.down)]
    assert packed.count(True) == 1


def test_half_precision_is_left_to_torch(times: Callable[..., None]) -> None:
    model = Block().half()
    times(0.5, 0.5, 0.5, 0.5)
    assert pack_linears(model, 10 * SIZE) == 0


def test_a_trial_knows_the_faster_one() -> None:
    slow, fast = (lambda seconds=seconds: time.sleep(seconds) for seconds in (0.02, 0.002))
    first, second = linear._seconds(slow, fast)
    assert first > 2 * second
