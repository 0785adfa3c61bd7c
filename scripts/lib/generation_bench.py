"""`batchserve bench --task generation`: TorchServe over HTTP beside static batches and the engine alone."""

import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests

from scripts.lib import load, machine
from scripts.lib.archive import Archive, extract, read
from scripts.lib.benchmark import build
from scripts.lib.benchmark import server as make_server
from scripts.lib.decoder import TASK
from scripts.lib.errors import UserError
from scripts.lib.generation_report import Report
from scripts.lib.generation_turns import ANSWER_S, BESIDE_STATIC, Bench, Measured, Progress, Settings, Side
from scripts.lib.generation_workloads import WORKLOADS, ordinary_tokens
from scripts.lib.generation_yardstick import ENGINE, VLLM, Yardstick
from scripts.lib.interrupts import stop_on_signals
from scripts.lib.load import Target
from scripts.lib.offline import OfflineError
from scripts.lib.openai_api import HEADERS, read_chat
from scripts.lib.server import TorchServe

__all__ = ["TASK", "WORKLOADS", "Served", "Wanted", "measure", "run"]

MODEL = "bundled:smollm2"
AT_ONCE = 16  # requests that run at once, and the rows of a static batch
QUEUE = 64
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Wanted:
    """What the command's options say; None where they were not given.

    Attributes:
        model: what to build and serve.
        archive: an archive to serve instead.
        dtypes: what to compute in, one after the other.
        workloads: of WORKLOADS.
        rounds, threads, at_once, requests: see Settings.
        vllm_python: an interpreter that has vLLM, to measure beside it.
    """

    model: str | None
    archive: Path | None
    dtypes: tuple[str, ...]
    workloads: tuple[str, ...]
    rounds: int | None = None
    threads: int | None = None
    at_once: int | None = None
    requests: int | None = None
    vllm_python: Path | None = None


def measure(wanted: Wanted, progress: Progress) -> Report:
    """Build what is to be built, serve it, and measure all sides.

    Raises:
        UserError: the model can't be built, served or measured, and why.
    """
    vllm_python = None if wanted.vllm_python is None else _interpreter(wanted.vllm_python, wanted.workloads)
    here = machine.describe()
    settings = Settings(
        workloads=wanted.workloads,
        rounds=wanted.rounds or 1,
        threads=wanted.threads or here.cores,
        at_once=wanted.at_once or AT_ONCE,
        requests=wanted.requests,
        vllm=vllm_python is not None,
    )
    model = wanted.model or MODEL
    measured: dict[str, Measured] = {}
    with stop_on_signals(), tempfile.TemporaryDirectory(prefix="batchserve-bench-") as temporary:
        for dtype in wanted.dtypes:
            archive, work = wanted.archive, Path(temporary) / dtype
            work.mkdir()
            if archive is None:
                with progress(f"building {model} ({dtype})"):
                    overrides = {"dtype": dtype, "threads": settings.threads}
                    archive, _ = build(model, TASK, overrides, work)
            measured[dtype] = run(archive, dtype, settings, work, progress, vllm_python)
    return Report(
        machine=here,
        settings={
            "task": TASK,
            "model": model if wanted.archive is None else wanted.archive.name,
            "threads of each side": settings.threads,
            "requests at once": settings.at_once,
            "rounds": settings.rounds,
        },
        runs=tuple(each for found in measured.values() for each in found.runs),
        first_tokens=tuple(each for found in measured.values() for each in found.first_tokens),
        agreement={dtype: found.agreement for dtype, found in measured.items() if found.agreement is not None},
        notes=tuple(here.notes(measured)),
    )


def _interpreter(path: Path, workloads: Collection[str]) -> Path:
    """The interpreter that was named, absolute; links are kept, since a virtual environment's own is one."""
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise UserError(f"--vllm-python {path}: there is no such program", hint="for example venv/bin/python")
    if not any(name in BESIDE_STATIC for name in workloads):
        raise UserError("--vllm-python would do nothing here", hint=f"it is for --workload {','.join(BESIDE_STATIC)}")
    return path.absolute()


def run(
    archive: Path, dtype: str, settings: Settings, work: Path, progress: Progress, vllm_python: Path | None = None
) -> Measured:
    """Measure one archive; everything that is started is stopped again, whatever happens.

    Args:
        archive: the .mar of a decoder-only model.
        dtype: what the archive computes in, and the yardsticks with it.
        settings: what to measure.
        work: an empty directory for states and extracted files.
        progress: shows that a labelled step is under way.
        vllm_python: the interpreter of vLLM's side, where the settings have one.

    Raises:
        UserError: a side doesn't start or fails, or the model can't be measured.
    """
    about = read(archive)
    if about.settings.get("task") != "generation":
        raise UserError(f"{archive} is no generation model's archive", hint="build it with --task generation")
    if about.settings.get("engine", "transformers") != "transformers":
        raise UserError(f"{archive} runs on {about.settings['engine']}", hint="bench --against measures its server")
    extracted = work / "extracted"
    extract(archive, extracted)
    model = extracted / str(about.settings.get("model", "model"))
    tokens = ordinary_tokens(model)

    @contextmanager
    def side(kind: str) -> Iterator[Side]:
        try:
            with ExitStack() as stack:
                with progress(f"{kind} loads the model ({dtype})"):
                    python = vllm_python if kind == VLLM else None
                    made = Yardstick(model, dtype, settings.threads, kind, about.settings, settings.at_once, python)
                    entered = stack.enter_context(made)
                assert isinstance(entered, Yardstick)
                yield entered
        except OfflineError as failure:
            raise UserError(f"{kind}: {failure}") from failure

    with ExitStack() as stack:
        with progress(f"TorchServe starts ({dtype})"):
            server = stack.enter_context(
                make_server(about, work, batch_size=settings.at_once, workers=1, max_batch_delay=1, queue=QUEUE)
            )
        engine = stack.enter_context(side(ENGINE))
        bench = Bench(Served(server, about), engine, side, dtype, settings, tokens, progress)
        return bench.measure()


class Served:
    """A model on a running TorchServe.

    Args:
        server: the server.
        about: the archive that it serves.
    """

    def __init__(self, server: TorchServe, about: Archive) -> None:
        self.name = about.name
        where = f"predictions/{quote(about.name, safe='')}/{quote(about.version, safe='')}"
        self._url = f"{server.urls.inference}/{where}"
        self._headers = server.headers()

    def target(self, reader: load.Reader = read_chat) -> Target:
        """Where completions are sent."""
        return Target(f"{self._url}/v1/completions", {**HEADERS, **self._headers}, TIMEOUT_S, reader)

    def describe(self) -> dict[str, Any]:
        """The engine's sizes and how it stands.

        Raises:
            UserError: it doesn't say.
        """
        try:
            answer = requests.get(f"{self._url}/describe", headers=self._headers, timeout=ANSWER_S)
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
        except requests.RequestException as error:
            raise UserError(f"the served model doesn't describe itself: {error}") from error
        return found
