"""What holds for every codec, whatever a client sends."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers import protocol
from handlers.decoding import Call
from handlers.errors import RequestError
from handlers.request import Task
from tests.handlers.codecs.tasks import TASKS, codec_of
from tests.strategies import json_values

_KEYS = st.sampled_from(
    ["text", "texts", "inputs", "instances", "input", "query", "documents", "id", "outputs", "parameters", "raw_scores"]
)
_TENSORS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.sampled_from(["text", "input_ids", "attention_mask", "x", 3]),
            "datatype": st.sampled_from(["BYTES", "INT64", "FP32", 3]),
            "shape": st.lists(st.integers(-1, 3), max_size=3),
            "data": st.lists(
                st.text(max_size=3) | st.integers(0, 5) | st.lists(st.integers(0, 1), max_size=2), max_size=4
            ),
        },
    ),
    max_size=3,
)
bodies = (
    json_values
    | st.dictionaries(_KEYS, json_values | _TENSORS | st.lists(st.text(max_size=3), max_size=3), max_size=4)
    | st.lists(json_values.map(json.dumps), max_size=3).map("\n".join)
    | st.text(max_size=20)
)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.nouns.one)
@settings(deadline=None, max_examples=60)
@given(bodies)
def test_no_body_raises_anything_but_a_request_error(task: Task, body: Any) -> None:
    for route in (*task.routes, "", "v1/models/m:predict", "v2/models/m/infer"):
        for kind in ("application/json", "application/jsonlines", "text/csv") if not route else ("application/json",):
            codec = protocol.by_route(route, kind, task)
            call = Call(body, route)
            try:
                codec = protocol.by_body(codec, call, task)
                request = protocol.read(call, codec, task)
                assert len(request.items) >= 1
                assert all(isinstance(request.param(i), str) for i in range(len(request.items)))
            except RequestError as error:
                content = json.loads(codec.refuse(error, codec.echo(call)).decode("ascii"))
                inner = content["error"] if isinstance(content.get("error"), dict) else content
                assert (inner["code"], inner["param"]) == (error.code, error.param)
                assert 400 <= codec.status(error) < 500


def test_the_codecs_of_tasks() -> None:
    assert {type(codec_of({}, task, route)).__name__ for task in TASKS for route in task.routes} == {
        "Embed", "Embeddings", "Predict", "Rerank",
    }  # fmt: skip
