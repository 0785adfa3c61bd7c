import logging
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from handlers.batching import Limits, plan
from handlers.errors import ModelFailure, OutOfMemory, Overloaded, RequestError
from handlers.runner import Tally, run
from handlers.tokens import Encoding

LIMITS = Limits(64, 8, packed=True)


def encodings(lengths: Sequence[int]) -> list[Encoding]:
    return [Encoding([i] * length, [0] * length) for i, length in enumerate(lengths)]


def number_of(batch: Sequence[Encoding], precise: bool) -> Tensor:
    """The oracle of order: a row is its text's index."""
    return torch.tensor([[float(e.ids[0])] for e in batch])


def go(lengths: Sequence[int], forward: object, **more: object) -> list[Tensor | RequestError]:
    texts = encodings(lengths)
    return run(texts, plan(lengths, LIMITS), forward, **more)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 40), max_size=40))
def test_rows_come_back_in_input_order(lengths: list[int]) -> None:
    rows = go(lengths, number_of)
    assert [float(row) for row in rows if isinstance(row, Tensor)] == list(range(len(lengths)))


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60), st.sampled_from(["cuda", "host", "python"]))
def test_out_of_memory_halves_until_it_fits(lengths: list[int], memory: int, kind: str) -> None:
    error: Exception = {
        "cuda": torch.OutOfMemoryError("CUDA out of memory"),
        "host": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        "python": MemoryError(),
    }[kind]

    def forward(batch: Sequence[Encoding], precise: bool) -> Tensor:
        if sum(len(e) for e in batch) > memory:
            raise error
        return number_of(batch, precise)

    tally = Tally()
    for i, (length, row) in enumerate(zip(lengths, go(lengths, forward, tally=tally), strict=True)):
        if length > memory:
            assert isinstance(row, OutOfMemory)
            assert row.status == 507
        else:
            assert isinstance(row, Tensor)
            assert row.item() == i
    assert tally.splits <= tally.micro_batches


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.sets(st.integers(0, 29)))
def test_a_text_that_breaks_the_model_breaks_no_other(lengths: list[int], broken: set[int]) -> None:
    def forward(batch: Sequence[Encoding], precise: bool) -> Tensor:
        if any(e.ids[0] in broken for e in batch):
            raise KeyError("secret text of the client")
        return number_of(batch, precise)

    for i, row in enumerate(go(lengths, forward)):
        assert isinstance(row, ModelFailure) if i in broken else isinstance(row, Tensor) and row.item() == i


def test_what_failed_is_logged_without_the_exceptions_words(caplog: pytest.LogCaptureFixture) -> None:
    def forward(batch: Sequence[Encoding], precise: bool) -> Tensor:
        raise KeyError(said)

    said = "sec" + "ret text of the client"  # the line above is logged, its value must not be
    with caplog.at_level(logging.DEBUG):
        go([3], forward)
    assert "KeyError" in caplog.text
    assert "secret" not in caplog.text


def test_non_finite_rows_are_run_again_in_fp32() -> None:
    seen: list[tuple[list[int], bool]] = []

    def forward(batch: Sequence[Encoding], precise: bool) -> Tensor:
        seen.append(([e.ids[0] for e in batch], precise))
        rows = number_of(batch, precise)
        rows[[i for i, e in enumerate(batch) if e.ids[0] == 2]] = float("nan")  # stays bad
        if not precise:
            rows[[i for i, e in enumerate(batch) if e.ids[0] == 1]] = float("inf")  # mends
        return rows

    tally = Tally()
    zero, one, two = go([5, 5, 5], forward, tally=tally)
    assert isinstance(zero, Tensor)
    assert isinstance(one, Tensor)
    assert (zero.item(), one.item()) == (0, 1)
    assert isinstance(two, ModelFailure)
    assert two.code == "non_finite"
    assert tally.retries == 2
    assert seen[1] == ([1, 2], True), "only what was spoilt runs again"


def test_a_wrong_number_of_rows_is_an_error_not_another_texts_answer() -> None:
    def forward(batch: Sequence[Encoding], precise: bool) -> Tensor:
        return number_of(batch, precise)[:-1]

    assert all(isinstance(row, ModelFailure) for row in go([4, 4, 4], forward))


def test_nothing_is_begun_after_the_deadline() -> None:
    rows = go([60, 60, 60], number_of, deadline=time.monotonic() - 1)
    assert all(isinstance(row, Overloaded) and row.status == 503 for row in rows)


def test_only_what_ran_is_counted() -> None:
    tally = Tally()
    go([30, 40, 50], number_of, tally=tally)
    assert (tally.tokens, tally.real_tokens, tally.micro_batches) == (120, 120, 3)
    late = Tally()
    go([30, 40, 50], number_of, tally=late, deadline=time.monotonic() - 1)
    assert late == Tally()


def test_a_failed_device_ends_the_worker() -> None:
    """Nothing can be answered any more; TorchServe catches every Exception and would keep the worker."""

    def forward(batch: Sequence[Encoding], precise: bool) -> Tensor:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with pytest.raises(SystemExit):
        go([3, 4], forward)


def test_a_plan_that_leaves_a_text_out_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves out 1 of 2"):
        run(encodings([4, 4]), plan([4], LIMITS), number_of)


def test_a_row_may_be_an_error() -> None:
    late = Overloaded("late")
    rows = go([1, 2, 3], lambda batch, _: [late if len(e) == 2 else torch.tensor([len(e)]) for e in batch])
    assert [row if row is late else int(row) for row in rows] == [1, late, 3]  # type: ignore[arg-type]
