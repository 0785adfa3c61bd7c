"""`batchserve plan`: predict latency and hardware for a load, by simulating TorchServe's batching."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.lib.capacity import Planner
from scripts.lib.console import console, progress
from scripts.lib.costs import Profile, Request
from scripts.lib.errors import UserError
from scripts.lib.objective import Objective
from scripts.lib.prediction import rows, show, show_validation, validation_json
from scripts.lib.profiling import Texts, profile, token_lengths
from scripts.lib.schedule import CONSTANT, POISSON, read_bodies, read_trace
from scripts.lib.serving import DEFAULT_SERVING, ServedModel, Serving
from scripts.lib.simulation import ClosedLoop, OpenLoop, Setup
from scripts.lib.validation import Bench, read, validate
from scripts.lib.workloads import request_lengths

DEVICES = {"cuda": 8, "cpu": 1}  # of one TorchServe, when nothing else is said
POOL = 1000


def plan(
    name: Annotated[str, typer.Argument(metavar="NAME|ARCHIVE", help="A model of serving.yaml, or a .mar file.")],
    rate: Annotated[float | None, typer.Option(help="Requests per second.", min=0.001)] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Instead of a rate: so many clients, each waiting for its answer.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead of a rate: a request a line, with `at` (seconds) and `body`."),
    ] = None,
    objective: Annotated[str, typer.Option(help="Such as p99<=100ms; several with commas.")] = "p95<=200ms",
    profile_file: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="FILE", help="Costs that batchserve profile wrote; measured here and now if not given."
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Lengths of texts: short or mixed; those of the profile if not given.")
    ] = None,
    bodies: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lengths of these request bodies: a JSON value a line.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson (many independent users) or constant.")] = POISSON,
    workers: Annotated[int | None, typer.Option(min=1, help="Of the first row; serving.yaml's if not given.")] = None,
    workers_per_device: Annotated[
        int | None,
        typer.Option(min=1, help="Workers that share a GPU (1 if not given) or the cores (all workers)."),
    ] = None,
    devices_per_server: Annotated[
        int | None, typer.Option(min=1, help="Most devices of one TorchServe: 8 GPUs, or 1 CPU, if not given.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Instead of serving.yaml's.")] = None,
    max_batch_delay: Annotated[int | None, typer.Option(min=1, help="Milliseconds, instead of serving.yaml's.")] = None,
    queue: Annotated[int | None, typer.Option(min=1, help="Instead of serving.yaml's.")] = None,
    requests: Annotated[int, typer.Option(min=100, help="To simulate for each row.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Another one, other arrivals.")] = 0,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="BENCH.json",
            help="Instead of a load: predict what batchserve bench measured; a running server's setup is taken to be "
            "the declared one.",
        ),
    ] = None,
    serving: Annotated[Path, typer.Option(help="The deployment.")] = DEFAULT_SERVING,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write it all there.")] = None,
) -> None:
    """Predict p50, p95, p99, batch sizes and utilisation, and the workers and devices that a load needs.

    TorchServe's batching is simulated over what the archive's batches cost. The same seed gives the same figures.
    """
    if sum(given is not None for given in (rate, clients, trace, against)) != 1:
        raise UserError("plan needs one load", "give one of --rate, --clients, --trace, --against")
    if arrivals not in (POISSON, CONSTANT):
        raise UserError(f"--arrivals {arrivals}: not known", f"{POISSON} or {CONSTANT}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"{json_file}: there is no directory {json_file.parent}", hint="make it, or name another file")
    goal = Objective.parse(objective)
    measured = read(against) if against else None
    path, served = _model(name, serving)
    declared = served.model_copy(
        update={
            key: value
            for key, value in {
                "workers": workers,
                "batch_size": batch_size,
                "max_batch_delay": max_batch_delay,
                "queue": queue,
            }.items()
            if value is not None
        }
    )
    sent = _Sent.read(bodies, trace, workload)
    known = Profile.read(profile_file) if profile_file else None
    if known is None:
        settings = measured.settings if isinstance(measured, Bench) else None
        beside = settings.workers if settings else workers_per_device or declared.workers
        threads = settings.threads if settings else None
        texts = Texts(sent.workload or "mixed", sent.bodies)
        known = profile(path, texts, workers=beside, threads=threads, progress=progress, seed=seed)
    per_device = workers_per_device or (1 if known.device == "cuda" else declared.workers)
    setup = Setup(declared.workers, declared.batch_size, declared.max_batch_delay, declared.queue, per_device)
    lengths = sent.lengths(path, known, seed)
    if measured is not None:
        with progress("simulating what was measured"):
            points, notes = validate(known, measured, setup, lengths, seed)
        show_validation(points, notes, console)
        _write(json_file, validation_json(points, notes))
        return
    planner = Planner(
        known,
        lengths,
        setup,
        goal,
        devices_per_server or DEVICES[known.device],
        arrivals,
        requests,
        seed,
    )
    found = rows(planner, rate, _load(planner, clients, sent.times), progress)
    show(planner, found, console)
    _write(json_file, {"objective": str(goal), "profile": known.model_dump(exclude={"requests"}), "rows": found})


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {path}", markup=False)


@dataclass(frozen=True)
class _Sent:
    """What the options say of the requests: bodies, when they are sent, or the name of a workload."""

    bodies: tuple[bytes, ...] = ()
    times: tuple[float, ...] = ()
    workload: str | None = None

    @classmethod
    def read(cls, bodies: Path | None, trace: Path | None, workload: str | None) -> "_Sent":
        if sum(given is not None for given in (bodies, trace, workload)) > 1:
            raise UserError("--bodies, --trace and --workload each say what is sent", "give one of them")
        if workload not in (None, "short", "mixed"):
            raise UserError(f"--workload {workload}: not known", "short or mixed; for others: --bodies")
        if trace is not None:
            arrivals = read_trace(trace)
            return cls(tuple(each.body for each in arrivals), tuple(each.at for each in arrivals))
        return cls(tuple(read_bodies(bodies)) if bodies else (), (), workload)

    def lengths(self, path: Path, known: Profile, seed: int) -> Sequence[Request]:
        """Tokens of each text of each request."""
        if self.bodies:
            with progress(f"tokenising {len(self.bodies)} bodies"):
                return token_lengths(path, self.bodies)
        if self.workload is not None:
            return request_lengths(self.workload, POOL, seed, most=known.max_tokens)
        return known.requests


def _model(name: str, serving: Path) -> tuple[Path, ServedModel]:
    """The archive, and how it is served: as serving.yaml declares it, or by its defaults where a file is named."""
    if name.endswith(".mar"):
        return Path(name), ServedModel(archive=Path(name).name, version="1.0")
    deployment = Serving.load(serving)
    if name not in deployment.models:
        known = ", ".join(deployment.models)
        raise UserError(f"{serving} declares no model {name} (it has {known}).", "name one of them, or a .mar file")
    model = deployment.models[name]
    return deployment.server.model_store / model.archive, model


def _load(planner: Planner, clients: int | None, times: Sequence[float]) -> OpenLoop | ClosedLoop | None:
    if clients is None:
        return OpenLoop(times) if times else None
    if clients > planner.setup.queue:
        raise UserError(f"{clients} clients pass the queue of {planner.setup.queue}", "name a longer one: --queue")
    return ClosedLoop(clients, planner.count)
