"""What a benchmark of generation found: its figures, which goals they reach, as tables and as JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.lib.generation_yardstick import ENGINE, STATIC, UNSHARED, VLLM
from scripts.lib.machine import Machine
from scripts.lib.report import Target, show_heading, show_targets, targets_json
from scripts.lib.stats import Spread
from scripts.lib.strict_json import strict_json

SERVED = "served"
LABELS = {
    SERVED: "TorchServe, over HTTP",
    STATIC: "generate, static batches",
    ENGINE: "the engine alone",
    UNSHARED: "the engine alone, prefixes not shared",
    VLLM: "vLLM's engine alone",
}
STATIC_GOAL = 2.0
VLLM_GOAL = 0.8
SHORT_GOAL = 1 / 6
PREFIX_GOAL = 3.0
FIRST_TOKEN_STEPS = 3.0
HTTP_LOSS = 5.0  # per cent of tokens/s


@dataclass(frozen=True)
class Run:
    """One side's run of one workload.

    Attributes:
        workload, dtype: what was run.
        side: a key of LABELS.
        round: from 0; in one round all sides run the same requests.
        requests: how many.
        tokens: that were generated, of all requests.
        seconds: from the first request to the last token.
        short_p95_s: 95th percentile of the latency of `replies`' short requests, seconds; None elsewhere.
        first_p50_s: median time to the first token, seconds.
    """

    workload: str
    dtype: str
    side: str
    round: int
    requests: int
    tokens: int
    seconds: float
    short_p95_s: float | None
    first_p50_s: float | None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class FirstToken:
    """One measurement of a new request's first token while others are decoding, seconds.

    Attributes:
        dtype, round: as a Run's.
        decoding: requests that decode meanwhile.
        step_s: one decode step of those, nobody else there.
        prefill_s: the first token of such a request when the engine is idle, without HTTP.
        busy_s: the same over HTTP, beside those that decode.
    """

    dtype: str
    round: int
    decoding: int
    step_s: float
    prefill_s: float
    busy_s: float

    @property
    def steps(self) -> float:
        """What it waits beyond its own prefill, in decode steps."""
        return (self.busy_s - self.prefill_s) / self.step_s


@dataclass(frozen=True)
class Report:
    """Everything a run measured.

    Attributes:
        agreement: dtype → share of the engine's answers that are the same tokens as `generate`'s.
    """

    machine: Machine
    settings: dict[str, Any]
    runs: tuple[Run, ...]
    first_tokens: tuple[FirstToken, ...]
    agreement: dict[str, float]
    notes: tuple[str, ...] = ()

    def dtypes(self) -> tuple[str, ...]:
        """Those that were measured, in order."""
        runs = [each.dtype for each in self.runs]
        return tuple(dict.fromkeys([*runs, *(each.dtype for each in self.first_tokens)]))

    def rounds(self, workload: str, dtype: str) -> list[dict[str, Run]]:
        """Round for round, side → its run."""
        found: dict[int, dict[str, Run]] = {}
        for run in self.runs:
            if (run.workload, run.dtype) == (workload, dtype):
                found.setdefault(run.round, {})[run.side] = run
        return [found[number] for number in sorted(found)]


def judge(report: Report) -> tuple[Target, ...]:
    """Compare a report with every goal of generation, dtype by dtype; what wasn't measured says so."""
    return tuple(target for dtype in report.dtypes() for target in _judge(report, dtype))


