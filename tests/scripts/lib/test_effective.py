"""Sources of effective values, by TorchServe's order of precedence."""

from typing import Any

import pytest

from scripts.lib.effective import Source, Value, differences, effective, health
from scripts.lib.management import Model
from scripts.lib.serving import ServedModel, Serving

DECLARED = ServedModel(archive="m.mar", version="1.0", workers=2, batch_size=8, max_batch_delay=3, queue=500)


def model(**changes: Any) -> Model:
    workers = [{"id": str(9000 + i), "status": "READY", "pid": 10 + i} for i in range(2)]
    values = {"modelName": "m", "modelVersion": "1.0", "modelUrl": "m.mar", "minWorkers": 2, "maxWorkers": 2,
              "batchSize": 8, "maxBatchDelay": 3, "loadedAtStartup": True, "workers": workers,
              "jobQueueStatus": {"remainingCapacity": 500, "pendingRequests": 0}}  # fmt: skip
    return Model.model_validate({**values, **changes})


@pytest.mark.parametrize(
    ("changes", "declared", "config", "expected"),
    [
        ({}, DECLARED, {}, Source.PROPERTIES),
        ({}, DECLARED, None, Source.PROPERTIES),
        ({"batchSize": 16}, DECLARED, {"batchSize": 16}, Source.ARCHIVE),
        ({"batchSize": 1}, None, {}, Source.DEFAULT),
        ({"batchSize": 1}, DECLARED.model_copy(update={"version": "1"}), {}, Source.DEFAULT),
        ({"batchSize": 9, "loadedAtStartup": False}, DECLARED, {}, Source.REST),
        ({"batchSize": 8, "loadedAtStartup": False}, None, {"batchSize": 4}, Source.REST),
        ({"batchSize": 9}, DECLARED, {}, Source.UNKNOWN),
        ({"batchSize": 9}, None, None, Source.UNKNOWN),
        ({"batchSize": 4}, DECLARED, {"batchSize": "4"}, Source.UNKNOWN),
    ],
)
def test_batch_size(
    changes: dict[str, Any], declared: ServedModel | None, config: dict[str, Any] | None, expected: Source
) -> None:
    assert effective(model(**changes), True, declared, config).batch_size.source is expected


def test_workers_and_queue() -> None:
    one = effective(model(), True, DECLARED, {})
    assert (one.workers, one.queue) == (Value(2, Source.PROPERTIES), Value(500, Source.PROPERTIES))
    one = effective(model(minWorkers=3), True, DECLARED, {"jobQueueSize": 500})
    assert (one.workers, one.queue) == (Value(3, Source.REST), Value(500, Source.ARCHIVE))
    both = effective(model(), True, DECLARED, {"minWorkers": 2, "maxWorkers": 2})
    assert both.workers.source is Source.ARCHIVE
    waiting = effective(model(jobQueueStatus={"remainingCapacity": 60, "pendingRequests": 40}), True, None, None)
    assert (waiting.queue, waiting.pending) == (Value(100, Source.DEFAULT), 40)


@pytest.mark.parametrize(
    ("changes", "declared", "config", "expected"),
    [
        ({}, None, {}, Source.DEFAULT),
        ({"responseTimeout": 45}, 45, {}, Source.PROPERTIES),
        ({"responseTimeout": 45}, 60, {}, Source.UNKNOWN),
        ({"responseTimeout": 45, "loadedAtStartup": False}, 45, {}, Source.REST),
        ({}, 45, {"x": 1}, Source.ARCHIVE),  # any model-config.yaml decides
    ],
)
def test_timeout(changes: dict[str, Any], declared: int | None, config: dict[str, Any], expected: Source) -> None:
    entry = DECLARED.model_copy(update={"response_timeout": declared})
    found = effective(model(**changes), True, entry, config)
    assert found.response_timeout == Value(changes.get("responseTimeout", 120), expected)
    assert (found.max_workers, found.at_startup) == (2, changes.get("loadedAtStartup", True))


def test_no_difference() -> None:
    serving = Serving(models={"m": DECLARED})
    assert differences(serving, [effective(model(), True, DECLARED, {})]) == []


def test_differences_name_field_value_and_source() -> None:
    serving = Serving(models={"m": DECLARED, "gone": DECLARED})
    running = [
        effective(model(minWorkers=3, modelUrl="other.mar"), True, DECLARED, {}),
        effective(model(modelName="extra"), True, None, {}),
    ]
    assert differences(serving, running) == [
        "m: the server runs other.mar, declared is m.mar",
        "m: workers is 3 (REST), declared is 2",
        "gone 1.0 is declared and not on the server",
        "extra 1.0 is on the server and not declared",
    ]


def test_another_version_or_another_default() -> None:
    serving = Serving(models={"m": DECLARED})
    other = effective(model(modelVersion="2.0"), True, DECLARED, {})
    assert differences(serving, [other])[0] == "m 1.0 is declared and not on the server (it serves 2.0)"
    both = [other, effective(model(), False, DECLARED, {})]
    assert "m: requests without a version go to another version than 1.0" in differences(serving, both)


def test_health() -> None:
    assert health([effective(model(), True, None, None)]) == []
    down = effective(model(minWorkers=0, workers=[]), True, None, None)
    slow = effective(model(minWorkers=3), True, None, None)
    full = effective(model(jobQueueStatus={"remainingCapacity": 0, "pendingRequests": 5}), True, None, None)
    assert [line.partition(":")[0] for line in health([down, slow, full])] == ["m 1.0 has no worker", "m 1.0", "m 1.0"]
