"""What a worker makes of the request to step aside; that it works is shown on a real server in tests/e2e."""

import os

import pytest

from handlers import parking
from scripts.lib import scaling

ME = str(os.getpid())


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 0.0),
        ({"x-batchserve-park": "1,2"}, 0.0),
        ({"x-batchserve-park": ME + "0"}, 0.0),
        ({"x-batchserve-park": f"1,{ME}", "x-batchserve-hold": "2.5"}, 2.5),
        ({"x-batchserve-park": ME}, parking.LONGEST),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "1e9"}, parking.LONGEST),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "inf"}, parking.LONGEST),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "-1"}, 0.0),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "nan"}, 0.0),
        ({"x-batchserve-park": ME, "x-batchserve-hold": "soon"}, 0.0),
        ({"x-batchserve-park": None}, 0.0),
    ],
)
def test_only_the_worker_that_is_named_holds_still_and_not_for_long(
    headers: dict[str, str | None], expected: float
) -> None:
    assert parking.seconds(headers) == expected


def test_both_sides_mean_the_same() -> None:
    assert (scaling.PARK_HEADER, scaling.HOLD_HEADER) == (parking.PARK_HEADER, parking.HOLD_HEADER)
    assert scaling.HOLD <= parking.LONGEST
    assert parking.worker(parked=True) == {"pid": os.getpid(), "parked": True}
