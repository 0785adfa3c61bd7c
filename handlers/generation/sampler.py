"""Logits → the next token, each sequence by its own settings, whatever its neighbours use.

The order is transformers' own: bias, repetition, presence and frequency, the least length, what a grammar allows,
temperature, top_k, top_p.
A token is drawn with one number from the sequence's own generator, on the cumulated probabilities in the order of the
vocabulary. So the same seed gives the same text in any company: nothing is drawn from a generator that others use too,
and rounding, which does depend on the company, only matters where a draw falls on the edge between two tokens.
"""

import math
import random
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from handlers.generation.engine import Sequence, Token

HEAD = 256  # most probable tokens that are looked at before all are sorted for top_p


class Chain:
    """A sequence as the sampler sees it: its settings, its generator and what it has generated.

    Args:
        sequence: what to generate.
    """

    def __init__(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        self.sequence = sequence
        self.generated: Counter[int] = Counter()
        self.length = 0
        self.random = random.Random(sampling.seed)
        self._end = sorted(sequence.end)
        self._prompt = frozenset(sequence.prompt) if sampling.repetition_penalty != 1 else frozenset()
        self._penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        changes = self._penalised or sampling.repetition_penalty != 1 or bool(sampling.logit_bias)
        self.greedy = sampling.temperature == 0
        self._changes = changes

    @property
    def plain(self) -> bool:
        """Whether the next token is just the most probable one."""
        return self.greedy and not self._changes and not self._held and self.sequence.constraint is None

    @property
    def _held(self) -> bool:
        """Whether the text may not end yet."""
        return self.length < self.sequence.sampling.min_tokens and bool(self._end)

    def add(self, token: int) -> bool:
        """Count a token that was chosen; False where it is none that its constraint allows."""
        self.length += 1
        self.generated[token] += 1
        constraint = self.sequence.constraint
        if constraint is not None:
            constraint.add(token)
        return constraint is None or constraint.failure is None

    def choose(self, logits: Tensor) -> int | None:
        """The next token by these settings; None where its constraint leaves none.

        Args:
            logits: (vocabulary,) float32; it is not changed.
        """
        sampling, constraint = self.sequence.sampling, self.sequence.constraint
        scores = self._scores(logits) if self._changes or self._held else logits
        if constraint is not None:
            bits = constraint.allowed()
            if bits is None:
                return None
            scores = self._constrained(scores, unpacked(bits, scores))
            if not scores.amax().isfinite():
                constraint.fail("The model gives no probability to anything that the answer may go on with.")
                return None
        if self.greedy:
            return int(scores.argmax())
        return draw(scores, sampling.temperature, sampling.top_k, sampling.top_p, self.random.random())

    def _scores(self, logits: Tensor) -> Tensor:
        sampling = self.sequence.sampling
        scores = logits.clone()
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=scores.device)
            scores[ids] += torch.tensor(list(sampling.logit_bias.values()), device=scores.device)
        if sampling.repetition_penalty != 1:
            ids = torch.tensor(sorted(self._prompt | self.generated.keys()), device=scores.device)
            seen = scores[ids]
            penalty = sampling.repetition_penalty
            scores[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)
        if self._penalised and self.generated:
            ids = torch.tensor(list(self.generated), device=scores.device)
            counts = torch.tensor(list(self.generated.values()), dtype=torch.float32, device=scores.device)
            scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if self._held and self.sequence.constraint is None:
            scores[self._end] = -math.inf
        return scores

    def _constrained(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Scores with only what is allowed left; a text that can go on no more ends, however few tokens it has."""
        if self._held:
            others = allowed.clone()
            others[self._end] = False
            allowed = others if others.any() else allowed
        return scores.where(allowed, -math.inf)


def unpacked(bits: bytes, scores: Tensor) -> Tensor:
    """A bit for each token → (vocabulary,) bool, where and as long as `scores` are."""
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=scores.numel(), bitorder="little")
    return torch.from_numpy(flags).bool().to(scores.device)


def draw(scores: Tensor, temperature: float, top_k: int, top_p: float, number: float) -> int:
    """Draw a token.

    Args:
        scores: (vocabulary,) logits.
        temperature: above 0.
        top_k: 0 for all.
        top_p: 1 for all.
        number: uniform in [0, 1).
    """
    # In double precision: a temperature near 0 then makes no NaN, and the cumulated sum loses nothing
    scaled = (scores.double() - scores.max()) / temperature
    ids: Tensor | None = None
    if 0 < top_k < scaled.numel():
        scaled, ids = scaled.topk(top_k)
    probabilities = scaled.softmax(-1)
    if top_p < 1:
        kept = _nucleus(probabilities, top_p)
        probabilities = probabilities[kept]
        ids = kept if ids is None else ids[kept]
    if ids is not None:
        ids, order = ids.sort()
        probabilities = probabilities[order]
    cumulated = probabilities.cumsum(-1)
    place = int(torch.searchsorted(cumulated, number * cumulated[-1], right=True))
    if place >= cumulated.numel() or probabilities[place] == 0:  # the last edge, and rounding
        place = int(probabilities.nonzero()[-1])
    return place if ids is None else int(ids[place])


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The fewest most probable tokens whose probabilities reach `top_p`, at least one."""
    head = probabilities.topk(min(HEAD, probabilities.numel()))
    values, ids = head.values, head.indices
    if values.sum() < top_p and probabilities.numel() > HEAD:
        values, ids = probabilities.sort(descending=True)
    before = values.cumsum(-1) - values
    count = max(1, int((before < top_p).sum()))
    return ids[:count]


def next_tokens(logits: Tensor, chains: list[Chain]) -> list[Token | None]:
    """Choose a token for each sequence of a step and count it.

    Args:
        logits: (rows, vocabulary) float32; rows beyond the chains are ignored.
        chains: the sequences, in the order of the rows.

    Returns:
        A token per chain; None where the logits are not finite or a constraint has failed, so that there is nothing to
        choose by.
    """
    logits = logits[: len(chains)]
    finite, most_probable = logits.amax(-1).isfinite().tolist(), logits.argmax(-1).tolist()
    tokens: list[Token | None] = []
    for row, chain in enumerate(chains):
        if not finite[row]:
            tokens.append(None)
            continue
        token = most_probable[row] if chain.plain else chain.choose(logits[row])
        if token is None or not chain.add(token):
            tokens.append(None)
            continue
        tokens.append(_with_logprobs(token, logits[row], chain.sequence.sampling.logprobs))
    return tokens


def _with_logprobs(token: int, logits: Tensor, count: int | None) -> Token:
    if count is None:
        return Token(token)
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(count, logprobs.numel()))
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Token(token, float(logprobs[token]), pairs)
