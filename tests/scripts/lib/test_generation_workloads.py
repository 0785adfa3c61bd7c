"""The benchmark's requests for generation: exact lengths, the same from the same seed, nothing shared by chance."""

import json
from pathlib import Path
from statistics import mean

import pytest

from scripts.lib.errors import UserError
from scripts.lib.generation_workloads import LONG, PREFIX, SHORT, Prompts, Request, body, ordinary_tokens
from tests.generation_models import SPECIAL, write_tokenizer

TOKENS = tuple(range(10, 400))


def test_special_tokens_are_in_no_prompt(tmp_path: Path) -> None:
    size = write_tokenizer(tmp_path)
    assert ordinary_tokens(tmp_path) == tuple(range(len(SPECIAL), size))
    with pytest.raises(UserError, match="no prompts can be made"):
        ordinary_tokens(tmp_path / "none")


@pytest.mark.parametrize("count", [16, 32, 48])
def test_replies_are_three_quarters_short_in_every_batch(count: int) -> None:
    asked = Prompts(TOKENS, 0).replies(count, 16)
    for start in range(0, count, 16):
        assert sorted(each.new_tokens for each in asked[start : start + 16]) == [SHORT] * 12 + [LONG] * 4
    lengths = [len(each.prompt) for each in asked]
    assert 16 <= min(lengths) < max(lengths) <= 128
    assert mean(lengths) == pytest.approx(72, abs=2)


def test_sharegpt_has_its_means_whatever_the_count() -> None:
    for count in (24, 200):
        asked = Prompts(TOKENS, 0).sharegpt(count)
        assert mean(len(each.prompt) for each in asked) == pytest.approx(160, rel=0.12)
        assert mean(each.new_tokens for each in asked) == pytest.approx(85, rel=0.12)
        assert max(len(each.prompt) for each in asked) <= 1024
        assert max(each.new_tokens for each in asked) <= 256


def test_a_prefix_is_shared_and_nothing_else() -> None:
    asked = Prompts(TOKENS, 0).prefix(16)
    assert len({each.prompt[:PREFIX] for each in asked}) == 1
    assert len({each.prompt[: PREFIX + 1] for each in asked}) == 16
    assert len({each.prompt[0] for each in Prompts(TOKENS, 0).same(16, 4, 1)}) == 16


def test_a_seed_is_a_workload() -> None:
    assert Prompts(TOKENS, "a").sharegpt(8) == Prompts(TOKENS, "a").sharegpt(8)
    one, other = (Prompts(TOKENS, seed).sharegpt(8) for seed in ("a", "b"))
    assert {each.prompt for each in one}.isdisjoint(each.prompt for each in other)
    assert sorted(len(each.prompt) for each in one) == sorted(len(each.prompt) for each in other)


def test_a_body_asks_for_exactly_so_many_tokens() -> None:
    made = body(Request((5, 6, 7), 9), "m")
    asked = json.loads(made.data)
    assert made.tokens == 3
    assert asked["prompt"] == [5, 6, 7]
    assert asked["max_tokens"] == 9
    assert asked["ignore_eos"] is asked["stream"] is True
