"""What the benchmark of generation asks for: seeded prompts of exact lengths in tokens, and exact lengths of answers.

Prompts are token ids, so that every side reads the very same ones. Lengths are the quantiles of their distribution in
shuffled order rather than draws: any count of requests then has the same mixture.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import orjson
from tokenizers import Tokenizer

from scripts.lib.errors import UserError
from scripts.lib.workloads import Body

WORKLOADS = ("replies", "sharegpt", "prefix", "first_token", "http")

SHORT, LONG, LONG_SHARE = 8, 128, 0.25  # new tokens of `replies`
REPLY_PROMPTS = (16, 128)
# ShareGPT as vLLM's paper measured it (Kwon et al. 2023, section 6.2): 161 tokens in and 338 out on average. Answers
# and their cap are a quarter of that here.
SHAREGPT_PROMPT, SHAREGPT_ANSWER, SHAREGPT_SIGMA = 160, 340 / 4, 1.0
SHAREGPT_LIMITS = (1024, 1024 // 4)
PREFIX, OWN, PREFIX_ANSWER = 600, 8, 8
LEAST_TOKENS = 16


@dataclass(frozen=True)
class Request:
    """A prompt's token ids, and how many tokens to generate: exactly so many."""

    prompt: tuple[int, ...]
    new_tokens: int


def ordinary_tokens(model_directory: Path) -> tuple[int, ...]:
    """The ids of a model's tokenizer that are no special tokens, ascending.

    Raises:
        UserError: there is no readable tokenizer.json, or too few tokens in it.
    """
    try:
        tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    except Exception as failure:  # tokenizers raises bare ones, whatever is wrong with the file
        raise UserError(f"no prompts can be made for this model: {failure}") from failure
    found = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.get_added_tokens_decoder()))
    if len(found) < LEAST_TOKENS:
        raise UserError(f"the tokenizer has {len(found)} ordinary tokens: {LEAST_TOKENS} needed")
    return tuple(found)


class Prompts:
    """Makes requests; the same seed makes the same ones.

    Args:
        tokens: ids to write prompts with.
        seed: another one, other prompts of the same lengths: a cache knows nothing of them.
    """

    def __init__(self, tokens: Sequence[int], seed: object) -> None:
        self._tokens = tokens
        self._rng = random.Random(f"generation:{seed}")

    def same(self, count: int, prompt: int, new_tokens: int) -> list[Request]:
        """`count` requests of `prompt` tokens each, that have nothing in common."""
        firsts = self._rng.sample(self._tokens, count) if count <= len(self._tokens) else self._draw(count)
        return [Request((first, *self._draw(prompt - 1)), new_tokens) for first in firsts]

    def replies(self, count: int, at_once: int) -> list[Request]:
        """Of each `at_once` in a row three quarters want 8 tokens and a quarter 128; prompts of 16–128, uniform."""
        answers: list[int] = []
        for start in range(0, count, at_once):
            size = min(at_once, count - start)
            long = round(size * LONG_SHARE)
            block = [LONG] * long + [SHORT] * (size - long)
            self._rng.shuffle(block)
            answers += block
        low, high = REPLY_PROMPTS
        prompts = [low + round((high - low) * share) for share in self._shares(count)]
        return [Request(self._draw(length), new) for length, new in zip(prompts, answers, strict=True)]

    def sharegpt(self, count: int) -> list[Request]:
        """Log-normal lengths of prompts and of answers, independent of each other."""
        most_prompt, most_answer = SHAREGPT_LIMITS
        prompts = self._log_normal(count, SHAREGPT_PROMPT, most_prompt)
        answers = self._log_normal(count, SHAREGPT_ANSWER, most_answer)
        return [Request(self._draw(length), new) for length, new in zip(prompts, answers, strict=True)]

    def staggered(self, count: int, prompt: int, least: int, most: int) -> list[Request]:
        """Prompts of one length; answers of `least` to `most` tokens, uniform."""
        answers = [round(least + (most - least) * share) for share in self._shares(count)]
        return [Request(self._draw(prompt), new) for new in answers]

    def prefix(self, count: int) -> list[Request]:
        """Prompts that have their first 600 tokens in common, and 8 of their own."""
        common = self._draw(PREFIX)
        return [Request(common + each.prompt, each.new_tokens) for each in self.same(count, OWN, PREFIX_ANSWER)]

    def _draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._tokens, k=count))

    def _shares(self, count: int) -> list[float]:
        shares = [(i + 0.5) / count for i in range(count)]
        self._rng.shuffle(shares)
        return shares

    def _log_normal(self, count: int, mean: float, most: int) -> list[int]:
        shape = NormalDist(math.log(mean) - SHAREGPT_SIGMA**2 / 2, SHAREGPT_SIGMA)
        return [min(most, max(1, round(math.exp(shape.inv_cdf(share))))) for share in self._shares(count)]


def body(request: Request, model: str) -> Body:
    """The request as `v1/completions` takes it: greedy, streamed, its usage told at the end."""
    asked = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Body(orjson.dumps(asked), 1, len(request.prompt))
