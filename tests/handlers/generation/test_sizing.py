"""What fits into the cache, and what is refused with the way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.config import ConfigError
from handlers.generation.settings import GenerationConfig
from handlers.generation.sizing import Geometry, sizes

SMOL = Geometry(layers=30, kv_heads=3, head_dim=64, bytes_per_value=4, positions=8192)


@given(
    budget=st.integers(10**7, 10**10),
    page=st.integers(4, 512),
    slots=st.integers(1, 64),
    positions=st.none() | st.integers(2, 10**5),
)
def test_the_cache_holds_the_longest_sequence_and_fits(
    budget: int, page: int, slots: int, positions: int | None
) -> None:
    geometry = Geometry(30, 3, 64, 4, positions)
    if budget < geometry.block_bytes(page):
        with pytest.raises(ConfigError, match="hold no block"):
            sizes(geometry, "cpu", budget, page_size=page, slots=slots)
        return
    found = sizes(geometry, "cpu", budget, page_size=page, slots=slots)
    assert found.blocks * geometry.block_bytes(page) <= budget
    assert 2 <= found.max_model_len <= found.tokens
    assert found.longest_at_once >= 1
    assert positions is None or found.max_model_len <= positions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 8193}, "set at most 8192"),
        ({"max_model_len": 4000, "num_blocks": 100}, "to at most 3200, or num_blocks to at least 125"),
        ({"page_size": 2}, "at least 4"),
        ({"max_batch_tokens": 8, "slots": 16}, "to at least 16, or batchSize to at most 8"),
        ({"max_model_len": 1}, "at least 2"),
    ],
)
def test_impossible_sizes_name_the_way_out(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sizes(SMOL, "cpu", 2**31, **options)


@pytest.mark.parametrize(
    ("options", "batch_size"),
    [
        ({"num_blocks": 160}, 10),  # 160 blocks of 32 tokens, 16 for a usual request
        ({"num_blocks": 16, "max_model_len": 64}, 8),
        ({"num_blocks": 3}, 1),
        ({"num_blocks": 100_000}, 256),
        ({"num_blocks": 100_000, "max_batch_tokens": 40}, 40),
    ],
)
def test_a_batch_size_suits_the_cache(options: dict[str, int], batch_size: int) -> None:
    found = sizes(SMOL, "cpu", 2**31, **options)
    assert (found.batch_size, found.queue) == (batch_size, 4 * batch_size)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"task": "embedding"}, "this handler is for 'generation'"),
        ({}, "'task' is missing"),
        ({"task": "generation", "max_modellen": 5}, "did you mean 'max_model_len'"),
        ({"task": "generation", "page_size": "a"}, "page_size must be"),
        ({"task": "generation", "page_size": 0}, "at least 1"),
        ({"task": "generation", "cache_gib": -1}, "above 0"),
        ({"task": "generation", "cache_gib": 1, "num_blocks": 5}, "give one"),
        ({"task": "generation", "engine": "other"}, "allowed are transformers, vllm"),
        ({"task": "generation", "engine_options": {"a": 1}}, "are for engine: vllm"),
        ({"task": "generation", "engine": "vllm", "page_size": 16}, "engine_options"),
        ({"task": "generation", "model": "../x"}, "inside the archive"),
    ],
)
def test_a_section_that_cannot_be_used_says_why(section: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GenerationConfig.from_mapping(section)


def test_a_section_is_read() -> None:
    found = GenerationConfig.from_mapping({"task": "generation", "cache_gib": 1, "engine_options": {}})
    assert found.cache_gib == 1.0
    assert found.engine == "transformers"
