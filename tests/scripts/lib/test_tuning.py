import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.tuning import Setting, Space, crews, rounded


@pytest.mark.parametrize(
    ("cores", "cheaper", "expected"),
    [
        (1, False, [(1, 1)]),
        (2, False, [(1, 2), (2, 1)]),
        (2, True, [(1, 1), (1, 2), (2, 1)]),
        (6, False, [(1, 6), (2, 3), (4, 1), (6, 1)]),
        (4, True, [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]),
    ],
)
def test_crews_of_a_cpu(cores: int, cheaper: bool, expected: list[tuple[int, int]]) -> None:
    assert crews(cores, 0, cheaper=cheaper) == expected


@given(st.integers(1, 200), st.booleans())
def test_no_crew_has_more_threads_than_cores(cores: int, cheaper: bool) -> None:
    found = crews(cores, 0, cheaper=cheaper)
    assert len(set(found)) == len(found)
    assert all(workers * (threads or 0) <= cores for workers, threads in found)
    assert (1, cores) in found
    assert (cores, 1) in found


def test_crews_that_are_named_and_those_of_gpus() -> None:
    assert crews(8, 0, workers=(2, 3)) == [(2, 4), (3, 2)]
    assert crews(8, 0, workers=(1,), threads=(1, 16)) == [(1, 1), (1, 16)]
    assert crews(16, 2) == [(2, None), (4, None)]
    assert crews(16, 1, threads=(4,)) == [(1, 4), (2, 4)]


def test_the_space_has_every_setting_once_and_none_that_the_queue_cannot_feed() -> None:
    space = Space(crews=((1, 2), (2, 1)), batch_sizes=(1, 8, 64), delays=(2, 20), dtypes=(None, "bfloat16"), queue=100)
    found = list(space.settings())
    assert len(set(found)) == len(found) == 2 * 2 * (1 + 2 + 2) - 2 * 2, "64 × 2 pass the queue; a batch of 1 waits not"
    assert {each.max_batch_delay for each in found if each.batch_size == 1} == {2}
    assert all(each.workers * each.batch_size <= 100 for each in found)


def test_a_setting_in_words() -> None:
    one = Setting(workers=1, threads=2, batch_size=8, max_batch_delay=5)
    assert str(one) == "1 worker × 2 threads, batch size 8, delay 5 ms"
    two = Setting(workers=2, threads=None, batch_size=1, max_batch_delay=1, dtype="bfloat16")
    assert str(two) == "2 workers, batch size 1, delay 1 ms, bfloat16"
    assert [one.cores, two.cores] == [2, 2]


@given(st.floats(1e-3, 1e6))
def test_rounding_is_settled_after_once(rate: float) -> None:
    assert rounded(rounded(rate)) == rounded(rate) == pytest.approx(rate, rel=0.005)
