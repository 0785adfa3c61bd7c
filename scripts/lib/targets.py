"""What the project promises of its speed, and how a benchmark's report measures up to it."""

from scripts.lib.report import Report, Target

# One client's median may exceed the offline forward of one text by this: HTTP, the frontend, the batch delay,
# tokenizing and rendering.
ONE_CLIENT_EXTRA_MS = 6.0
BUILD_S = 5.0
FULL_LOAD = 64


def judge(report: Report, build_s: float | None, task: str = "embedding") -> tuple[Target, ...]:
    """Compare a report with every target of a task; one that the run didn't measure says so.

    Args:
        report: points and yardstick of the run.
        build_s: seconds to build the archive without its verification; None when it wasn't built.
        task: what was served.
    """
    if task == "reranking":
        return (_over_yardstick(report, "lists", "64 pairs a request", 1.2),)
    if task == "seq2seq":
        return (_over_yardstick(report, "mixed", "greedy", 1.5),)
    if task != "embedding":
        return (_batching_gain(report),)
    return (
        _against_offline(report, "float32", "float32", 1.3),
        _against_offline(report, "bfloat16", "float32", 2.0),
        _against_offline(report, "bfloat16", "bfloat16", 2.0),
        _batching_gain(report),
        _one_client(report),
        _padding(report),
        Target("build of the archive, without its verification", BUILD_S, build_s, at_most=True, unit=" s"),
    )


def _against_offline(report: Report, dtype: str, offline_dtype: str, goal: float) -> Target:
    name = f"mixed at {FULL_LOAD} clients in {dtype} ÷ offline in {offline_dtype}"
    point = report.find("mixed", FULL_LOAD, dtype)
    rate = report.offline_rate("mixed", offline_dtype)
    if point is None or rate is None:
        return Target(name, goal, None, unit="×")
    if dtype == offline_dtype and point.ratio is not None:
        spread = point.ratio
        note = f"median of {len(point.rounds)} rounds, {spread.low:.2f}–{spread.high:.2f}"
        return Target(name, goal, spread.median, unit="×", note=note)
    return Target(name, goal, point.texts_per_s.median / rate, unit="×", note="medians of all rounds")


def _over_yardstick(report: Report, workload: str, what: str, goal: float) -> Target:
    """The most clients that were measured, against the offline library."""
    points = [point for point in report.points if point.workload == workload and point.ratio is not None]
    if not points:
        return Target(f"{workload} ({what}) ÷ offline", goal, None, unit="×")
    point = max(points, key=lambda point: (point.batch_size, point.clients))
    name = f"{workload} ({what}) at {point.clients} clients ÷ offline, {point.dtype}"
    spread = point.ratio
    assert spread is not None
    note = f"median of {len(point.rounds)} rounds, {spread.low:.2f}–{spread.high:.2f}"
    return Target(name, goal, spread.median, unit="×", note=note)


def _batching_gain(report: Report) -> Target:
    dtype = _main_dtype(report)
    name = f"short at {FULL_LOAD} clients: batches ÷ batch size 1"
    batched, single = report.find("short", FULL_LOAD, dtype), report.find("short", FULL_LOAD, dtype, batch_size=1)
    if batched is None or single is None or batched is single:
        return Target(name, 2.0, None, unit="×")
    rates = batched.texts_per_s.median, single.texts_per_s.median
    note = f"{rates[0]:.0f} ÷ {rates[1]:.0f} texts/s, batch size {batched.batch_size}, {dtype}"
    return Target(name, 2.0, rates[0] / rates[1] if rates[1] else None, unit="×", note=note)


def _one_client(report: Report) -> Target:
    dtype = _main_dtype(report)
    for workload in ("short", "mixed"):
        point = report.find(workload, 1, dtype)
        run = next((run for run in report.offline if (run.workload, run.dtype) == (workload, dtype)), None)
        if point is None or run is None or run.single is None:
            continue
        return Target(
            f"{workload}, one client: p50",
            run.single.forward_ms + ONE_CLIENT_EXTRA_MS,
            point.latency("p50_ms"),
            at_most=True,
            unit=" ms",
            note=f"offline forward {run.single.forward_ms:.1f} + {ONE_CLIENT_EXTRA_MS:g} ms, {dtype}",
        )
    return Target("one client: p50", ONE_CLIENT_EXTRA_MS, None, at_most=True, unit=" ms over the offline forward")


def _padding(report: Report) -> Target:
    point = report.find("mixed", FULL_LOAD, _main_dtype(report))
    share = None if point is None or point.padding_share is None else point.padding_share * 100
    return Target(f"mixed at {FULL_LOAD} clients: padding of the tokens run", 1.0, share, at_most=True, unit=" %")


def _main_dtype(report: Report) -> str:
    """float32 where the run has it: the targets that name no dtype mean the default."""
    dtypes = [point.dtype for point in report.points]
    return "float32" if "float32" in dtypes or not dtypes else dtypes[0]
