import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.base.modules import dense as oracles
from sentence_transformers.sentence_transformer.modules.pooling import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor

from handlers import pooling
from handlers.config import POOLING, SPLADE_ACTIVATIONS, SPLADE_STRATEGIES
from handlers.pooling import Dense, Head, finish, pool, splade
from handlers.tokens import Layout
from tests.models import write_dense


def states(lengths: list[int], seed: int = 0) -> tuple[Tensor, Layout, Tensor, Layout, Tensor]:
    """Random token states packed and padded: hidden, layout of each, and the padded mask."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, 6, generator=generator) for n in lengths]
    width = max(lengths)
    padded = torch.randn(len(lengths), width, 6, generator=generator)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for i, part in enumerate(parts):
        padded[i, : len(part)] = part
        mask[i, : len(part)] = 1
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    skips = [0] * len(lengths)
    return (
        torch.cat(parts),
        Layout(starts, lengths, skips, packed=True),
        padded,
        Layout([i * width for i in range(len(lengths))], lengths, skips, packed=False),
        mask,
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 9))
def test_equals_sentence_transformers_packed_and_padded(lengths: list[int], seed: int) -> None:
    packed, packed_layout, padded, padded_layout, mask = states(lengths, seed)
    for mode in POOLING:
        oracle = Pooling(6, pooling_mode=mode)({"token_embeddings": padded, "attention_mask": mask})
        for hidden, layout in ((packed, packed_layout), (padded.flatten(0, 1), padded_layout)):
            torch.testing.assert_close(pool(hidden, layout, [mode]), oracle["sentence_embedding"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", POOLING)
def test_a_prompt_left_out_equals_sentence_transformers(mode: str) -> None:
    packed, layout, padded, _, mask = states([5, 8, 6])
    skipping = Layout(layout.starts, layout.lengths, [3, 3, 3], packed=True)
    features = {"token_embeddings": padded, "attention_mask": mask, "prompt_length": 3}
    oracle = Pooling(6, pooling_mode=mode, include_prompt=False)(features)["sentence_embedding"]
    torch.testing.assert_close(pool(packed, skipping, [mode]), oracle, rtol=0, atol=1e-5)


def test_several_modes_are_concatenated() -> None:
    packed, layout, *_ = states([2, 3])
    both = pool(packed, layout, ["cls", "max"])
    assert torch.equal(both, torch.cat([pool(packed, layout, ["cls"]), pool(packed, layout, ["max"])], dim=-1))


@pytest.mark.parametrize("mode", POOLING)
def test_a_spoilt_text_spoils_no_other(mode: str) -> None:
    packed, layout, *_ = states([4, 4, 4])
    clean = pool(packed, layout, [mode])
    packed[4:8] = float("nan")
    spoilt = pool(packed, layout, [mode])
    assert not torch.isfinite(spoilt[1]).any()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


def test_half_states_are_pooled_in_fp32() -> None:
    hidden = torch.full((3000, 1), 60_000.0, dtype=torch.float16)
    assert pool(hidden, Layout([0], [3000], [0], packed=True), ["mean"]).item() == pytest.approx(60_000, rel=1e-3)


def test_dense(tmp_path: Path) -> None:
    write_dense(tmp_path, 6, 4)
    x = torch.randn(3, 6)
    layer = Dense(tmp_path)
    torch.testing.assert_close(layer(x), torch.tanh(layer.linear(x)))
    packed, layout, *_ = states([2, 3])
    assert Head(["mean"], [tmp_path])(packed, layout).shape == (2, 4)


def test_a_dense_layer_without_an_activation_has_sentence_transformers_default(tmp_path: Path) -> None:
    write_dense(tmp_path, 6, 4)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["activation_function"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    x = torch.randn(3, 6)
    torch.testing.assert_close(
        Dense(tmp_path)(x), oracles.Dense.load(str(tmp_path))({"sentence_embedding": x})["sentence_embedding"]
    )


def test_only_torchs_own_activations_are_loaded(tmp_path: Path) -> None:
    write_dense(tmp_path, 6, 4)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("torch.nn.modules.activation.Tanh", "os.system"))
    with pytest.raises(ValueError, match=r"os\.system"):
        Dense(tmp_path)


def test_finish_cuts_first_and_normalises_after() -> None:
    vector = torch.tensor([3.0, 4.0, 12.0])
    assert finish(vector, normalize=False, dimensions=None).tolist() == [3, 4, 12]
    torch.testing.assert_close(finish(vector, normalize=True, dimensions=2), torch.tensor([0.6, 0.8]))


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from(SPLADE_STRATEGIES),
    st.sampled_from(SPLADE_ACTIVATIONS),
)
def test_splade_equals_sentence_transformers_in_slices_of_any_size(
    lengths: list[int], slice_tokens: int, strategy: str, activation: str
) -> None:
    packed, flat, padded, apart, mask = states(lengths)
    words = torch.nn.Linear(6, 11).requires_grad_(False)
    oracle = SpladePooling(strategy, activation).eval()
    expected = oracle({"token_embeddings": words(padded), "attention_mask": mask})["sentence_embedding"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "SPLADE_SLICE", 11 * slice_tokens)
        for hidden, layout in ((packed, flat), (padded.flatten(0, 1), apart)):
            found = splade(hidden, layout, words, vocabulary=11, strategy=strategy, activation=activation)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_word_that_overflows_spoils_its_own_text_alone() -> None:
    hidden, layout, *_ = states([3, 4])
    hidden[1] = torch.nan
    found = splade(hidden, layout, torch.nn.Identity(), vocabulary=6)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
