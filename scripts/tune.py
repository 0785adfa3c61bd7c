"""`batchserve tune`: find the batch size, delay, workers and threads that meet a latency objective at the most load."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from scripts.lib import archive, store, tune_report, variant
from scripts.lib.console import console, progress
from scripts.lib.errors import UserError
from scripts.lib.interrupts import INTERRUPTED
from scripts.lib.objective import Objective
from scripts.lib.schedule import CONSTANT, POISSON
from scripts.lib.serving import DEFAULT_SERVING, ServedModel, Serving
from scripts.lib.serving_edit import change_model
from scripts.lib.tune_report import TuneReport
from scripts.lib.tune_state import DIRECTORY
from scripts.lib.tuner import Tuner, Wanted
from scripts.lib.tuning import Setting

DTYPES = ("float32", "float16", "bfloat16")
LEAST_BUDGET_S = 10.0
_SECONDS = {"s": 1, "m": 60, "h": 3600}

T = TypeVar("T")


def tune(
    name: Annotated[str, typer.Argument(metavar="NAME|ARCHIVE", help="A model of serving.yaml, or a .mar file.")],
    objective: Annotated[str, typer.Option(help="Such as p95<=200ms; several with commas.")] = "p95<=200ms",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second to be served; the highest rate is sought if not given.", min=0.01),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead of a rate: recorded requests, a line each, with `at` and `body`."),
    ] = None,
    bodies: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Send these request bodies: a JSON value a line.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Without --bodies: short, mixed (if not given) or lists, made for the task.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson (many independent users) or constant.")] = POISSON,
    budget: Annotated[str, typer.Option(help="Time for all of it: 90s, 10m, 1h.")] = "10m",
    workers: Annotated[
        str | None, typer.Option(help="To choose from, with commas; by cores, or GPUs, if not given.")
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(help="Of a worker, with commas; cores ÷ workers, and fewer for a --rate, if not given."),
    ] = None,
    batch_size: Annotated[str | None, typer.Option(help="With commas; 1 to 64 by doubling if not given.")] = None,
    max_batch_delay: Annotated[
        str | None, typer.Option(help="Milliseconds, with commas; 1,2,5,10,20,50 if not given.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="With commas; only the archive's own if not given, since another one changes answers a bit."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Also measure TorchServe's defaults and its tutorials' setting in the same way.",
        ),
    ] = True,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write what was found into serving.yaml, keeping its comments.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what earlier runs have measured.")] = False,
    serving: Annotated[Path, typer.Option(help="The deployment.", metavar="FILE")] = DEFAULT_SERVING,
    report: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the report goes, NAME.md and NAME.html, and what was measured.")
    ] = DIRECTORY,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write everything measured to this file.")
    ] = None,
) -> None:
    """Find the setting that meets a latency objective: at a rate the cheapest one, else the one of the highest rate.

    A TorchServe of its own is started on free ports, and stopped at the end; running servers are not touched, but
    nothing else should run meanwhile. What is worth measuring, a simulation over the archive's measured costs decides.
    The setting reported met the objective in a last window at the load named. Ctrl-C keeps what was measured, and the
    same command goes on from there; where all was measured, it shows the result again at once.
    """
    if rate is not None and trace is not None:
        raise UserError("--rate and --trace are different loads", "give one of them")
    if arrivals not in (POISSON, CONSTANT):
        raise UserError(f"--arrivals {arrivals}: not known", f"{POISSON} or {CONSTANT}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"{json_file}: there is no directory {json_file.parent}", "make it, or name another file")
    entry, path, served, deployed = _model(name, serving, needed=apply)
    wanted = Wanted(
        path, served, deployed, Objective.parse(objective), rate, trace, bodies, workload, arrivals, _seconds(budget),
        _counts(workers, "--workers"), _counts(threads, "--threads"), _counts(batch_size, "--batch-size"),
        _counts(max_batch_delay, "--max-batch-delay"), _list(dtype, _dtype), compare, report, fresh,
    )  # fmt: skip
    tuner = Tuner(wanted, progress)
    found = tuner.run()
    tune_report.show(found, console)
    _write(found, report, json_file)
    if found.outcome is None:
        raise typer.Exit(INTERRUPTED)
    if found.outcome.winner is None:
        raise typer.Exit(1)
    if apply:
        assert entry is not None
        _apply(tuner, found.outcome.winner.setting, entry, served, deployed, serving)


def _model(name: str, serving: Path, *, needed: bool) -> tuple[str | None, Path, ServedModel, Serving]:
    """The entry's name (None where there is none), the archive, its entry or the defaults of one, the deployment."""
    if not name.endswith(".mar"):
        deployed = Serving.load(serving)
        if name not in deployed.models:
            known = ", ".join(deployed.models)
            raise UserError(f"{serving} declares no model {name} (it has {known})", "name one of them, or a .mar file")
        served = deployed.models[name]
        return name, deployed.server.model_store / served.archive, served, deployed
    path = Path(name)
    if serving.exists() or needed:
        deployed = Serving.load(serving)
        for entry, served in deployed.models.items():
            if (deployed.server.model_store / served.archive).resolve() == path.resolve():
                return entry, path, served, deployed
        if needed:
            raise UserError(f"{serving} declares no model of {path}: nothing to --apply the result to", "add an entry")
    served = ServedModel.model_validate({"archive": path.name, "version": archive.read(path).version or "1.0"})
    return None, path, served, Serving.model_validate({"models": {"model": served}})


