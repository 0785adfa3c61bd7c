"""What would meet an objective that no setting meets here, as the simulation has it."""

from collections.abc import Iterator

from scripts.lib.forecast import Forecast
from scripts.lib.tuning import Setting

MOST_WORKERS = 64
LENGTHS = (256, 128, 64, 32, 16)  # tokens that texts might be cut at


def advise(forecast: Forecast, setting: Setting, rate: float | None, *, maximum: bool) -> Iterator[str]:
    """Sentences, the surest first.

    Args:
        forecast: for this machine.
        setting: the one that came closest.
        rate: that was asked for; None of a trace, or of the highest rate.
        maximum: whether the highest rate was sought.
    """
    alone = forecast.lone(setting)
    if alone < 0:
        waits = f", {setting.max_batch_delay} ms of it the delay" if setting.batch_size > 1 else ""
        yield (
            f"even a lone client is predicted to miss it ({forecast.lone_ms(setting):.0f} ms on average{waits}): no "
            "number of workers helps"
        )
    cut = next((tokens for tokens in LENGTHS if _meets_cut(forecast, setting, rate, tokens, maximum=maximum)), None)
    if cut is not None:
        yield f"fewer tokens: with texts cut at {cut} tokens (build --max-tokens {cut}) it is predicted to be met"
    if alone >= 0 and not maximum:
        workers = forecast.workers_for(setting, rate, MOST_WORKERS)
        if workers is not None and workers > setting.workers:
            each = setting.threads or 1
            where = "GPUs" if forecast.gpus else f"cores ({each} each)"
            needed = workers if forecast.gpus else workers * each
            yield f"more workers: {workers} like these, on {needed} {where}, are predicted to meet it"
    if not forecast.gpus:
        yield "a GPU: batchserve profile there, then batchserve plan --profile FILE here says how many"
    looser = "a looser objective" if maximum else "a looser objective, or a lower rate"
    yield looser


def _meets_cut(forecast: Forecast, setting: Setting, rate: float | None, tokens: int, *, maximum: bool) -> bool:
    if tokens >= forecast.longest():
        return False
    shorter = forecast.cut(tokens)
    return (shorter.lone(setting) if maximum else shorter.margin(setting, rate)) >= 0
