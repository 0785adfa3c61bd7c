"""Costs written by hand, for tests that need no device."""

from typing import Any

from scripts.lib.costs import Profile, Rates


def profile(**changes: Any) -> Profile:
    """A packed CPU profile of a millisecond a batch and ten microseconds a token; nothing is added to it."""
    rates = Rates(per_batch_s=1e-3, per_request_s=0.0, seconds_per_token=1e-5)
    values: dict[str, Any] = {
        "archive": "m.mar", "task": "embedding", "device": "cpu", "device_name": "a CPU", "dtype": "float32",
        "threads": 1, "date": "2026-11-29T00:00:00+00:00", "packed": True, "micro_batch_tokens": 1024,
        "micro_batch_items": 256, "multiple_of": 1, "launch_cost": 100, "max_tokens": 256, "rates": (rates,),
        "fit_error": 0.0, "transport_s": 0.0, "frontend_s": 0.0, "requests": ((10,), (20,), (30,)),
    }  # fmt: skip
    return Profile(**{**values, **changes})
