"""The sampler: its distribution against the logits, and each of its settings alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import TopKLogitsWarper, TopPLogitsWarper

from handlers.generation.engine import Constraint, Sampling, Sequence
from handlers.generation.sampler import Chain, draw, next_tokens

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5])
DRAWS = 6000


def chain(**sampling: object) -> Chain:
    return Chain(Sequence("a", (1, 2), 10, Sampling(**sampling), end=frozenset({3})))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.7, 3, 1.0), (1.0, 0, 0.7), (1.3, 6, 0.8)]
)
def test_draws_follow_the_logits(temperature: float, top_k: int, top_p: float) -> None:
    """The oracle: transformers' own warpers, then a softmax."""
    scores = (LOGITS / temperature).unsqueeze(0)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores[0].softmax(-1)
    random = chain(seed=1).random
    counts = torch.zeros(len(LOGITS))
    for _ in range(DRAWS):
        counts[draw(LOGITS, temperature, top_k, top_p, random.random())] += 1
    kept = expected > 0
    assert counts[~kept].sum() == 0
    share = expected[kept].double()
    assert chisquare(counts[kept].double(), share / share.sum() * DRAWS).pvalue > 1e-3


def test_a_large_vocabulary_keeps_what_top_p_keeps() -> None:
    """Whether the head of the distribution is enough or all of it must be sorted."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for top_p in (0.05, 0.9):
        kept = torch.isfinite(TopPLogitsWarper(top_p)(None, logits.unsqueeze(0))[0]).nonzero().flatten().tolist()
        drawn = {draw(logits, 1.0, 0, top_p, i / 800) for i in range(800)}
        assert drawn <= set(kept)
        assert len(drawn) == len(kept) or len(kept) > 256


@given(
    values=st.lists(st.floats(-50, 50), min_size=1, max_size=20),
    temperature=st.sampled_from([5e-324, 1e-300, 1e-3, 1.0, 2.0]),
    top_k=st.integers(0, 25),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
    number=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_a_draw_is_always_a_token(
    values: list[float], temperature: float, top_k: int, top_p: float, number: float
) -> None:
    token = draw(torch.tensor(values), temperature, top_k, top_p, number)
    assert 0 <= token < len(values)
    if top_k == 1 or top_p <= 1e-9 or temperature < 1e-6:
        assert values[token] == pytest.approx(max(values), abs=1e-4)


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf])
    assert {draw(logits, 1.0, 0, 1.0, number) for number in (0.0, 0.3, 0.999999999999)} == {1}


def test_each_row_has_its_own_settings() -> None:
    rows = LOGITS.repeat(4, 1)
    rows[3, 0] = math.nan
    chains = [chain(temperature=0), chain(temperature=0, logit_bias={6: 50.0}), chain(seed=3, logprobs=2), chain()]
    tokens = next_tokens(rows, chains)
    assert tokens[3] is None
    assert [token.id for token in tokens[:2] if token] == [0, 6]
    assert tokens[2] is not None
    assert tokens[2].logprob == pytest.approx(float(LOGITS.log_softmax(-1)[tokens[2].id]))
    assert [id for id, _ in tokens[2].top] == [0, 7]
    assert torch.equal(rows[1], LOGITS), "the logits are not changed"


def test_the_end_waits_for_min_tokens() -> None:
    logits = torch.zeros(8)
    logits[3] = 10.0
    one = chain(temperature=0, min_tokens=2)
    ids = [token.id for _ in range(3) for token in next_tokens(logits.unsqueeze(0), [one]) if token]
    assert ids[:2] != [3, 3]
    assert 3 not in ids[:2]
    assert ids[2] == 3


def test_the_same_seed_draws_the_same() -> None:
    def made(seed: int | None) -> list[int]:
        one = chain(seed=seed, temperature=2.0)
        return [token.id for _ in range(20) for token in next_tokens(LOGITS.unsqueeze(0), [one]) if token]

    assert made(5) == made(5)
    assert made(5) != made(6)
    assert made(None) != made(None)


class Only(Constraint):
    """Allows a few tokens, always."""

    def __init__(self, *tokens: int) -> None:
        self._bits = sum(1 << token for token in tokens)

    def allowed(self) -> bytes:
        return self._bits.to_bytes(2, "little")

    def add(self, token: int) -> None:
        if not self._bits >> token & 1:
            self.fail("not allowed")


def constrained(*tokens: int, **sampling: object) -> Chain:
    found = Sampling(**sampling)  # type: ignore[arg-type]
    return Chain(Sequence("a", (1, 2), 10, found, end=frozenset({3}), constraint=Only(*tokens)))


def test_only_what_a_constraint_allows_is_chosen() -> None:
    """The oracle: the same settings over the allowed logits alone."""
    some = {"temperature": 1.2, "top_k": 3, "top_p": 0.9}
    for number in range(50):
        free, bound = chain(seed=number, **some), constrained(1, 4, 6, seed=number, **some)
        kept = torch.full_like(LOGITS, -math.inf)
        kept[[1, 4, 6]] = LOGITS[[1, 4, 6]]
        assert bound.choose(LOGITS) == free.choose(kept)
    greedy = constrained(4, 5, temperature=0)
    beside = chain(temperature=0)
    tokens = next_tokens(LOGITS.expand(2, -1).contiguous(), [greedy, beside])
    assert [token and token.id for token in tokens] == [4, 0]
    assert greedy.sequence.constraint is not None
    assert greedy.sequence.constraint.failure is None


def test_the_end_waits_for_min_tokens_unless_nothing_else_is_allowed() -> None:
    likely = {"temperature": 0, "logit_bias": {3: 50.0}, "min_tokens": 2}
    assert constrained(2, 3, **likely).choose(LOGITS) == 2
    assert constrained(3, **likely).choose(LOGITS) == 3


def test_a_constraint_that_leaves_nothing_fails_its_sequence_alone() -> None:
    improbable = LOGITS.clone()
    improbable[6] = -math.inf
    dead, alive = constrained(6, seed=1), chain(temperature=0)
    tokens = next_tokens(improbable.expand(2, -1).contiguous(), [dead, alive])
    assert [token and token.id for token in tokens] == [None, 0]
    assert dead.sequence.constraint is not None
    assert dead.sequence.constraint.failure is not None
