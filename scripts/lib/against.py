"""A running server under load, from the options of `bench --against` to the files with the results."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from scripts.lib import load, load_html, load_report, machine, openai_api
from scripts.lib.drive import Drive, check_url, shown_url
from scripts.lib.errors import UserError
from scripts.lib.interrupts import stop_on_signals
from scripts.lib.live import shown
from scripts.lib.load import Target
from scripts.lib.load_plan import plan, prepare_bodies
from scripts.lib.load_report import LoadReport
from scripts.lib.objective import Objective
from scripts.lib.schedule import is_header
from scripts.lib.subjects import SUBJECTS

WARM_UP = 32


@dataclass(frozen=True)
class Wanted:
    """The options as they were given; None where one was not.

    Attributes:
        url: where predictions are posted; with `openai`, the base URL of that API.
        token: sent as a bearer token.
        clients, rate, steps, trace, arrivals, duration_s, requests: the load, as `load_plan.plan` has them.
        task, workload: of generated requests.
        bodies: a file of requests.
        warm_up: unmeasured requests before each window.
        objective: as a person writes it.
        metrics: where the server's metrics are.
        openai: embeddings or chat.
        model: that an OpenAI request asks for.
    """

    url: str
    token: str | None = None
    clients: Sequence[int] | None = None
    rate: str | None = None
    steps: str | None = None
    trace: Path | None = None
    arrivals: str | None = None
    duration_s: float | None = None
    requests: int | None = None
    task: str | None = None
    workload: str | None = None
    bodies: Path | None = None
    warm_up: int | None = None
    objective: str | None = None
    metrics: str | None = None
    openai: str | None = None
    model: str | None = None

    def drive(self) -> Drive:
        """What that asks for, the requests made or read.

        Raises:
            UserError: options that exclude each other, that can't be read, or that would do nothing.
        """
        loads = plan(self.clients, self.rate, self.steps, self.trace, self.arrivals, self.duration_s, self.requests)
        url = check_url(self.url, "--against")
        self._check()
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        target = Target(url, headers)
        if self.openai is not None:
            reader = openai_api.read_chat if self.openai == "chat" else load.whole
            target = Target(openai_api.endpoint(url, self.openai), headers | openai_api.HEADERS, reader=reader)
        return Drive(
            target,
            prepare_bodies(loads, self.bodies, self._workload, self._task, self.openai, self.model),
            loads,
            WARM_UP if self.warm_up is None else self.warm_up,
            None if self.objective is None else Objective.parse(self.objective),
            None if self.metrics is None else check_url(self.metrics, "--metrics"),
        )

    @property
    def _task(self) -> str:
        return self.task or "embedding"

    @property
    def _workload(self) -> str:
        known = SUBJECTS[self._task].workloads
        return self.workload or ("mixed" if "mixed" in known else known[0])

    def _check(self) -> None:
        if self.token is not None and not is_header("Authorization", self.token):
            raise UserError("--token holds what no key holds: line ends or control characters", hint="was it cut well?")
        if self.token is not None and "@" in urlsplit(self.url).netloc:
            raise UserError("--token and a password in the URL exclude each other", hint="give one of them")
        own = self.bodies is not None or self.trace is not None
        if self.openai is None and self.model is not None:
            raise UserError("--model says nothing about a running server", hint="its URL names the model")
        if self.openai is not None and self.model is None and not own:
            raise UserError("--openai needs a model to ask for", hint="--model NAME")
        if self.task is not None and (own or self.openai is not None):
            raise UserError("--task says nothing about requests of a file or of OpenAI's API", hint="leave it out")
        if self.workload is not None and own:
            raise UserError("--workload says nothing about requests of a file", hint="leave it out")
        known = SUBJECTS.get(self._task)
        if known is None:
            raise UserError(f"--task {self.task}: not known", hint=f"one of {', '.join(SUBJECTS)}")
        if self.workload is not None and self.workload not in known.workloads:
            raise UserError(f"--workload {self.workload}: not one", hint=f"one of {', '.join(known.workloads)}")

    def described(self, drive: Drive) -> dict[str, Any]:
        """The settings that explain the figures; no key and no request among them."""
        own = self.trace or self.bodies
        made = f"{self._workload} texts for {self.openai or self._task}"
        found = {
            "server": shown_url(drive.target.url),
            "load": ", ".join(one.label for one in drive.loads),
            "arrivals": (self.arrivals or "poisson") if self.rate or self.steps else None,
            "requests": f"{len(drive.bodies)} different ones, {made if own is None else f'from {own.name}'}",
            "model": self.model,
            "seconds": drive.loads[0].seconds,
            "warm-up": drive.warmup,
            "objective": self.objective,
        }
        return {name: value for name, value in found.items() if value is not None}


def measure(wanted: Wanted, console: Console, json_file: Path | None, html_file: Path | None) -> bool:
    """Put the server under load, print what came out and write it to files.

    Returns:
        Whether it was measured to the end, and not interrupted.

    Raises:
        UserError: of `Wanted.drive` and `Drive.run`.
    """
    drive = wanted.drive()
    here = machine.describe()
    with stop_on_signals():
        driven = load.run(drive.run(shown))
    report = LoadReport(here, wanted.described(drive), driven)
    load_report.show(report, console)
    if json_file is not None:
        json_file.write_bytes(load_report.to_json(report))
        console.print(f"wrote {json_file}", markup=False)
    if html_file is not None:
        html_file.write_text(load_html.page(report), encoding="utf-8")
        console.print(f"wrote {html_file}", markup=False)
    return not driven.interrupted
