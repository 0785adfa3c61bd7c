"""Quantised vectors. Oracle: sentence-transformers' quantize_embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file
from sentence_transformers.util.quantization import quantize_embeddings

from handlers.pooling import finish
from handlers.quantization import CALIBRATED, DTYPES, VECTORS, Calibration, quantize, width

numbers = st.floats(-100, 100, width=32)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 20))


@settings(deadline=None)
@given(st.data(), shapes, st.sampled_from(DTYPES))
def test_equals_sentence_transformers(data: st.DataObject, shape: tuple[int, int], dtype: str) -> None:
    vectors = data.draw(arrays.arrays(np.float32, shape, elements=numbers))
    ranges = None
    if dtype in CALIBRATED:
        ranges = np.sort(data.draw(arrays.arrays(np.float32, (2, shape[1]), elements=numbers)), axis=0)
    found = quantize(vectors, dtype, ranges)
    expected = quantize_embeddings(vectors, dtype, ranges=ranges)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (shape[0], width(shape[1], dtype))


@pytest.mark.parametrize("dimensions", [None, 5])
@pytest.mark.parametrize("normalize", [True, False])
def test_ranges_are_those_of_the_finished_vectors(tmp_path: Path, normalize: bool, dimensions: int | None) -> None:
    vectors = torch.randn(9, 12, generator=torch.Generator().manual_seed(0))
    save_file({VECTORS: vectors}, tmp_path / "calibration.safetensors")
    calibration = Calibration(tmp_path / "calibration.safetensors", 12)
    for _ in range(2):
        low, high = calibration.ranges(normalize=normalize, dimensions=dimensions)
        finished = finish(vectors, normalize=normalize, dimensions=dimensions).numpy()
        np.testing.assert_array_equal((low, high), (finished.min(axis=0), finished.max(axis=0)))


def test_any_number_of_dimensions_may_be_asked_for(tmp_path: Path) -> None:
    save_file({VECTORS: torch.randn(3, 200)}, tmp_path / "calibration.safetensors")
    calibration = Calibration(tmp_path / "calibration.safetensors", 200)
    for dimensions in (*range(1, 201), 1):
        assert calibration.ranges(normalize=True, dimensions=dimensions).shape == (2, dimensions)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_file({VECTORS: torch.randn(3, 8)}, tmp_path / "calibration.safetensors")
    with pytest.raises(ValueError, match="no vectors of 9"):
        Calibration(tmp_path / "calibration.safetensors", 9)
    with pytest.raises(ValueError, match="needs ranges"):
        quantize(np.zeros((1, 2), np.float32), "int8")
