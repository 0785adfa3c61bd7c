"""The rounds of a benchmark of generation: every side of a workload runs the same requests, one side after the other.

Each round has prompts of its own, so that no cache has seen them.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

import aiohttp

from scripts.lib import load
from scripts.lib.errors import UserError
from scripts.lib.generation_report import SERVED, FirstToken, Run
from scripts.lib.generation_workloads import SHORT, Prompts, Request, body
from scripts.lib.generation_yardstick import ENGINE, STATIC, UNSHARED, VLLM, Generated
from scripts.lib.load import LoadResult, Received, Target, closed_loop
from scripts.lib.openai_api import read_chat
from scripts.lib.stats import percentile

BESIDE_STATIC = ("replies", "sharegpt")
HTTP = "http"
PAIRS, HTTP_REQUESTS, HTTP_ANSWERS = 8, 16, (16, 48)  # so short that a machine's slow moments meet both sides alike
REPLIES, SHAREGPT, PREFIX_REQUESTS = 32, 24, 16
DECODING, DECODING_PROMPT, STEP_TOKENS = 8, 32, 64
PROBES, PROBE_PROMPT = 8, 64
BUSY_TOKENS = 4000  # of those that decode beside the probes: more than they get to; they are broken off
ANSWER_S = 30.0
POLL_S = 0.1

Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        workloads: of generation_workloads.WORKLOADS.
        rounds: how often.
        threads: torch's, of every side.
        at_once: requests that run at once, and the rows of a static batch.
        requests: of `replies` and of `sharegpt`; None for their own numbers.
        vllm: whether vLLM has its turn in these two.
    """

    workloads: tuple[str, ...]
    rounds: int
    threads: int
    at_once: int
    requests: int | None = None
    vllm: bool = False


@dataclass
class Measured:
    """What a dtype's run found; `agreement` is a Report's, None where `replies` weren't run."""

    runs: list[Run] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    agreement: float | None = None


class Side(Protocol):
    """What can answer requests in a process of its own; see Yardstick."""

    def generate(self, requests: Sequence[tuple[Sequence[int], int]], at_once: int) -> Generated:
        """Answer requests, at most `at_once` of them at a time."""


class Endpoint(Protocol):
    """A served model; see Served."""

    name: str

    def target(self, reader: load.Reader = read_chat) -> Target:
        """Where completions are sent."""

    def describe(self) -> Mapping[str, Any]:
        """The engine's sizes and how it stands."""


