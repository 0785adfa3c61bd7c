"""The engine on vLLM behind the same frontend, held to what the one on transformers is held to; skipped without vllm.

Its processes take long to start: one engine serves nearly all of these tests.
"""

import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from handlers.generation.engine import Sampling, Sequence
from tests.contract.conftest import Serve
from tests.contract.frontend import COMPLETIONS, GREEDY, Frontend, events, text_of
from tests.contract.generation.crowd import mixed_requests_a_third_of_which_leave
from tests.contract.generation.test_answers import (
    test_a_stream_ends_with_its_usage_when_that_is_asked_for,
    test_logprobs_are_the_models_own,
    test_max_tokens_is_what_fits_unless_it_is_said,
    test_plain_shapes,
    test_several_prompts_and_answers_keep_their_order,
)
from tests.contract.generation.test_refusals import (
    test_a_bad_request_is_refused_and_its_neighbours_are_not,
    test_nothing_of_a_text_is_logged,
)
from tests.contract.generation.test_texts import (
    test_a_stop_string_ends_the_text_and_is_never_seen,
    test_chat_equals_generate_on_the_templates_text,
    test_equals_generate_whoever_joins_when,
    test_logit_bias_and_min_tokens_are_transformers_own,
    test_presence_and_frequency_penalties,
    test_repetition_penalty_is_transformers_own,
    test_the_same_seed_gives_the_same_text_in_any_company,
)
from tests.contract.generation.test_under_fire import test_a_client_that_leaves_frees_its_blocks
from tests.generation_models import Oracle, prompts, tiny_llama

__all__ = [
    "test_a_bad_request_is_refused_and_its_neighbours_are_not",
    "test_a_client_that_leaves_frees_its_blocks",
    "test_a_stop_string_ends_the_text_and_is_never_seen",
    "test_a_stream_ends_with_its_usage_when_that_is_asked_for",
    "test_chat_equals_generate_on_the_templates_text",
    "test_equals_generate_whoever_joins_when",
    "test_logit_bias_and_min_tokens_are_transformers_own",
    "test_logprobs_are_the_models_own",
    "test_max_tokens_is_what_fits_unless_it_is_said",
    "test_nothing_of_a_text_is_logged",
    "test_plain_shapes",
    "test_presence_and_frequency_penalties",
    "test_repetition_penalty_is_transformers_own",
    "test_several_prompts_and_answers_keep_their_order",
    "test_the_same_seed_gives_the_same_text_in_any_company",
]

pytestmark = pytest.mark.timeout(900)
# 20 blocks of 32 tokens: the longest context takes 16 of them, and one is never given out
OPTIONS = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 20 * 2**15, "max_num_seqs": 16}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM has no attention on a CPU for heads as small as the other engine's tests have."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "llama", head_dim=32, seed=3)


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


def served(serve: Serve, directory: Path, **options: Any) -> Iterator[Frontend]:
    made = serve(
        directory, handler="handlers.generation.handler", task="generation", engine="vllm",
        engine_options={**OPTIONS, **options}, max_batch_tokens=64,
    )  # fmt: skip
    yield Frontend(made.service)
    made.handler.engine.stop()


@pytest.fixture(scope="module")
def frontend(serve: Serve, directory: Path) -> Iterator[Frontend]:
    yield from served(serve, directory)


@pytest.fixture
def start(frontend: Frontend) -> Any:
    """The one engine, whatever its cache should be: it is small enough to preempt."""
    return lambda *_, **__: frontend


def test_its_sizes_are_told(frontend: Frontend) -> None:
    card = frontend.handler.card()
    assert {key: card[key] for key in ("engine", "dtype", "device", "max_model_len", "max_batch_tokens")} == {
        "engine": "vllm", "dtype": "float32", "device": "cpu", "max_model_len": 512, "max_batch_tokens": 64,
    }  # fmt: skip
    assert (card["page_size"], card["blocks"], card["longest_at_once"]) == (32, 20, 1)
    assert card["suits"] == {"batch_size": 1, "queue": 4}


def test_shared_beginnings_are_counted(frontend: Frontend) -> None:
    before = frontend.handler.engine.stats().prefix_tokens
    for end in (7, 8):
        frontend.ask({"prompt": [*range(50, 150), end], "max_tokens": 1}, route=COMPLETIONS)
    assert frontend.handler.engine.stats().prefix_tokens - before == 96


