"""What an engine is to the handler: sequences go in, tokens come out, in any order and at any time.

An engine runs in threads of its own. `submit`, `cancel` and `stats` may be called from any thread; `collect` from one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from handlers.errors import RequestError

Finish = Literal["stop", "length"]


class EngineFailure(RequestError):
    """The engine failed while it ran this request; the next one finds a new engine."""

    status = 503
    default_code = "engine_failure"


class Unfollowed(RequestError):
    """An answer could not go on as its grammar wants it."""

    status = 500
    default_code = "constraint_failure"


class EngineDead(RuntimeError):
    """The engine failed and this process can make no new one; TorchServe starts another process when it ends."""


@dataclass(frozen=True)
class Sampling:
    """How one sequence's tokens are chosen. The defaults change nothing.

    Args:
        temperature: 0 takes the most probable token.
        top_p: the smallest set of tokens that has this probability.
        top_k: so many most probable tokens; 0 for all.
        seed: the same seed gives the same tokens; None draws one.
        presence_penalty, frequency_penalty: taken off the logits of tokens that were generated: once, and each time.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the answer.
        logit_bias: token id → what is added to its logit.
        min_tokens: no end of text before so many tokens.
        logprobs: so many alternatives' log-probabilities for each token; None for none at all, its own included.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None


class Constraint(ABC):
    """What may come next in one sequence; the engine's thread asks and tells it, token by token.

    Attributes:
        failure: why it can tell no more, for the client; None while it can.
    """

    failure: RequestError | None = None

    @abstractmethod
    def allowed(self) -> bytes | None:
        """A bit for each token, the first byte's lowest for token 0; None where it has failed."""

    @abstractmethod
    def add(self, token: int) -> None:
        """Take the token that was chosen; `failure` tells whether that went well."""

    def fail(self, message: str) -> None:
        """Let it tell no more."""
        self.failure = self.failure or Unfollowed(message)


@dataclass(frozen=True)
class Sequence:
    """One sequence to generate.

    Args:
        id: unique among those that run.
        prompt: token ids, at least one.
        max_tokens: most tokens to generate, at least 1.
        sampling: how.
        end: tokens that end it; they are generated and belong to the usage, not to the text.
        priority: lower goes first among those that wait.
        constraint: what its text must follow; None for nothing.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end: frozenset[int] = frozenset()
    priority: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Token:
    """A generated token; log-probabilities are the model's own, before penalties and temperature.

    Args:
        id: the token.
        logprob: its log-probability, None unless asked for.
        top: the most probable tokens with theirs, best first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What is new of a sequence.

    Args:
        id: the sequence.
        tokens: since the last output, in order.
        finish: why it ended; None while it goes on.
        error: why it failed; nothing comes after it.
    """

    id: str
    tokens: tuple[Token, ...] = ()
    finish: Finish | None = None
    error: RequestError | None = None


@dataclass(frozen=True)
class Stats:
    """An engine at one moment, and what it has counted since the worker started.

    Args:
        running, waiting: sequences that have cache blocks, and that have none yet.
        used_blocks, blocks: cache blocks that sequences hold, and all there are.
        preemptions: times that a sequence lost its blocks to others and had to compute them again.
        prefix_tokens: prompt tokens that were found in the cache.
        rebuilds: times that a failed engine was replaced.
    """

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    blocks: int = 0
    preemptions: int = 0
    prefix_tokens: int = 0
    rebuilds: int = 0


class Engine(ABC):
    """See the module.

    Attributes:
        max_model_len: most tokens of a prompt and its answer together.
        vocabulary: token ids are below it.
    """

    max_model_len: int
    vocabulary: int

    @abstractmethod
    def submit(self, sequence: Sequence) -> None:
        """Take a sequence; its outputs come from `collect`.

        Raises:
            EngineDead: the engine has failed and cannot be replaced.
        """

    @abstractmethod
    def collect(self, timeout: float) -> list[Output]:
        """What is new, waiting at most `timeout` seconds for something."""

    @abstractmethod
    def cancel(self, id: str) -> None:
        """Forget a sequence and free its blocks; one that is not there is no error. No output comes any more."""

    @abstractmethod
    def stats(self) -> Stats:
        """Where it stands."""

    @abstractmethod
    def stop(self) -> None:
        """End its threads. What runs is lost."""

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """What it is, for people."""
