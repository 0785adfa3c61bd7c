"""`batchserve bench`: serve a model, drive it over HTTP, and compare with the offline library in the same run."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.lib import archive, machine
from scripts.lib.benchmark import Measured, Settings, run
from scripts.lib.console import console, progress
from scripts.lib.errors import UserError
from scripts.lib.interrupts import stop_on_signals
from scripts.lib.recipe import Order, prepare
from scripts.lib.report import Report, show, write_json
from scripts.lib.source import resolve
from scripts.lib.subjects import SUBJECTS, Subject
from scripts.lib.targets import FULL_LOAD, judge

DTYPES = ("float32", "bfloat16")
# More of the machine's cores than this busy before we start: others will show in the figures.
BUSY_SHARE = 0.25


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="What to serve: a model's directory, a hub id, or bundled:minilm (which it is if not given). It is "
            "built first."
        ),
    ] = None,
    archive_file: Annotated[
        Path | None,
        typer.Option(
            "--archive",
            metavar="FILE",
            help="Serve this archive of ours instead of building one; its dtype and threads are measured.",
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help=f"What the model is for: one of {', '.join(SUBJECTS)}. Where no model is named, others than embedding "
            "get an untrained one of a usual size."
        ),
    ] = "embedding",
    workload: Annotated[
        str,
        typer.Option(
            help="short (5–25 tokens), mixed (one in ten 200–256), lists (32 mixed texts a request, or 64 pairs), "
            "several with commas, or all that the task has."
        ),
    ] = "all",
    clients: Annotated[
        str | None, typer.Option(help="How many clients send at once, several with commas; by task if not given.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 (if not given) or bfloat16, both with a comma; the offline library runs in the same."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of TorchServe.")] = 2,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each worker; cores ÷ workers if not given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests a batch at most.")] = 32,
    max_batch_delay: Annotated[
        int, typer.Option(min=1, help="Milliseconds that the first request of a batch waits for others.")
    ] = 1,
    compare_batch_1: Annotated[
        bool, typer.Option(help="Also serve with batch size 1 and compare on short (with the most clients).")
    ] = True,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests per measured window, a tenth for lists; by workload and clients if not given."
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds per measured window, instead of a count of requests.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured; the table shows medians.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write everything measured to this file.")
    ] = None,
) -> None:
    """Measure requests/s, latency, batching and memory over HTTP against the task's own library.

    Embedding against sentence-transformers' encode, reranking against its CrossEncoder, classification and
    token_classification against transformers' pipelines, seq2seq against generate in batches of 32.

    TorchServe is started on free ports in a temporary directory and stopped at the end; running servers are not
    touched. Nothing else should run meanwhile. A full run takes several minutes; --workload mixed --clients 64
    --rounds 1 less than one.
    """
    if requests is not None and duration is not None:
        raise UserError("--requests and --duration exclude each other", hint="give one of them")
    if archive_file is not None:
        dtypes, threads = _of_archive(archive_file, {"--model": model, "--dtype": dtype, "--threads": threads})
    else:
        dtypes = _choices(dtype or DTYPES[0], DTYPES, "--dtype")
    if task not in SUBJECTS:
        raise UserError(f"--task {task}: not known", hint=f"one of {', '.join(SUBJECTS)}")
    subject = SUBJECTS[task]
    workloads = _choices(workload, subject.workloads, "--workload")
    settings = Settings(
        workloads=workloads,
        clients=subject.clients if clients is None else _counts(clients),
        workers=workers,
        threads=threads,
        max_batch_delay=max_batch_delay,
        batch_sizes=(batch_size, 1) if compare_batch_1 and batch_size > 1 and "short" in workloads else (batch_size,),
        rounds=rounds,
        requests=requests,
        duration_s=duration,
        subject=subject,
    )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"{json_file}: there is no directory {json_file.parent}", hint="make it, or name another file")

    here = machine.describe()
    measured: dict[str, Measured] = {}
    build_s: float | None = None
    with stop_on_signals(), tempfile.TemporaryDirectory(prefix="batchserve-bench-") as temporary:
        work = Path(temporary)
        source = _model(model, subject, work, archive_file)
        for each in dtypes:
            built, directory = archive_file, work / each
            directory.mkdir()
            if built is None:
                with progress(f"building {source} ({each})"):
                    built, build_s = _build(source, task, each, threads, directory)
            measured[each] = run(built, each, settings, here, directory, progress)

    report = _report(here, settings, measured, source if archive_file is None else archive_file.name, build_s)
    show(report, console)
    if json_file is not None:
        write_json(report, json_file)
        console.print(f"wrote {json_file}", markup=False)


def _report(
    here: machine.Machine, settings: Settings, measured: dict[str, Measured], subject: str, build_s: float | None
) -> Report:
    points = tuple(point for each in measured.values() for point in each.points)
    report = Report(
        machine=here,
        settings=_settings(settings, subject, here.cores),
        points=points,
        offline=tuple(run for each in measured.values() for run in each.offline),
        notes=tuple(_notes(here, measured)),
        agreement={dtype: each.agreement for dtype, each in measured.items() if each.agreement is not None},
    )
    return report.judged(judge(report, build_s, settings.subject.task))


def _settings(settings: Settings, subject: str, cores: int) -> dict[str, Any]:
    total = settings.total_threads(cores)
    return {
        "task": settings.subject.task,
        "yardstick": settings.subject.yardstick,
        "model": subject,
        "workers": settings.workers,
        "threads per worker": total // settings.workers,
        "offline threads": total,
        "batch size": settings.batch_sizes[0],
        "max batch delay ms": settings.max_batch_delay,
        "rounds": settings.rounds,
    }


def _notes(here: machine.Machine, measured: dict[str, Measured]) -> list[str]:
    """What a reader must know to judge the figures."""
    notes = []
    if here.load_before > BUSY_SHARE * here.cores:
        notes.append(f"the machine was busy before the run (load {here.load_before:g} on {here.cores} cores)")
    if "bfloat16" in measured and not here.computes_bfloat16:
        notes.append("this processor has no bfloat16 arithmetic: it is emulated, and slower than float32 on both sides")
    for dtype, each in measured.items():
        if each.agreement is not None:
            notes.append(f"{dtype}: served and offline answers agree to {each.agreement:.6f} (1 is equal)")
        for point in each.points:
            shares = [one.generator_share for one in point.rounds]
            if any(one.generator_bottleneck for one in point.rounds):
                where = f"{point.workload} at {point.clients} clients, {dtype}, batch size {point.batch_size}"
                notes.append(f"{where}: the load generator was the bottleneck ({max(shares):.2f} cores)")
            if point.errors:
                statuses = sorted({status for one in point.rounds for status in one.summary.errors_by_status})
                notes.append(f"{point.workload} at {point.clients} clients: {point.errors} errors, status {statuses}")
    shares = [one.generator_share for each in measured.values() for point in each.points for one in point.rounds]
    if shares:
        notes.append(f"the load generator took at most {max(shares):.2f} of the machine's {here.cores} cores")
    return notes


def _model(named: str | None, subject: Subject, work: Path, archive_file: Path | None) -> str:
    """The model to build, made first where none is named and the task needs another than MiniLM."""
    if named is not None or archive_file is not None or subject.stand_in is None:
        return named or "bundled:minilm"
    directory = work / f"untrained-{subject.task}"
    directory.mkdir()
    with progress(f"making an untrained model for {subject.task.replace('_', ' ')}"):
        subject.stand_in(directory)
    return str(directory)


def _build(model: str, task: str, dtype: str, threads: int | None, directory: Path) -> tuple[Path, float]:
    """Build an archive without verifying it; its path, and the seconds that took."""
    store, work = directory / "store", directory / "build"
    store.mkdir()
    work.mkdir()
    overrides: dict[str, Any] = {"dtype": dtype} | ({"threads": threads} if threads else {})
    source = resolve(model)
    start = time.perf_counter()
    recipe = prepare(Order(source, name="bench", version="1.0", task=task, overrides=overrides), work)
    path = store / "bench.mar"
    archive.write(path, recipe.contents, recipe.members)
    return path, time.perf_counter() - start


def _of_archive(path: Path, given: Mapping[str, object]) -> tuple[tuple[str, ...], int | None]:
    """The dtype and the threads per worker that an archive was built with, for the yardstick to have the same.

    Args:
        path: the archive.
        given: options that say how to build one, None where they were not given.

    Raises:
        UserError: one was given, or the archive can't be read or isn't ours.
    """
    named = [option for option, value in given.items() if value is not None]
    if named:
        raise UserError(
            f"{' and '.join(named)} can't change an archive that is built",
            hint="leave it out, or leave out --archive and have one built",
        )
    settings = archive.read(path).settings
    dtype, threads = str(settings.get("dtype", "auto")), settings.get("threads")
    return ("float32" if dtype == "auto" else dtype,), threads if isinstance(threads, int) else None


def _choices(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    if wanted == ["all"]:
        return tuple(known)
    unknown = [word for word in wanted if word not in known]
    if unknown or not wanted:
        raise UserError(f"{option} {text}: not known", hint=f"one or more of {', '.join(known)}, or all")
    return tuple(dict.fromkeys(wanted))


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise UserError(f"--clients {text}: not whole numbers from 1", hint=f"for example --clients 1,8,{FULL_LOAD}")
    return tuple(counts)
