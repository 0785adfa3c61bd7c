"""What the engine on vLLM is given. What it does is in tests/contract/generation/test_vllm.py."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from handlers.config import ConfigError
from handlers.generation.engine import Sampling, Sequence
from handlers.generation.handler import GenerationHandler
from handlers.generation.settings import GenerationConfig
from tests.generation_models import tiny_llama

INSTALLED = importlib.util.find_spec("vllm") is not None
installed = pytest.mark.skipif(not INSTALLED, reason="vllm is not installed")


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(task="generation", engine="vllm", engine_options=options)


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
def test_without_vllm_loading_says_so() -> None:
    handler = GenerationHandler()
    handler.settings = config()
    with pytest.raises(ConfigError, match="not installed here: pip install vllm"):
        handler._engine(Path(), None)


@pytest.mark.parametrize(
    ("option", "key"), [("max_model_len", "max_model_len"), ("enable_prefix_caching", "prefix_sharing")]
)
def test_options_that_have_a_key_of_their_own_are_refused(option: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} in engine_options is the key '{key}'"):
        GenerationConfig.from_mapping({"task": "generation", "engine": "vllm", "engine_options": {option: 5}})


@installed
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enforce_eagr": True}, "vLLM has no option 'enforce_eagr'; did you mean 'enforce_eager'"),
        ({"block_size": "many"}, "block_size"),
        ({"gpu_memory_utilization": 7}, "gpu_memory_utilization"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens"),
        ({"speculative_config": {"method": "ngram", "num_speculative_token": 3}}, "num_speculative_token"),
    ],
)
def test_what_vllm_refuses_is_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    from handlers.generation.vllm_engine import VllmEngine

    with pytest.raises(ConfigError, match=said) as caught:
        VllmEngine(tiny_llama(tmp_path / "llama", head_dim=32), config(**options))
    assert str(caught.value).startswith("handler: engine_options: ")
    assert "\n" not in str(caught.value)


@installed
def test_a_cpu_gets_float32_and_the_other_engines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from handlers.generation import vllm_engine

    monkeypatch.setattr(vllm_engine.current_platform, "is_cpu", lambda: True)
    found = vllm_engine._arguments(tmp_path, config(), None)
    assert (found["dtype"], found["kv_cache_memory_bytes"]) == ("float32", 2 * 2**30)
    found = vllm_engine._arguments(tmp_path, config(gpu_memory_utilization=0.2), None)
    assert "kv_cache_memory_bytes" not in found
    monkeypatch.setattr(vllm_engine.current_platform, "is_cpu", lambda: False)
    found = vllm_engine._arguments(tmp_path, config(), 1)
    assert (found["dtype"], found["device_ids"]) == ("auto", [1])
    assert "device_ids" not in vllm_engine._arguments(tmp_path, config(tensor_parallel_size=2), 1)
    assert found.keys() <= set(vllm_engine._known())


@installed
def test_every_setting_reaches_vllm() -> None:
    from handlers.generation.vllm_engine import _parameters

    sampling = Sampling(
        temperature=0.5, top_p=0.0, top_k=10**30, seed=-1, presence_penalty=1.0, frequency_penalty=-1.0,
        repetition_penalty=1.5, logit_bias={7: -100.0}, min_tokens=50, logprobs=3,
    )  # fmt: skip
    found = _parameters(Sequence("a", (1,), 9, sampling, frozenset({4, 2})), 400)
    assert (found.temperature, found.top_p, found.top_k, found.seed) == (0.5, 1e-6, 400, 2**63 - 1)
    assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (found.logit_bias, found.logprobs, found.max_tokens, found.min_tokens) == ({7: -100.0}, 3, 9, 9)
    assert (found.stop_token_ids, found.ignore_eos, found.detokenize) == ([2, 4], True, False)
    endless = _parameters(Sequence("a", (1,), 9, sampling), 400)
    assert (endless.stop_token_ids, endless.min_tokens) == ([], 0)


@installed
def test_waiting_makes_up_for_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    from handlers.generation import vllm_engine

    now = 1000.0
    monkeypatch.setattr(vllm_engine.time, "monotonic", lambda: now)
    early, urgent = vllm_engine._rank(0), vllm_engine._rank(-1)
    assert urgent < early
    now += 6
    assert early < vllm_engine._rank(-1)