def _judge(report: Report, dtype: str) -> list[Target]:
    def target(name: str, goal: float, values: Sequence[float], at_most: bool = False, unit: str = "×") -> Target:
        if not values:
            return Target(f"{name}, {dtype}", goal, None, at_most=at_most, unit=unit)
        spread = Spread.of(values)
        note = f"median of {len(values)} rounds, {spread.low:.2f}–{spread.high:.2f}" if len(values) > 1 else "one round"
        return Target(f"{name}, {dtype}", goal, spread.median, at_most=at_most, unit=unit, note=note)

    def ratios(workload: str, side: str, other: str, figure: Callable[[Run], float | None]) -> list[float]:
        found = []
        for runs in report.rounds(workload, dtype):
            if side in runs and other in runs:
                one, two = figure(runs[side]), figure(runs[other])
                if one is not None and two:
                    found.append(one / two)
        return found

    def rate(run: Run) -> float:
        return run.tokens_per_s

    def short(run: Run) -> float | None:
        return run.short_p95_s

    losses = {
        workload: [100 * (1 - ratio) for ratio in ratios(workload, SERVED, ENGINE, rate)]
        for workload in ("replies", "http")
    }
    steps = [each.steps for each in report.first_tokens if each.dtype == dtype]
    beside_vllm = [
        target(f"{workload}: the engine's tokens/s ÷ vLLM's", VLLM_GOAL, found)
        for workload in dict.fromkeys(run.workload for run in report.runs)
        if (found := ratios(workload, ENGINE, VLLM, rate))  # who did not ask for vLLM is told nothing of it
    ]
    return [
        target("replies: tokens/s ÷ static batches", STATIC_GOAL, ratios("replies", SERVED, STATIC, rate)),
        target("replies: short ones' p95 ÷ static's", SHORT_GOAL, ratios("replies", SERVED, STATIC, short), True),
        target("sharegpt: tokens/s ÷ static batches", STATIC_GOAL, ratios("sharegpt", SERVED, STATIC, rate)),
        target("prefix: tokens/s ÷ not shared", PREFIX_GOAL, ratios("prefix", ENGINE, UNSHARED, rate)),
        target("first token beside running ones: less its prefill", FIRST_TOKEN_STEPS, steps, True, " steps"),
        *(
            target(f"{workload}: tokens/s that HTTP and handle cost", HTTP_LOSS, found, True, " %")
            for workload, found in losses.items()
        ),
        *beside_vllm,
    ]


def write_json(report: Report, path: Path) -> None:
    """Write the report to a file as strict JSON, raw rounds included.

    Raises:
        OSError: it can't be written.
    """
    document = {
        "machine": dataclasses.asdict(report.machine),
        "settings": report.settings,
        "windows": [_window(run) for run in report.runs],
        "first_tokens": [{**dataclasses.asdict(each), "steps": each.steps} for each in report.first_tokens],
        "agreement_with_generate": report.agreement,
        "targets": targets_json(judge(report)),
        "notes": list(report.notes),
    }
    path.write_bytes(strict_json(document))


def _window(run: Run) -> dict[str, Any]:
    """A run, with the label and the figures by which `bench --compare` knows it."""
    summary = {
        "requests_per_s": run.requests / run.seconds,
        "generated_per_s": run.tokens_per_s,
        "first_token_p50_ms": None if run.first_p50_s is None else run.first_p50_s * 1e3,
    }
    label = f"{run.workload}, {run.dtype}, {run.side}, round {run.round + 1}"
    return {"label": label, **dataclasses.asdict(run), "summary": summary}


def show(report: Report, console: Console) -> None:
    """Print machine, figures, goals and notes."""
    show_heading(report.machine, report.settings, console)
    if report.runs:
        console.print(_runs_table(report))
    for each in report.first_tokens:
        console.print(
            f"first token beside {each.decoding} that decode, {each.dtype}: {each.busy_s * 1e3:.0f} ms; alone "
            f"{each.prefill_s * 1e3:.0f} ms, a decode step {each.step_s * 1e3:.0f} ms",
            markup=False,
        )
    agreed = [
        f"{dtype}: {share:.0%} of the engine's answers are generate's" for dtype, share in report.agreement.items()
    ]
    show_targets(judge(report), (*agreed, *report.notes), console)


def _runs_table(report: Report) -> Table:
    table = Table(title="medians of the rounds", title_justify="left")
    for name in ("workload", "dtype", "side"):
        table.add_column(name)
    for name in ("requests", "tokens", "seconds", "tokens/s", "short p95 s", "1st token p50 s"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in report.runs:
        groups.setdefault((run.workload, run.dtype, run.side), []).append(run)
    for (workload, dtype, side), runs in groups.items():
        table.add_row(
            workload,
            dtype,
            LABELS[side],
            str(runs[0].requests),
            str(runs[0].tokens),
            f"{median(run.seconds for run in runs):.1f}",
            f"{median(run.tokens_per_s for run in runs):.1f}",
            _seconds([run.short_p95_s for run in runs]),
            _seconds([run.first_p50_s for run in runs]),
        )
    return table


def _seconds(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{median(found):.2f}" if found else "–"
