"""An archive built with --dtype bfloat16. Oracle: transformers' generate in bfloat16 and in float32, alone.

bfloat16 keeps 8 bits: what is computed in another order is another number. So texts are compared up to the first token
whose rival was about as probable, and log-probabilities up to there.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from handlers.generation.engine import Engine, Sampling, Sequence, Token
from tests.contract.conftest import Build, loaded
from tests.contract.frontend import COMPLETIONS, GREEDY, Frontend, text_of
from tests.generation_models import Oracle, prompts

# Of a log-probability. The logits here reach 8, below which bfloat16's numbers lie 1/32 apart; every layer rounds too.
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 0.5}


@pytest.fixture
def frontend(build_archive: Build, directory: Path, tmp_path: Path) -> Iterator[Frontend]:
    whole = build_archive(directory, "--dtype", "bfloat16", "--cache-gib", "0.01", "--page-size", "16")
    assert whole.settings["dtype"] == "bfloat16"
    frontend = Frontend(loaded(tmp_path / "extracted").service)
    yield frontend
    frontend.handler.engine.stop()


def generated(engine: Engine, asked: list[tuple[list[int], int]], end: int) -> list[list[Token]]:
    """What the engine generates for prompts that run together, greedy."""
    for number, (prompt, count) in enumerate(asked):
        sampling = Sampling(temperature=0, logprobs=1)
        engine.submit(Sequence(str(number), tuple(prompt), count, sampling, frozenset({end})))
    tokens: list[list[Token]] = [[] for _ in asked]
    left = len(asked)
    while left:
        for output in engine.collect(30):
            assert output.error is None
            tokens[int(output.id)] += output.tokens
            left -= output.finish is not None
    return tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_generate_but_for_rounding(
    frontend: Frontend, directory: Path, oracle: Oracle, dtype: torch.dtype
) -> None:
    engine = frontend.handler.engine
    assert engine.card()["dtype"] == "bfloat16"
    asked = [(oracle.tokenizer(prompt)["input_ids"], count) for prompt, count in prompts(16, seed=7)]
    found = generated(engine, asked, oracle.tokenizer.eos_token_id)
    alone, tolerance = Oracle(directory, dtype), TOLERANCE[dtype]
    differences: list[float] = []
    for (prompt, count), tokens in zip(asked, found, strict=True):
        ids, logprobs = alone.logprobs(prompt, count)
        for token, expected, row in zip(tokens, ids, logprobs, strict=False):
            assert token.logprob is not None
            differences.append(abs(token.logprob - float(row[token.id])))
            if token.id != expected:
                assert row.max() - row[token.id] <= tolerance, "no near tie"
                break
        else:
            assert len(tokens) == len(ids)
    assert max(differences) <= tolerance
    assert len(differences) > sum(map(len, found)) / 2, "most texts part too early to say anything"
    if dtype == torch.float32:
        assert max(differences) > 1e-3, "it was computed in float32"
    text = oracle.tokenizer.decode([token.id for token in found[0]], skip_special_tokens=True)
    body = {"prompt": asked[0][0], "max_tokens": asked[0][1], **GREEDY}
    assert text_of(frontend.ask(body, route=COMPLETIONS)[0]) == text
