"""What a tuned model is sent: bodies, and when they are due."""

import bisect
import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.lib import archive
from scripts.lib.archive import Archive
from scripts.lib.errors import UserError
from scripts.lib.load import Due
from scripts.lib.load_plan import POOL, POOL_OF_LISTS, Open, plan, prepare_bodies
from scripts.lib.schedule import POISSON, steady
from scripts.lib.subjects import SUBJECTS
from scripts.lib.tuning import Kind
from scripts.lib.workloads import Body, Vocabulary, make_workload

SEED = {Kind.SEARCH: 0, Kind.FINAL: 1, Kind.QUIET: 0}  # what was found on some arrivals is verified on others


@dataclass(frozen=True)
class Sent:
    """Requests, and when they are due.

    Args:
        bodies: taken in turn, or as the trace has them.
        arrivals: poisson or constant, at a rate.
        trace: recorded requests, which have their own times.
        words: what they are, for people.
    """

    bodies: Sequence[Body]
    arrivals: str = POISSON
    trace: Open | None = None
    words: str = ""

    @property
    def times(self) -> tuple[float, ...]:
        """When the requests of the trace are due; none without one."""
        return () if self.trace is None else tuple(one.at for one in self.trace.trace)

    def dues(self, kind: Kind, rate: float | None, seconds: float) -> list[Due]:
        """The requests of a window: at a rate, or where it is None the trace's busiest stretch, or all of it."""
        if rate is not None:
            schedule = steady(rate, seconds, self.arrivals, SEED[kind])
            return list(Open("", seconds, schedule).dues(self.bodies))
        if self.trace is None:
            raise ValueError("a window needs a rate or a trace")
        dues = list(self.trace.dues(self.bodies))
        if kind == Kind.FINAL:
            return dues
        first, end = busiest(self.times, seconds)
        return [replace(due, at=due.at - dues[first].at) for due in dues[first:end]]

    def digest(self) -> str:
        """Of everything that decides what is sent, hex."""
        headers = [] if self.trace is None else [sorted(one.headers.items()) for one in self.trace.trace]
        found = hashlib.sha256(repr((self.arrivals, self.times, headers)).encode())
        for body in self.bodies:
            found.update(hashlib.sha256(body.data).digest())
        return found.hexdigest()


def busiest(times: Sequence[float], seconds: float) -> tuple[int, int]:
    """The requests, from a number up to another, of the stretch that begins with a request and holds the most."""
    ends = [bisect.bisect_left(times, start + seconds) for start in times]
    first = max(range(len(times)), key=lambda number: ends[number] - number)
    return first, ends[first]


def read(about: Archive, *, bodies: Path | None, trace: Path | None, workload: str | None, arrivals: str) -> Sent:
    """What the options ask for; without any, the task's mixed texts, in the model's own words.

    Raises:
        UserError: two sources at once, a file that can't be read, or no texts can be made for this model.
    """
    given = {"--bodies": bodies, "--trace": trace, "--workload": workload}
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} each say what is sent", "give one of them")
    if trace is not None:
        (recorded,) = plan(trace=trace)
        assert isinstance(recorded, Open)
        return Sent(prepare_bodies((recorded,), None, "", "", None, None), arrivals, recorded, f"trace {trace.name}")
    if bodies is not None:
        made = prepare_bodies((), bodies, "", "", None, None)
        return Sent(made, arrivals, None, f"{len(made)} bodies of {bodies.name}")
    return _generated(about, workload, arrivals)


def _generated(about: Archive, workload: str | None, arrivals: str) -> Sent:
    task = str(about.settings.get("task"))
    subject = SUBJECTS.get(task)
    if subject is None:
        raise UserError(f"no texts are made for {task}", "send your own requests: --bodies FILE, a JSON value a line")
    name = workload or ("mixed" if "mixed" in subject.workloads else subject.workloads[0])
    if name not in subject.workloads:
        raise UserError(f"--workload {name}: not one of {task}", f"one of {', '.join(subject.workloads)}")
    member = f"{about.settings.get('model', 'model')}/tokenizer.json"
    try:
        with archive.opened(about.path) as whole, tempfile.TemporaryDirectory(prefix="batchserve-") as directory:
            (Path(directory) / "tokenizer.json").write_bytes(whole.read(member))
            vocabulary = Vocabulary.load(Path(directory))
    except UserError:
        raise
    except Exception as failure:  # tokenizers raises bare ones, whatever is wrong with the file
        raise UserError(f"{about.path}: no texts can be made for this model: {failure}", "--bodies FILE") from failure
    pool = make_workload(name, vocabulary, POOL_OF_LISTS if name == "lists" else POOL, subject=subject)
    return Sent(pool.bodies, arrivals, None, f"{name} texts for {task}")