class Bench:
    """The sides of one archive under measurement.

    Args:
        served: the model over HTTP.
        engine: the engine alone.
        side: starts another side by its kind, for as long as its context lasts.
        dtype: what all of them compute in.
        settings: what to measure.
        tokens: ids to write prompts with.
        progress: shows that a labelled step is under way.
    """

    def __init__(
        self,
        served: Endpoint,
        engine: Side,
        side: Callable[[str], AbstractContextManager[Side]],
        dtype: str,
        settings: Settings,
        tokens: Sequence[int],
        progress: Progress,
    ) -> None:
        self._served = served
        self._engine = engine
        self._side = side
        self._dtype = dtype
        self._settings = settings
        self._tokens = tokens
        self._progress = progress
        self._context = int(served.describe()["max_model_len"])

    def measure(self) -> Measured:
        """Measure every workload.

        Raises:
            UserError: a side fails, or a workload doesn't fit into the model's context.
        """
        found, wanted = Measured(), self._settings.workloads
        if "first_token" in wanted and self._settings.at_once <= DECODING:
            raise UserError(
                f"first_token needs room for {DECODING + 1} requests at once", hint=f"--batch-size {DECODING + 1}"
            )
        static = [name for name in BESIDE_STATIC if name in wanted]
        if static:
            vllm = self._side(VLLM) if self._settings.vllm else nullcontext()
            with self._side(STATIC) as side, vllm as other:
                for name in static:
                    self._beside_static(name, side, other, found)
        if "prefix" in wanted:
            with self._side(UNSHARED) as side:
                self._prefix(side, found)
        if HTTP in wanted:
            self._alternate(found)
        if "first_token" in wanted:
            for number in range(self._settings.rounds):
                found.first_tokens.append(self._first_token(number))
        return found

    def _beside_static(self, name: str, static: Side, vllm: Side | None, found: Measured) -> None:
        agreed: list[bool] = []
        at_once = self._settings.at_once
        self._warm()
        for number in range(self._settings.rounds):
            prompts = Prompts(self._tokens, f"{name}:{number}")
            count = self._settings.requests or (REPLIES if name == "replies" else SHAREGPT)
            asked = prompts.replies(count, at_once) if name == "replies" else prompts.sharegpt(count)
            self._check(name, asked)
            offline = self._offline(name, STATIC, static, asked, number, found)
            found.runs.append(self._over_http(name, asked, number))
            if name == "replies" or vllm is not None:
                alone = self._offline(name, ENGINE, self._engine, asked, number, found)
                agreed += [one == two for one, two in zip(alone.tokens, offline.tokens, strict=True)]
            if vllm is not None:
                self._offline(name, VLLM, vllm, asked, number, found)
        if agreed:
            found.agreement = agreed.count(True) / len(agreed)

    def _prefix(self, unshared: Side, found: Measured) -> None:
        for number in range(self._settings.rounds):
            asked = Prompts(self._tokens, f"prefix:{number}").prefix(PREFIX_REQUESTS)
            self._check("prefix", asked)
            self._offline("prefix", UNSHARED, unshared, asked, number, found)
            self._offline("prefix", ENGINE, self._engine, asked, number, found)

    def _alternate(self, found: Measured) -> None:
        """HTTP and the engine alone in turns, the one that comes first changing: what HTTP costs is less than what the
        same run differs by from one minute to the next."""
        self._warm()
        at_once = min(DECODING, self._settings.at_once)
        for number in range(PAIRS * self._settings.rounds):
            asked = Prompts(self._tokens, f"{HTTP}:{number}").staggered(HTTP_REQUESTS, DECODING_PROMPT, *HTTP_ANSWERS)
            self._check(HTTP, asked)
            for side in (SERVED, ENGINE) if number % 2 else (ENGINE, SERVED):
                if side == ENGINE:
                    self._offline(HTTP, ENGINE, self._engine, asked, number, found, at_once)
                else:
                    found.runs.append(self._over_http(HTTP, asked, number, at_once))

    def _offline(
        self,
        name: str,
        kind: str,
        side: Side,
        asked: Sequence[Request],
        number: int,
        found: Measured,
        at_once: int | None = None,
    ) -> Generated:
        pairs = [(each.prompt, each.new_tokens) for each in asked]
        with self._progress(self._label(name, kind, number)):
            done = side.generate(pairs, at_once or self._settings.at_once)
        lengths = [len(tokens) for tokens in done.tokens]
        if lengths != [each.new_tokens for each in asked]:
            raise UserError(f"{name}: {kind} did not generate as many tokens as it was asked for")
        found.runs.append(
            self._run(name, kind, number, done.seconds, list(zip(lengths, done.latency_s, strict=True)), done.first_s)
        )
        return done

    def _over_http(self, name: str, asked: Sequence[Request], number: int, at_once: int | None = None) -> Run:
        with self._progress(self._label(name, SERVED, number)):
            result = self._load(name, asked, at_once or self._settings.at_once)
        pairs = [(sample.generated or 0, sample.latency_s) for sample in result.samples]
        if sorted(tokens for tokens, _ in pairs) != sorted(each.new_tokens for each in asked):
            raise UserError(f"{name}: the server did not generate as many tokens as it was asked for")
        return self._run(name, SERVED, number, result.wall_s, pairs, _firsts(result))

    def _run(
        self,
        name: str,
        side: str,
        number: int,
        seconds: float,
        answers: Sequence[tuple[int, float]],
        firsts: Sequence[float],
    ) -> Run:
        short = [latency for tokens, latency in answers if tokens <= SHORT] if name == "replies" else []
        tokens = sum(tokens for tokens, _ in answers)
        first = percentile(firsts, 50)
        return Run(name, self._dtype, side, number, len(answers), tokens, seconds, percentile(short, 95), first)

    def _warm(self) -> None:
        """Let server and engine run once what they have not run yet, with all rows."""
        asked = Prompts(self._tokens, "warm").same(self._settings.at_once, DECODING_PROMPT, SHORT)
        self._check("the warm-up", asked)
        self._load("the warm-up", asked, self._settings.at_once)

    def _first_token(self, number: int) -> FirstToken:
        prompts = Prompts(self._tokens, f"first_token:{number}")
        room = self._context - DECODING_PROMPT
        steps = prompts.same(DECODING, DECODING_PROMPT, STEP_TOKENS)
        busy = prompts.same(DECODING, DECODING_PROMPT, min(BUSY_TOKENS, room))
        probes = prompts.same(2 * PROBES + 2, PROBE_PROMPT, 1)
        self._check("first_token", [*steps, *probes])
        with self._progress(self._label("first_token", "idle", number)):
            pairs = [(each.prompt, each.new_tokens) for each in probes[: PROBES + 1]]
            prefill = median(self._engine.generate(pairs, 1).first_s[1:])
        with self._progress(self._label("first_token", f"{DECODING} decode", number)):
            result = self._load("first_token", steps, DECODING)
            step = median(
                (sample.latency_s - sample.first_s) / (STEP_TOKENS - 1)
                for sample in result.samples
                if sample.first_s is not None
            )
        with self._progress(self._label("first_token", f"beside {DECODING}", number)):
            beside = load.run(self._beside(busy, probes[PROBES + 1 :]))
        _check_answers("first_token", beside)
        self._rest()
        return FirstToken(self._dtype, number, DECODING, step, prefill, median(_firsts(beside)))

    async def _beside(self, busy: Sequence[Request], probes: Sequence[Request]) -> LoadResult:
        """Send the probes one at a time while the busy ones decode; those are broken off afterwards."""
        begun, over = asyncio.Event(), asyncio.Event()
        heads = 0

        async def reader(response: aiohttp.ClientResponse) -> Received:
            # the head of a stream comes with its first token
            nonlocal heads
            heads += 1
            if heads == len(busy):
                begun.set()
            return await read_chat(response)

        async def decode() -> None:
            bodies = [body(each, self._served.name) for each in busy]
            count = len(bodies)
            await closed_loop(self._served.target(reader), bodies, clients=count, requests=count, stop=over)
            begun.set()

        decoding = asyncio.ensure_future(decode())
        try:
            await begun.wait()
            bodies = [body(each, self._served.name) for each in probes]
            result = await closed_loop(self._served.target(), bodies, clients=1, requests=len(bodies))
            if decoding.done():
                raise UserError("first_token: those that decode ended before the probes", hint="a longer context")
        finally:
            over.set()
            await decoding
        return replace(result, samples=result.samples[1:])  # the first one opened the connection

    def _load(self, name: str, asked: Sequence[Request], clients: int) -> LoadResult:
        bodies = [body(each, self._served.name) for each in asked]
        result = load.run(closed_loop(self._served.target(), bodies, clients=clients, requests=len(bodies)))
        _check_answers(name, result)
        return result

    def _rest(self) -> None:
        """Wait until the server has noticed that the clients of what ran are gone."""
        deadline = time.monotonic() + ANSWER_S
        while self._served.describe()["stats"]["running"]:
            if time.monotonic() > deadline:
                raise UserError(f"requests still run {ANSWER_S:g} s after their clients left")
            time.sleep(POLL_S)

    def _check(self, name: str, asked: Sequence[Request]) -> None:
        longest = max(len(each.prompt) + each.new_tokens for each in asked)
        if longest > self._context:
            raise UserError(
                f"{name} needs a context of {longest} tokens, and this model has {self._context}",
                hint="choose other workloads with --workload, or another model",
            )

    def _label(self, name: str, side: str, number: int) -> str:
        of = self._settings.rounds * (PAIRS if name == HTTP else 1)
        return f"{name} {self._dtype}: {side}, round {number + 1} of {of}"


def _firsts(result: LoadResult) -> list[float]:
    return [sample.first_s for sample in result.samples if sample.first_s is not None]


def _check_answers(name: str, result: LoadResult) -> None:
    """Raise UserError where not every request was answered: such a run compares with nothing."""
    failed = [sample for sample in result.samples if not sample.ok]
    if failed:
        why = failed[0].error or f"status {failed[0].status}"
        raise UserError(f"{name}: {len(failed)} of {len(result.samples)} requests failed: {why}")
