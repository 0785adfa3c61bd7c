"""The engine on vLLM; skipped where vllm is not installed. What it refuses needs none."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from handlers.config import ConfigError
from handlers.generation.engine import Sampling, Sequence
from handlers.generation.handler import GenerationHandler
from handlers.generation.settings import GenerationConfig
from handlers.generation.vllm_engine import VllmEngine
from tests.generation_models import tiny_llama

INSTALLED = importlib.util.find_spec("vllm") is not None
CONFIG = GenerationConfig(task="generation", engine="vllm", max_model_len=256, engine_options={"enforce_eager": True})


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
def test_without_vllm_loading_says_so() -> None:
    handler = GenerationHandler()
    handler.settings = CONFIG
    with pytest.raises(ConfigError, match="not installed here: pip install vllm"):
        handler._engine(Path(), None)


def test_options_that_have_a_key_of_their_own_are_refused(tmp_path: Path) -> None:
    config = GenerationConfig(task="generation", engine="vllm", engine_options={"max_model_len": 5})
    with pytest.raises(ConfigError, match="max_model_len in engine_options"):
        VllmEngine(tmp_path, config)


@pytest.mark.skipif(not INSTALLED, reason="vllm is not installed")
def test_equals_generate_and_cancels(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "llama", head_dim=32)
    engine = VllmEngine(directory, CONFIG)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        prompts = {str(i): tuple(range(5, 10 + 7 * i)) for i in range(5)}
        for id, prompt in prompts.items():
            engine.submit(Sequence(id, prompt, 20, Sampling(temperature=0), frozenset({2})))
        engine.submit(Sequence("gone", (5, 6), 200, Sampling()))
        found: dict[str, list[int]] = {id: [] for id in prompts}
        finished: set[str] = set()
        deadline = time.monotonic() + 120
        while len(finished) < len(prompts):
            assert time.monotonic() < deadline
            engine.cancel("gone")
            for output in engine.collect(0.1):
                assert output.error is None
                assert output.id != "gone"
                found[output.id] += [token.id for token in output.tokens]
                if output.finish:
                    finished.add(output.id)
        for id, prompt in prompts.items():
            given = torch.tensor([prompt])
            out = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False, eos_token_id=2
            )
            assert found[id] == out[0, len(prompt) :].tolist()
        assert engine.stats().running == engine.stats().waiting == 0
    finally:
        engine.stop()
