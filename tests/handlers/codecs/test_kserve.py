import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.codecs.kserve import LONGEST_ID, V2
from handlers.request import Pair
from handlers.serialise import dumps
from tests.handlers.codecs.tasks import CLASSIFICATION, EMBEDDING, fault, read, write
from tests.strategies import json_values

# What orjson writes: its integers have 64 bits
results = json_values.filter(lambda value: len(str(value)) < 15 or not any(map(str.isdigit, str(value))))


def tensor(data: Any, *shape: int, name: str = "text", datatype: str = "BYTES", **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data, **more}


def body(*tensors: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": list(tensors), **more}


class TestV1:
    def test_instances_or_inputs(self) -> None:
        route = "v1/models/m:predict"
        for name in ("instances", "inputs"):
            request = read({name: ["a", {"text": "b"}], "parameters": {"truncate": False}}, route=route)
            assert (request.items, dict(request.options)) == (("a", "b"), {"truncate": False})
        assert json.loads(write({"instances": ["a"]}, [[1]])) == {"predictions": [[1]]}

    @pytest.mark.parametrize(
        ("sent", "code", "param"),
        [
            ({}, "missing_field", "instances"),
            ({"instances": None, "inputs": ["a"]}, "missing_field", "instances"),
            ({"instances": "a"}, "invalid_type", "instances"),
            ({"instances": []}, "empty_list", "instances"),
            ({"inputs": ["a", 3]}, "invalid_type", "inputs[1]"),
            ({"instances": ["a"], "signature": "x"}, "unknown_option", "signature"),
        ],
    )
    def test_faults(self, sent: Any, code: str, param: str) -> None:
        found, answer = fault(sent, route="v1/models/m:predict")
        assert found == (400, code, param)
        assert isinstance(answer["error"], str)


class TestV2:
    @pytest.mark.parametrize(
        ("sent", "items"),
        [
            (body(tensor(["a", "b"], 2)), ("a", "b")),
            (body(tensor(["a", "b"], 2, 1, name="anything")), ("a", "b")),
            (body(tensor([["a"], ["b"]], 2, 1)), ("a", "b")),
            (body(tensor([1, 2], 2, name="input_ids", datatype="INT64")), ((1, 2),)),
            (body(tensor([1, 2, 3, 4], 2, 2, name="input_ids", datatype="INT32")), ((1, 2), (3, 4))),
            (
                body(
                    tensor([[1, 2], [3, 0]], 2, 2, name="input_ids", datatype="INT64"),
                    tensor([1, 1, 1, 0], 2, 2, name="attention_mask", datatype="INT64"),
                    tensor([0, 0, 0, 0], 2, 2, name="token_type_ids", datatype="INT64"),
                ),
                ((1, 2), (3,)),
            ),
            (body(tensor(["a"], 1, parameters={"content_type": "str"}), outputs=[{"name": "embedding"}]), ("a",)),
        ],
    )
    def test_requests(self, sent: Any, items: tuple[Any, ...]) -> None:
        for route in ("", "v2/models/m/infer", "v2/models/m/versions/1.0/infer"):
            assert read(sent, route=route).items == items

    def test_fields_are_tensors(self) -> None:
        pairs = (Pair("a", "c"), Pair("b", "d"))
        columns = body(tensor(["a", "b"], 2), tensor(["c", "d"], 2, name="text_pair"))
        assert read(columns, CLASSIFICATION).items == pairs
        assert read(body(tensor(["a", "c", "b", "d"], 2, 2)), CLASSIFICATION).items == pairs

    @pytest.mark.parametrize(
        ("tensors", "code", "param"),
        [
            ([], "empty_list", "inputs"),
            (["a"], "invalid_type", "inputs[0]"),
            ([tensor(["a"], 1) | {"name": 3}], "invalid_type", "inputs[0].name"),
            ([tensor(["a"], 1), tensor(["b"], 1)], "ambiguous_input", "inputs[1].name"),
            ([tensor([0.5], 1, datatype="FP32")], "invalid_value", "inputs[0].datatype"),
            ([tensor(["a"], 1, datatype="bytes")], "invalid_value", "inputs[0].datatype"),
            ([tensor(["a"], 1) | {"datatype": ["BYTES"]}], "invalid_value", "inputs[0].datatype"),
            ([tensor(["a"], -1)], "invalid_value", "inputs[0].shape"),
            ([tensor(["a"], 0)], "invalid_value", "inputs[0].shape"),
            ([tensor(["a"])], "invalid_value", "inputs[0].shape"),
            ([tensor(["a"], 1, 1, 1)], "invalid_value", "inputs[0].shape"),
            ([tensor(["a"], 1) | {"shape": [True]}], "invalid_value", "inputs[0].shape"),
            ([tensor(["a"], 10**30, 10**5000)], "invalid_value", "inputs[0].data"),
            ([tensor(["a", "b"], 3)], "invalid_value", "inputs[0].data"),
            ([tensor([], 1)], "empty_list", "inputs[0].data"),
            ([tensor(None, 1)], "invalid_type", "inputs[0].data"),
            ([tensor([["a"], "b"], 2)], "invalid_type", "inputs[0].data[1]"),
            ([tensor(["a", 3], 2)], "invalid_type", "data[1]"),
            ([tensor([1, "b"], 1, 2, datatype="INT64")], "invalid_type", "data[0][1]"),
            ([tensor(["a"], 1, parameters={"content_type": "base64"})], "invalid_value", "inputs[0].parameters"),
            ([tensor(["a"], 1), tensor(["b"], 1, name="other")], "unknown_field", "inputs"),
            ([tensor([1], 1, name="attention_mask", datatype="INT64")], "unknown_field", "inputs"),
        ],
    )
    def test_faults(self, tensors: Any, code: str, param: str) -> None:
        found, answer = fault(body(*tensors, id="7"))
        if not tensors or not isinstance(tensors[0], dict):
            found, answer = fault(body(*tensors, id="7"), route="v2/models/m/infer")
        assert found == (400, code, param)
        assert (answer["id"], isinstance(answer["error"], str)) == ("7", True)

    @pytest.mark.parametrize(
        ("mask", "shape"), [([1, 1], (2,)), ([1, 2], (1, 2)), (["1", "0"], (1, 2)), ([True, False], (1, 2))]
    )
    def test_masks(self, mask: list[Any], shape: tuple[int, ...]) -> None:
        ids = tensor([1, 2], 1, 2, name="input_ids", datatype="INT64")
        found, _ = fault(body(ids, tensor(mask, *shape, name="attention_mask", datatype="INT64")))
        assert found == (400, "invalid_value", "inputs")

    def test_an_instance_that_is_all_padding(self) -> None:
        ids = tensor([1, 2], 1, 2, name="input_ids", datatype="INT64")
        found, _ = fault(body(ids, tensor([0, 0], 1, 2, name="attention_mask", datatype="INT64")))
        assert found == (400, "empty_list", "data[0]")

    def test_columns_of_other_lengths(self) -> None:
        for other in (tensor(["c"], 1, name="text_pair"), tensor(["c", "d", "e", "f"], 2, 2, name="text_pair")):
            found, _ = fault(body(tensor(["a", "b"], 2), other), CLASSIFICATION)
            assert found == (400, "invalid_value", "inputs")

    def test_too_many(self) -> None:
        for tensors in (tensor(["a"] * 4, 4), tensor([1] * 4, 4, 1, datatype="INT64")):
            found, _ = fault(body(tensors), max_items=3)
            assert found == (413, "too_many_items", "data")

    @pytest.mark.parametrize("wanted", [[{"name": "other"}], [3], "embedding", []])
    def test_outputs_that_are_not_there(self, wanted: Any) -> None:
        (status, _, param), _ = fault(body(tensor(["a"], 1), outputs=wanted))
        assert (status, param.partition("[")[0]) == (400, "outputs")

    @pytest.mark.parametrize("identity", [3, "x" * (LONGEST_ID + 1), "é" * LONGEST_ID, "\ud800", ["a"]])
    def test_ids_that_cannot_go_back(self, identity: Any) -> None:
        """An error of some MB, or one that is no UTF-8, would take the worker with it."""
        found, answer = fault(body(tensor(["a"], 1), id=identity))
        assert found == (400, "invalid_value", "id")
        assert "id" not in answer

    def test_arrays_are_one_tensor(self) -> None:
        rows = [np.array([0.1, -1e-8], dtype=np.float32), np.array([2, 3], dtype=np.float32)]
        sent = body(tensor(["a", "b"], 2), id="42")
        content = write(sent, rows)
        assert json.loads(content) == {
            "model_name": "tiny",
            "id": "42",
            "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [2, 2], "data": [0.1, -1e-8, 2.0, 3.0]}],
        }
        assert b"0.1,-1e-8,2.0,3.0" in content, "the shortest numbers: a bound on the answer counts on them"
        grid = json.loads(write(sent, [np.ones((2, 3), dtype=np.int8)] * 2))["outputs"][0]
        assert (grid["shape"], grid["datatype"], grid["data"]) == ([2, 2, 3], "INT8", [1] * 12)

    def test_all_else_is_bytes(self) -> None:
        ragged = [np.ones(2, dtype=np.float32), np.ones(3, dtype=np.float32)]
        output = json.loads(write(body(tensor(["a", "b"], 2)), ragged))["outputs"][0]
        assert (output["datatype"], output["shape"], output["data"]) == ("BYTES", [2], ["[1.0,1.0]", "[1.0,1.0,1.0]"])
        texts = json.loads(write(body(tensor(["a"], 1)), ["plain"], CLASSIFICATION))["outputs"][0]
        assert (texts["name"], texts["data"]) == ("label", ["plain"])

    @given(st.lists(results, min_size=1, max_size=3))
    def test_what_is_quoted_is_at_most_twice_as_long(self, results: list[Any]) -> None:
        sent = body(tensor(["a"] * len(results), len(results)))
        sizes = sum(V2().bound(len(dumps(result)), CLASSIFICATION) for result in results)
        assert len(write(sent, results, CLASSIFICATION)) <= sizes + 1024
        assert V2().bound(100, replace(EMBEDDING, arrays=True)) < V2().bound(100, CLASSIFICATION), (
            "but arrays are not quoted"
        )