def test_a_lower_priority_number_goes_first(frontend: Frontend) -> None:
    engine = frontend.handler.engine
    for number in range(16):  # as many as run at once
        engine.submit(Sequence(str(number), (5, 6), 40, Sampling()))
    for name, priority in (("late", 5), ("soon", -5)):
        engine.submit(Sequence(name, (5, 6), 1, Sampling(), priority=priority))
    ended: list[str] = []
    deadline = time.monotonic() + 120
    while len(ended) < 18:
        assert time.monotonic() < deadline
        ended += [output.id for output in engine.collect(0.1) if output.finish]
    assert ended.index("soon") < ended.index("late")
    assert frontend.at_rest()


def test_what_vllm_refuses_is_the_clients_error(frontend: Frontend) -> None:
    engine = frontend.handler.engine
    engine.submit(Sequence("refused", (5, 6), 4, Sampling(logprobs=21)))
    (output,) = engine.collect(30)
    assert output.error is not None
    assert (output.error.status, output.error.code) == (400, "engine_refused")
    assert "max allowed: 20" in output.error.message
    assert frontend.at_rest()


def test_cancelled_at_any_moment_frees(frontend: Frontend, oracle: Oracle) -> None:
    engine = frontend.handler.engine
    chosen = random.Random(0)
    for number in range(60):
        engine.submit(Sequence(f"c{number}", (5,) * chosen.randint(1, 60), 400, Sampling()))
        time.sleep(chosen.choice([0, 0, 0, 0.02]))
        if chosen.random() < 0.5:
            engine.cancel(f"c{number}")
    for number in range(60):
        engine.cancel(f"c{number}")
    assert frontend.at_rest()
    assert engine.collect(0.2) == []
    assert engine._llm.output_processor.get_num_unfinished_requests() == 0
    # every block is there: this one needs all of them but three
    answer = frontend.ask({"prompt": "a", "ignore_eos": True, **GREEDY}, route=COMPLETIONS)[0]
    assert answer.json()["usage"]["total_tokens"] == 512


def test_mixed_requests_a_third_of_which_leave(frontend: Frontend, oracle: Oracle) -> None:
    mixed_requests_a_third_of_which_leave(frontend, oracle)


def test_speculation_changes_no_text_and_refuses_what_it_cannot(serve: Serve, directory: Path, oracle: Oracle) -> None:
    frontends = served(serve, directory, speculative_config=NGRAM)
    frontend = next(frontends)
    speculative = frontend.handler.engine._llm.vllm_config.speculative_config
    assert (speculative.method, speculative.num_speculative_tokens) == ("ngram", 3)
    asked = prompts(8, seed=5)
    answers = frontend.ask(
        *({"prompt": prompt, "max_tokens": count, **GREEDY} for prompt, count in asked), route=COMPLETIONS
    )
    assert [text_of(answer) for answer in answers] == [oracle.text(*each) for each in asked]
    refused = frontend.ask({"prompt": "a", "logit_bias": {"5": 1}}, route=COMPLETIONS)[0]
    assert refused.status == 400
    assert "logit_bias" in refused.json()["error"]["message"]
    assert frontend.at_rest()
    assert next(frontends, None) is None


def test_a_dead_engine_is_told_and_replaced(frontend: Frontend, oracle: Oracle) -> None:
    engine = frontend.handler.engine
    body = {"prompt": "the cat", "max_tokens": 480, "ignore_eos": True, **GREEDY}
    whole, streamed = frontend.send(body, COMPLETIONS), frontend.send({**body, "stream": True}, COMPLETIONS)
    while not frontend.pieces[streamed]:  # not longer: 480 tokens take it a second
        frontend.call()
    next(child for child in multiprocessing.active_children() if "EngineCore" in child.name).kill()
    frontend.run(30)
    assert frontend.answers[whole].json()["error"]["code"] == "engine_failure"
    assert events(frontend.answers[streamed])[-1]["error"]["code"] == "engine_failure"
    counted = engine.stats()
    id = frontend.send({"prompt": "the cat", "max_tokens": 8, **GREEDY}, COMPLETIONS)
    frontend.run(600)
    assert text_of(frontend.answers[id]) == oracle.text("the cat", 8)
    found = engine.stats()
    assert (found.rebuilds, found.blocks) == (1, 20)
    assert (found.preemptions, found.prefix_tokens) == (counted.preemptions, counted.prefix_tokens)
    assert frontend.at_rest()
