from typing import Any

import pytest

from handlers.config import ConfigError, HandlerConfig, resolve_dtype


def test_defaults_and_conversions() -> None:
    config = HandlerConfig.from_mapping({"task": "embedding", "pooling": "cls", "dense": ["2_Dense"], "prompts": None})
    assert config.pooling == ("cls",)
    assert config.dense == ("2_Dense",)
    assert config.prompts == {}
    assert config.max_response_bytes == 6_553_500


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({}, "'task' is missing"),
        ({"task": "embedding", "max_token": 5}, "did you mean 'max_tokens'"),
        ({"task": "embedding", "max_tokens": "5"}, "max_tokens must be int, not str"),
        ({"task": "embedding", "max_tokens": True}, "max_tokens must be int, not bool"),
        ({"task": "embedding", "max_tokens": 0}, "at least 1"),
        ({"task": "embedding", "threads": 0}, "at least 1"),
        ({"task": "embedding", "dtype": "fp16"}, "allowed are auto, float32"),
        ({"task": "embedding", "attention": "flash"}, "allowed are auto, packed"),
        ({"task": "embedding", "pooling": ["mean", "first"]}, "pooling mode 'first'"),
        ({"task": "embedding", "pooling": []}, "names no mode"),
        ({"task": "embedding", "pooling": 3}, "a string or a list of strings"),
        ({"task": "embedding", "prompts": {"query": 1}}, "must map names to texts"),
        ({"task": "embedding", "default_prompt_name": "query"}, "not among the prompts"),
        ({"task": "embedding", "model": "../elsewhere"}, "inside the archive"),
        ({"task": "embedding", "dense": ["/etc"]}, "inside the archive"),
    ],
)
def test_what_is_wrong_is_named(mapping: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        HandlerConfig.from_mapping(mapping)


@pytest.mark.parametrize(
    ("requested", "device", "family", "bf16", "expected"),
    [
        ("auto", "cpu", "bert", True, "float32"),
        ("auto", "cuda", "bert", True, "float16"),
        ("auto", "cuda", "t5", True, "bfloat16"),
        ("auto", "cuda", "t5", False, "float32"),
        ("auto", "cpu", "t5", True, "float32"),
        ("bfloat16", "cpu", "bert", True, "bfloat16"),
        ("float16", "cuda", "gemma3_text", True, "bfloat16"),
        ("float16", "cuda", "bert", True, "float16"),
        ("float32", "cuda", "t5", True, "float32"),
    ],
)
def test_dtype_table(requested: str, device: str, family: str, bf16: bool, expected: str) -> None:
    assert resolve_dtype(requested, device, family, bf16_on_device=bf16) == expected
