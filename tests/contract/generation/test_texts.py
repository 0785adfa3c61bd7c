"""GenerationHandler's texts, whoever joins when. Oracle: transformers' generate, one request alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.generation.layout import Layout
from tests.contract.frontend import CHAT, COMPLETIONS, GREEDY, Frontend, events, text_of
from tests.contract.generation.conftest import Start
from tests.generation_models import OpenAIPenalties, Oracle, prompts, tiny_llama


@pytest.mark.parametrize("blocks", [96, 11])
@pytest.mark.parametrize("stream", [False, True])
def test_equals_generate_whoever_joins_when(
    start: Start, directory: Path, oracle: Oracle, blocks: int, stream: bool
) -> None:
    frontend = start(directory, num_blocks=blocks)
    chosen = random.Random(blocks)
    asked = {}
    for prompt, count in prompts(24, seed=blocks + stream):
        body = {"prompt": prompt, "max_tokens": count, "stream": stream, **GREEDY}
        asked[frontend.send(body, COMPLETIONS)] = prompt, count
        for _ in range(chosen.choice([0, 0, 0, 1, 4])):  # a call may see some of them through: several come at once
            frontend.call()
    frontend.run()
    for id, (prompt, count) in asked.items():
        assert text_of(frontend.answers[id]) == oracle.text(prompt, count)
    assert frontend.at_rest()
    if blocks == 11:
        assert frontend.handler.engine.stats().preemptions > 0


def test_chat_equals_generate_on_the_templates_text(frontend: Frontend, oracle: Oracle) -> None:
    messages = [
        {"role": "system", "content": "the red house"},
        {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]},
    ]
    answer = frontend.ask({"messages": messages, "max_tokens": 20, "model": "any", **GREEDY}, route=CHAT)[0]
    flat = [messages[0], {"role": "user", "content": "hello world"}]
    ids = oracle.chat(flat)
    expected = oracle.ids(ids, 20)
    assert text_of(answer) == oracle.tokenizer.decode(expected, skip_special_tokens=True)
    body = answer.json()
    assert body["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": len(expected), "total_tokens": len(ids) + len(expected)
    }  # fmt: skip
    assert body["choices"][0]["finish_reason"] == ("stop" if expected[-1] == 2 else "length")
    assert body["object"] == "chat.completion"


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_transformers_own(frontend: Frontend, oracle: Oracle, penalty: float) -> None:
    body = {"prompt": "the cat the cat", "max_tokens": 40, "repetition_penalty": penalty, **GREEDY}
    expected = oracle.text("the cat the cat", 40, repetition_penalty=penalty)
    assert expected != oracle.text("the cat the cat", 40)
    assert text_of(frontend.ask(body, route=COMPLETIONS)[0]) == expected


def test_logit_bias_and_min_tokens_are_transformers_own(frontend: Frontend, oracle: Oracle) -> None:
    # an end that comes at once, but for min_tokens
    body = {"prompt": "hello", "max_tokens": 30, "logit_bias": {"2": 100}, **GREEDY}
    bias = {"sequence_bias": [[[2], 100.0]]}
    ended, held = frontend.ask(body, {**body, "min_tokens": 7}, route=COMPLETIONS)
    assert ended.json()["usage"]["completion_tokens"] == 1
    assert ended.json()["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    expected = oracle.ids("hello", 30, min_new_tokens=7, **bias)
    assert held.json()["usage"]["completion_tokens"] == len(expected) == 8
    assert text_of(held) == oracle.tokenizer.decode(expected, skip_special_tokens=True)


def test_presence_and_frequency_penalties(frontend: Frontend, oracle: Oracle) -> None:
    body = {"prompt": "the dog", "max_tokens": 25, "presence_penalty": 1.5, "frequency_penalty": 0.7, **GREEDY}
    penalties = OpenAIPenalties(len(oracle.tokenizer("the dog")["input_ids"]), 1.5, 0.7)
    expected = oracle.text("the dog", 25, logits_processor=[penalties])
    assert expected != oracle.text("the dog", 25)
    assert text_of(frontend.ask(body, route=COMPLETIONS)[0]) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_is_never_seen(frontend: Frontend, oracle: Oracle, stream: bool) -> None:
    whole = oracle.text("a man", 60)
    stop = whole[17:22]  # more than one token
    expected = whole[: whole.index(stop)]
    body = {"prompt": "a man", "max_tokens": 60, "stop": [stop, "never there"], "stream": stream, **GREEDY}
    answer = frontend.ask(body, route=COMPLETIONS)[0]
    assert text_of(answer) == expected
    last = events(answer)[-1] if stream else answer.json()
    assert last["choices"][0]["finish_reason"] == "stop"
    assert frontend.at_rest()


def test_the_same_seed_gives_the_same_text_in_any_company(frontend: Frontend) -> None:
    body = {"prompt": "the woman", "max_tokens": 30, "seed": 7, "temperature": 1.3, "top_p": 0.9, "n": 2}
    alone = frontend.ask(body, route=COMPLETIONS)[0].json()["choices"]
    company = [{"prompt": "x" * (i + 1), "max_tokens": 25, "temperature": 2} for i in range(6)]
    answers = frontend.ask(*company[:3], body, *company[3:], {**body, "seed": 8}, route=COMPLETIONS)
    assert answers[3].json()["choices"] == alone
    assert answers[-1].json()["choices"] != alone
    assert alone[0]["text"] != alone[1]["text"]


def test_shared_beginnings_are_computed_once(start: Start, directory: Path, oracle: Oracle) -> None:
    shared = "the cat plays guitar " * 12
    for sharing in (True, False):
        frontend = start(directory, prefix_sharing=sharing)
        first = frontend.ask({"prompt": shared + "a", "max_tokens": 4, **GREEDY}, route=COMPLETIONS)[0]
        rest = frontend.ask(*({"prompt": shared + end, "max_tokens": 4, **GREEDY} for end in "bcd"), route=COMPLETIONS)
        for end, answer in zip("abcd", [first, *rest], strict=True):
            assert text_of(answer) == oracle.text(shared + end, 4)
        assert (frontend.handler.engine.stats().prefix_tokens > 100) == sharing


WINDOW = {"sliding_window": 24}
EVERYTHING_SEEN = {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {}),
        ("Mistral", WINDOW),
        ("GPT2", {}),
        ("Gemma2", {**WINDOW, "head_dim": 8}),
        ("Qwen3", {"head_dim": 8}),
        # a layer that does not hand over what its cache gives it
        ("DiffLlama", {}),
        # a layer tells a window, and its cache holds everything
        ("Phi3", {**WINDOW, **EVERYTHING_SEEN}),
        ("Ministral3", {**WINDOW, **EVERYTHING_SEEN, "head_dim": 8}),
        # a layer tells no window, and its cache has one
        ("Qwen2Moe", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1, "num_experts": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families(start: Start, tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    directory = tiny_llama(tmp_path / family, family=family, **changes)
    frontend, oracle = start(directory), Oracle(directory)
    asked = prompts(6, seed=1)
    answers = frontend.ask(
        *({"prompt": prompt, "max_tokens": count, **GREEDY} for prompt, count in asked), route=COMPLETIONS
    )
    for (prompt, count), answer in zip(asked, answers, strict=True):
        assert text_of(answer) == oracle.text(prompt, count)


def test_answers_read_their_keys_in_the_cache_itself(
    start: Start, directory: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, by_head, read = start(directory), Layout.by_head, []

    def counted(layout: Layout, kv_heads: int) -> list[torch.Tensor]:
        read.append(kv_heads)
        return by_head(layout, kv_heads)

    monkeypatch.setattr(Layout, "by_head", counted)
    (answer,) = frontend.ask({"prompt": "the cat", "max_tokens": 4, **GREEDY}, route=COMPLETIONS)
    assert text_of(answer) == oracle.text("the cat", 4)
    assert len(read) == 3 * 2 * 2  # three steps, two layers, keys and values


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
COMPRESSED = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        # transformers' paged cache has no place for compressed keys
        ("DeepseekV2", {**COMPRESSED, **EXPERTS}, "RuntimeError"),
        # a mask that depends on what the values are
        ("Doge", {}, "a layer with a mask of its own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_the_engine_cannot_run_is_refused_when_it_is_loaded(
    start: Start, tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    directory = tiny_llama(tmp_path / "model", family=family, **changes)
    with pytest.raises(Exception, match=rf"cannot run .* models .*{reason}.*engine: vllm"):
        start(directory)
