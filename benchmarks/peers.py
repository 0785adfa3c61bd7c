"""The same MiniLM through other people's servers and through us: the same texts from the same client, in turns.

Run from the root of the repository: `python -m benchmarks.peers`; see benchmarks/README.md.
"""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from benchmarks import environments
from benchmarks.lineup import PEERS, interleaved
from benchmarks.table import OURS, Entrant, Result, markdown, to_json
from benchmarks.turns import Bench, checked
from scripts.lib import load_plan, machine
from scripts.lib.archive import read
from scripts.lib.benchmark import build
from scripts.lib.console import console, err_console, progress
from scripts.lib.errors import UserError
from scripts.lib.interrupts import INTERRUPTED, stop_on_signals
from scripts.lib.offline import Offline, OfflineError
from scripts.lib.properties import REPOSITORY
from scripts.lib.serving import DEFAULT_SERVING, ServedModel, Serving
from scripts.lib.source import resolve
from scripts.lib.targets import FULL_LOAD
from scripts.lib.workloads import Vocabulary, Workload, make_workload

MODEL = "bundled:minilm"
SERVED = "minilm"  # in config/serving.yaml
NAMES = tuple(peer.name for peer in PEERS)
ALL = ",".join(NAMES)
WORKLOADS = ("mixed", "short")
CLIENTS = (FULL_LOAD, 1)
POOL = 1000  # distinct requests: whole blocks of the mixture


def main(
    environments_directory: Annotated[
        Path, typer.Option("--environments", metavar="DIR", help="Where the peers' environments are made and kept.")
    ] = Path(".batchserve/peer-environments"),
    peers: Annotated[str, typer.Option(help="Who is measured beside us, several with commas.")] = ALL,
    rounds: Annotated[int, typer.Option(min=1, help="How often each server has its turn.")] = 2,
    workload: Annotated[str, typer.Option(help=f"{' or '.join(WORKLOADS)}, or both with a comma.")] = "mixed,short",
    rate: Annotated[
        str,
        typer.Option(help=f"Open loops at so many requests/s, Poisson, besides {CLIENTS[0]} clients and {CLIENTS[1]}."),
    ] = "15",
    duration: Annotated[float, typer.Option(min=0.5, help="Seconds of each window.")] = 20.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything here.")] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table here too.")
    ] = None,
) -> None:
    """Measure MiniLM through other servers and through us, and print a table of ratios.

    Environments are made first, from PyPI, and kept. Then each server has its turn, one at a time: it is started, its
    answers are compared with sentence-transformers', it is put under every load, and it is stopped. Ours, with
    config/serving.yaml's settings, is always measured. Nothing else should run meanwhile.
    """
    names = _choices(peers, NAMES, "--peers")
    workloads = _choices(workload, WORKLOADS, "--workload")
    loads = (
        *load_plan.plan(clients=CLIENTS, duration_s=duration),
        *load_plan.plan(rate=rate, duration_s=duration),
    )
    for file in (json_file, markdown_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"{file}: there is no directory {file.parent}", hint="make it, or name another file")
    ours = Serving.load(REPOSITORY / DEFAULT_SERVING).models[SERVED]
    with stop_on_signals(), tempfile.TemporaryDirectory(prefix="batchserve-peers-") as temporary:
        pythons, failures = _environments(names, environments_directory)
        result = _result(names, rounds, duration, ours, pythons, failures)
        model = resolve(MODEL).directory
        vocabulary = Vocabulary.load(model)
        pools = [make_workload(name, vocabulary, POOL) for name in workloads]
        work = Path(temporary)
        with progress("building our archive"):
            archive, _ = build(MODEL, "embedding", {}, work)
        bench = Bench(
            model=model,
            pools=pools,
            loads=loads,
            expected=_expected(model, pools, result.machine.cores),
            archive=read(archive),
            served=ours,
            peers={peer.name: (peer, pythons[peer.name]) for peer in PEERS if peer.name in pythons},
            cores=result.machine.cores,
            work=work,
            logs=environments_directory.absolute(),
        )
        _measure(bench, result)
    table = markdown(result)
    console.print(table, markup=False)
    for file, content in ((json_file, to_json(result)), (markdown_file, table.encode())):
        if file is not None:
            file.write_bytes(content)
            console.print(f"wrote {file}", markup=False)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _environments(names: tuple[str, ...], directory: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Peer → its environment's interpreter, and peer → why it has none."""
    pythons, failures = {}, {}
    for peer in PEERS:
        if peer.name not in names:
            continue
        try:
            with progress(f"the environment of {peer.name}"):
                pythons[peer.name] = environments.make(peer, directory)
        except UserError as failure:
            failures[peer.name] = str(failure)
    return pythons, failures


def _result(
    names: tuple[str, ...],
    rounds: int,
    seconds: float,
    ours: ServedModel,
    pythons: dict[str, Path],
    failures: dict[str, str],
) -> Result:
    here = machine.describe()
    settings = (
        f"batches of {ours.batch_size}, {ours.max_batch_delay} ms, queue {ours.queue}; workers × threads: "
        f"{ours.workers} × {max(1, here.cores // ours.workers)}"
    )
    entrants = {
        OURS: Entrant(settings, {name: here.versions[name] for name in ("torchserve", "torch", "transformers")})
    }
    for peer in PEERS:
        if peer.name in names:
            python = pythons.get(peer.name)
            packages = (*peer.versions, "torch", "transformers")
            found = {} if python is None else environments.versions(python, packages)
            entrants[peer.name] = Entrant(peer.settings, found)
    command = shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]])
    return Result(here, command, seconds, rounds, entrants, failures=failures)


def _expected(model: Path, pools: list[Workload], threads: int) -> list[list[float]]:
    """sentence-transformers' answers."""
    try:
        with progress("sentence-transformers' answers"), Offline(model, "float32", threads) as offline:
            return offline.values(checked(pools))
    except OfflineError as failure:
        raise UserError(str(failure), hint="pip install sentence-transformers (the extra `bench`)") from failure


def _measure(bench: Bench, result: Result) -> None:
    """Give every server its turn in every round, or as many as there are until Ctrl-C.

    Raises:
        UserError: our own server can't be measured.
    """
    names = [name for name in result.entrants if name not in result.failures]
    for number, order in enumerate(interleaved(names, result.rounds)):
        for name in order:
            if name in result.failures:
                continue
            try:
                result.turns.append(bench.turn(name, number))
            except KeyboardInterrupt:
                result.interrupted = True
                return
            except UserError as failure:
                if name == OURS:
                    raise
                result.failures[name] = str(failure)
                err_console.print(f"{name}: {failure}", markup=False)


def _choices(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not wanted or not set(wanted) <= set(known):
        raise UserError(f"{option} {text}: not known", hint=f"one or more of {', '.join(known)}")
    return wanted


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        err_console.print(Text.assemble(("error: ", "red"), str(error)))
        err_console.print(f"  {error.hint}", markup=False)
        sys.exit(1)
