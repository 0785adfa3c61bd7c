import base64
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from handlers import serialise
from handlers.serialise import base64_array, dumps, is_finite

LIBRARIES = ["orjson", "json"]


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "json":
        monkeypatch.setattr(serialise, "orjson", None)
    return str(request.param)


@pytest.mark.parametrize("library", LIBRARIES)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_numbers_round_trip_float32(library: str, numbers: list[float]) -> None:
    vector = np.array(numbers, dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        if library == "json":
            patch.setattr(serialise, "orjson", None)
        raw = dumps({"é": [vector]})
    assert b" " not in raw
    assert np.array_equal(np.array(json.loads(raw)["é"][0], dtype=np.float32), vector)


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_other_arrays_and_numbers(library: str) -> None:
    values = {
        "int8": np.array([-128, 127], dtype=np.int8),
        "matrix": np.array([[0.1, 2.0]], dtype=np.float32),
        "number": np.float32(0.1),
        "count": np.int64(3),
    }
    assert json.loads(dumps(values)) == {"int8": [-128, 127], "matrix": [[0.1, 2.0]], "number": 0.1, "count": 3}


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
@pytest.mark.parametrize("value", [torch.ones(2), {"a": torch.tensor(1.0)}, object(), b"bytes"])
def test_what_is_no_json_is_refused(library: str, value: object) -> None:
    with pytest.raises(TypeError):
        dumps(value)


@given(st.lists(st.floats(width=32), max_size=20))
def test_base64_is_little_endian_float32(numbers: list[float]) -> None:
    vector = np.array(numbers, dtype=np.float32)
    read_back = np.frombuffer(base64.b64decode(base64_array(vector)), dtype="<f4")
    assert np.array_equal(read_back, vector, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "finite"),
    [
        (1.5, True), (float("nan"), False), ({"a": [1, {"b": float("inf")}]}, False),
        ({"a": ["nan", None, True]}, True),
        (np.zeros(3, dtype=np.float32), True), (np.array([0, np.nan, 1], dtype=np.float32), False),
        ([np.array([-np.inf])], False), (np.zeros(0), True), (np.zeros(3, dtype=np.int8), True),
        (np.float32("nan"), False),
    ],
)  # fmt: skip
def test_numbers_that_json_does_not_have(value: Any, finite: bool) -> None:
    assert is_finite(value) is finite