def _write(found: TuneReport, directory: Path, json_file: Path | None) -> None:
    written = {
        directory / f"{found.name}.md": tune_report.markdown(found).encode(),
        directory / f"{found.name}.html": tune_report.page(found).encode(),
    }
    if json_file is not None:
        written[json_file] = tune_report.to_json(found)
    for path, content in written.items():
        path.write_bytes(content)
        console.print(f"wrote {path}", markup=False)


def _apply(tuner: Tuner, setting: Setting, name: str, served: ServedModel, deployed: Serving, serving: Path) -> None:
    """Put a setting into the deployment; where the archive must say otherwise for it, a variant beside the old one."""
    values: dict[str, str | int] = {
        "workers": setting.workers,
        "batch_size": setting.batch_size,
        "max_batch_delay": setting.max_batch_delay,
    }
    changes = tuner.changes(setting)
    if changes:
        values["archive"] = _publish(tuner, changes, served, deployed)
    change_model(serving, name, values)
    told = ", ".join(f"{key}: {value}" for key, value in values.items())
    console.print(f"wrote {serving}: {name} has {told}", markup=False)


def _publish(tuner: Tuner, changes: dict[str, str | int], served: ServedModel, deployed: Serving) -> str:
    """Write the variant into the model store; its file name."""
    marks = "".join(f"-{value}{'-threads' if key == 'threads' else ''}" for key, value in changes.items())
    final = deployed.server.model_store / f"{served.archive.removesuffix('.mar')}{marks}.mar"
    with store.workspace(final.parent, final.stem) as work:
        variant.write(tuner.about, changes, work / final.name)
        store.publish(work / final.name, final, replace=True)
    console.print(f"wrote {final}: the archive with {', '.join(f'{k} {v}' for k, v in changes.items())}", markup=False)
    return final.name


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if seconds < LEAST_BUDGET_S:
        raise UserError(f"--budget {text}: not a time of at least {LEAST_BUDGET_S:g} s", "90s, 10m or 1h")
    return seconds


def _counts(text: str | None, option: str) -> tuple[int, ...] | None:
    def count(word: str) -> int:
        if not word.isdecimal() or int(word) < 1:
            raise UserError(f"{option} {text}: not whole numbers from 1", "several with commas: 1,2,4")
        return int(word)

    return tuple(sorted(_list(text, count))) or None


def _dtype(word: str) -> str:
    if word not in DTYPES:
        raise UserError(f"--dtype {word}: not known", f"of {', '.join(DTYPES)}; several with commas")
    return word


def _list(text: str | None, one: Callable[[str], T]) -> tuple[T, ...]:
    return () if text is None else tuple(dict.fromkeys(one(word.strip()) for word in text.split(",")))
