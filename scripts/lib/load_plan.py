"""What loads a server is put under, window by window, and what requests they are made of."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from scripts.lib import openai_api
from scripts.lib.errors import UserError
from scripts.lib.load import Due
from scripts.lib.schedule import CONSTANT, POISSON, Arrival, Schedule, parse_phases, read_bodies, read_trace, steady
from scripts.lib.source import resolve
from scripts.lib.subjects import SUBJECTS
from scripts.lib.workloads import Body, Vocabulary, make_workload

SECONDS = 30.0
CLIENTS = (1, 8)
# Distinct requests of a generated load: whole blocks of a workload's mixture, and more than a cache holds by chance.
POOL = 1000
POOL_OF_LISTS = 100
# Keys under which the common APIs take several texts; what a request holds is counted by the longest of them.
LISTS = ("texts", "inputs", "input", "instances", "documents", "passages", "pairs", "text")


@dataclass(frozen=True)
class Closed:
    """N clients, each sending when its last request is answered, for a time or for a count of requests."""

    clients: int
    seconds: float | None
    requests: int | None = None

    @property
    def label(self) -> str:
        """How the window is named."""
        return f"{self.clients} client{'s' if self.clients > 1 else ''}"


@dataclass(frozen=True)
class Stretch:
    """A part of an open loop that is reported by itself too: requests due from `start` to `end`, in seconds."""

    label: str
    start: float
    end: float


@dataclass(frozen=True)
class Open:
    """Requests sent when they are due: at a schedule's times, or as a trace has them.

    Attributes:
        label: how the window is named.
        seconds: how long requests are due for.
        schedule: their times, for which bodies are taken in turn; None where there is a trace.
        trace: times and bodies together.
        stretches: parts of a load that changes.
    """

    label: str
    seconds: float
    schedule: Schedule | None = None
    trace: tuple[Arrival, ...] = ()
    stretches: tuple[Stretch, ...] = ()

    def dues(self, bodies: Sequence[Body]) -> Iterator[Due]:
        """The requests, by ascending time; `bodies` go round where there is no trace."""
        if self.schedule is None:
            return (Due(one.at, body, one.headers) for one, body in zip(self.trace, bodies, strict=True))
        return (Due(at, body) for at, body in zip(self.schedule.times(), itertools.cycle(bodies), strict=False))


Load = Closed | Open


def plan(
    clients: Sequence[int] | None = None,
    rate: str | None = None,
    steps: str | None = None,
    trace: Path | None = None,
    arrivals: str | None = None,
    duration_s: float | None = None,
    requests: int | None = None,
) -> tuple[Load, ...]:
    """The windows that the options ask for; closed loops where none says otherwise.

    Raises:
        UserError: two kinds of load at once, an option that the kind has no use for, or one that can't be read.
    """
    kinds = {"--clients": clients, "--rate": rate, "--steps": steps, "--trace": trace}
    given = [option for option, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are different loads", hint="give one of them")
    kind = given[0] if given else "--clients"
    useless = {
        "--arrivals": arrivals is not None and kind not in ("--rate", "--steps"),
        "--duration": duration_s is not None and kind in ("--steps", "--trace"),
        "--requests": requests is not None and kind != "--clients",
    }
    for option, unused in useless.items():
        if unused:
            raise UserError(f"{option} says nothing about a load by {kind}", hint="leave it out")
    if arrivals not in (None, POISSON, CONSTANT):
        raise UserError(f"--arrivals {arrivals}: not known", hint=f"{POISSON} or {CONSTANT}")
    gaps, seconds = arrivals or POISSON, duration_s or SECONDS
    if rate is not None:
        return tuple(Open(f"{one:g}/s", seconds, steady(one, seconds, gaps)) for one in _rates(rate))
    if steps is not None:
        return (_stepped(steps, gaps),)
    if trace is not None:
        found = tuple(read_trace(trace))
        return (Open(trace.name, found[-1].at, trace=found),)
    return tuple(Closed(count, None if requests else seconds, requests) for count in clients or CLIENTS)


def _stepped(text: str, arrivals: str) -> Open:
    phases = parse_phases(text)
    ends = list(itertools.accumulate(phase.seconds for phase in phases))
    stretches = tuple(
        Stretch(f"{label.strip()} (from {end - phase.seconds:g} s)", end - phase.seconds, end)
        for phase, end, label in zip(phases, ends, text.split(","), strict=True)
    )
    return Open(f"steps {text.replace(' ', '')}", ends[-1], Schedule(phases, arrivals), stretches=stretches)


def _rates(text: str) -> list[float]:
    try:
        rates = sorted({float(word) for word in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise UserError(f"--rate {text}: not numbers above 0", hint="requests per second, for example --rate 20,50")
    return rates


def prepare_bodies(
    loads: Sequence[Load], file: Path | None, workload: str, task: str, openai: str | None, model: str | None
) -> tuple[Body, ...]:
    """The requests to send: those of the trace, of a file, or generated ones.

    Args:
        loads: the plan.
        file: bodies, a JSON value a line.
        workload, task: of generated requests; their words are of MiniLM's vocabulary.
        openai: the kind of OpenAI request; None for ours.
        model: the model to name in an OpenAI request.

    Raises:
        UserError: two sources at once, or the file can't be read.
    """
    trace = [one.body for load in loads if isinstance(load, Open) for one in load.trace]
    if trace and file is not None:
        raise UserError("--trace has its own bodies", hint="leave out --bodies")
    if trace or file is not None:
        made = [Body(data, _texts(data), 0) for data in trace or read_bodies(file or Path())]
    else:
        made = _generated(workload, task, openai)
    if openai is None:
        return tuple(made)
    return tuple(Body(openai_api.completed(one.data, openai, model), one.texts, one.tokens) for one in made)


def _generated(workload: str, task: str, openai: str | None) -> list[Body]:
    vocabulary = Vocabulary.load(resolve("bundled:minilm").directory)
    if openai is not None:
        task = "embedding"
    pool = make_workload(workload, vocabulary, POOL_OF_LISTS if workload == "lists" else POOL, subject=SUBJECTS[task])
    if openai is None:
        return list(pool.bodies)
    texts, made = iter(pool.texts), []
    for one in pool.bodies:
        held = list(itertools.islice(texts, one.texts))
        made.append(Body(orjson.dumps(openai_api.body(held, openai)), one.texts, one.tokens))
    return made


def _texts(data: bytes) -> int:
    """How many texts a request holds, as far as its shape tells; at least one."""
    try:
        value: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        return 1
    if isinstance(value, dict):
        return max((len(value[key]) for key in LISTS if isinstance(value.get(key), list)), default=0) or 1
    return len(value) or 1 if isinstance(value, list) else 1
