"""What every codec answers an embedding in: a client gets the shape it spoke, errors included."""

import json
from typing import Any

import numpy as np
import pytest

from handlers import protocol
from handlers.decoding import Call
from handlers.errors import ModelFailure
from handlers.request import Usage
from tests.handlers.test_protocol import TASK, codec_of

VECTOR = np.array([0.1, -1e-8, 3.0], dtype=np.float32)


def answer(body: Any, cut: int = 2) -> Any:
    codec = codec_of(body)
    request = protocol.read(Call(body), codec, TASK)
    return json.loads(codec.write(request, [VECTOR], TASK, "minilm", Usage(7, cut)))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text": "a"}, {"embedding": [0.1, -1e-8, 3.0]}),
        ({"texts": ["a"]}, {"embeddings": [[0.1, -1e-8, 3.0]]}),
        ({"inputs": "a"}, [[0.1, -1e-8, 3.0]]),
        ({"instances": ["a"]}, {"predictions": [[0.1, -1e-8, 3.0]]}),
        (
            {"input": "a"},
            {
                "object": "list",
                "data": [{"object": "embedding", "index": 0, "embedding": [0.1, -1e-8, 3.0]}],
                "model": "minilm",
                "usage": {"prompt_tokens": 7, "total_tokens": 7, "truncated_tokens": 2},
            },
        ),
    ],
)
def test_a_client_gets_the_shape_it_spoke(body: Any, expected: Any) -> None:
    assert answer(body) == expected


def test_usage_names_no_cut_where_there_was_none() -> None:
    assert answer({"input": "a"}, 0)["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


def test_errors_in_openai_form() -> None:
    error = ModelFailure("It broke.", code="non_finite", param="input[2]")
    assert json.loads(codec_of({"input": "a"}).refuse(error, {})) == {
        "error": {"code": "non_finite", "message": "It broke.", "param": "input[2]", "type": "server_error"}
    }
