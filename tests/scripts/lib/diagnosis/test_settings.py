"""Effective values and where they come from: TorchServe's order of precedence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.diagnosis import settings
from scripts.lib.diagnosis.deployment import Deployment, Host
from scripts.lib.diagnosis.properties_file import parse
from scripts.lib.diagnosis.settings import Setting, properties, served
from tests.scripts.lib.diagnosis.deployments import BASE, ENTRY, MODELS, deployment, stored


def one(given: Deployment) -> dict[str, tuple[Any, str]]:
    (model,) = served(given)
    return {key: (setting.value, setting.place) for key, setting in model.settings.items()}


def test_the_file_gives_what_the_archive_leaves() -> None:
    place = "config.properties:6 models"
    assert one(deployment()) == {
        "minWorkers": (1, place), "maxWorkers": (1, place), "batchSize": (8, place), "maxBatchDelay": (2, place),
        "jobQueueSize": (1000, "config.properties:3"), "responseTimeout": (120, "TorchServe's default"),
        "startupTimeout": (120, "TorchServe's default"),
    }  # fmt: skip


def test_the_archive_wins_and_sets_the_timeouts_by_being_there() -> None:
    config = {"batchSize": 4, "maxBatchDelay": 0, "minWorkers": 3, "jobQueueSize": 7, "continuousBatching": True}
    entry = ENTRY.replace("}", ',"responseTimeout":5}')
    found = one(deployment(f'{BASE}models={{"m":{{"1.0":{entry}}}}}\n', stored(config=config)))
    place = "m.mar: model-config.yaml"
    assert found["batchSize"] == (4, place)
    assert found["maxBatchDelay"][0] == 2  # 0 is unset
    assert found["minWorkers"][0] == 1  # without maxWorkers it doesn't count
    assert found["jobQueueSize"] == (7, place)
    assert found["responseTimeout"] == (120, place)
    assert found["continuousBatching"] == (True, place)
    both = one(deployment(BASE + MODELS, stored(config={"minWorkers": 2, "maxWorkers": 3})))
    assert (both["minWorkers"][0], both["maxWorkers"][0]) == (2, 3)


@pytest.mark.parametrize("text", ['{"m":{"1":E}}', '{"M":{"1.0":E}}', '{"m":{"1.0":{"batchSize":0}}}', "{"])
def test_what_does_not_match_is_not_used(text: str) -> None:
    found = one(deployment(f"{BASE}models={text.replace('E', ENTRY)}\n"))
    assert found["batchSize"] == (1, "TorchServe's default")
    assert found["maxBatchDelay"] == (100, "TorchServe's default")
    assert found["minWorkers"] == (4, "TorchServe's default: one per CPU")


@pytest.mark.parametrize(
    ("line", "host", "workers"),
    [
        ("", Host(4, 1), 4),
        ("", Host(4, 1, (1, 1)), 2),
        ("number_of_gpu=1", Host(4, 1, (1, 1)), 1),
        ("number_of_gpu=0", Host(4, 1, (1, 1)), 4),
        ("default_workers_per_model=3", Host(4, 1, (1, 1)), 3),
        ("debug=true", Host(4, 1), 1),
        ("", None, 0),
    ],
)
def test_default_workers(line: str, host: Host | None, workers: int) -> None:
    assert one(deployment(f"{BASE}{line}\n", host=host))["minWorkers"][0] == workers


def test_environment() -> None:
    variables = {
        "TS_JOB_QUEUE_SIZE": "5",
        "TS_TOKEN_EXPIRATION_TIME_MIN": "9",
        "TS_MODELS": "{",
        "TS_ALLOWED_URLS": "a",
    }
    on = BASE + "enable_envvars_config=TRUE\nmetrics_config=$$HOME$$/x\n"
    assert properties(deployment(BASE, environment=variables))["job_queue_size"].value == "1000"
    found = properties(deployment(on, environment={**variables, "HOME": "/h"}))
    assert found["job_queue_size"] == Setting("5", "$TS_JOB_QUEUE_SIZE")
    assert found["token_expiration_min"].value == "9"
    assert found["metrics_config"].value == "/h/x"
    assert "models" not in found
    assert "allowed_urls" not in found
    found = properties(deployment(on + "use_env_allowed_urls=true\n", environment=variables))
    assert found["allowed_urls"].value == "a"


def test_the_last_value_of_a_key_counts_and_the_command_line_wins() -> None:
    given = deployment(BASE + "model_store=other\n")
    assert properties(given)["model_store"] == Setting("other", "config.properties:6")
    named = replace(given, store_argument=Path("named"))
    assert properties(named)["model_store"] == Setting("named", "--model-store")


@pytest.mark.parametrize(
    ("load", "names"),
    [
        ("a=m.mar", ["a"]),
        ("m.mar", ["m"]),
        ("a=m.mar,b=m.mar", ["a", "b"]),
        ("a=m.mar, b=m.mar", ["a", " b"]),
        ("all", ["m", "n"]),
        ("", ["m", "n"]),
        ("a=m.mar,a=m.mar", ["a"]),
        ("gone.mar", []),
    ],
)
def test_what_is_loaded_under_which_name(load: str, names: list[str]) -> None:
    given = deployment(BASE + f"load_models={load}\n", stored(), stored("n.mar"))
    assert [model.name for model in served(given)] == names


def test_an_archive_without_a_name_is_called_after_its_file() -> None:
    unnamed = stored("my-model.v2.mar", manifest={"modelName": ""})
    assert [model.name for model in served(deployment(BASE + "load_models=ALL\n", unnamed))] == ["my_model_v2"]


def test_a_snapshot_decides_everything() -> None:
    snapshot = f'{{"name":"s","models":{{"q":{{"1.0":{ENTRY[:-1]},"marName":"m.mar"}}}}}}}}'
    given = deployment(f"{BASE}{MODELS}model_snapshot={snapshot}\n", stored(config={"batchSize": 99}))
    (model,) = served(given)
    assert (model.name, model.count("batchSize"), model.count("responseTimeout")) == ("q", 8, 0)
    assert served(deployment(BASE + "model_snapshot={\n")) == []


def test_defaults_are_shown_and_the_lines_of_a_cut_value_are_not() -> None:
    file = parse(Path("c"), 'models={\n"m":{"1.0":{}}\n}\n')
    found = settings.every_property(Deployment(file=file))
    assert set(found) == {"models", *settings.DEFAULTS}
    assert not found["job_queue_size"].given
    assert settings.every_property(Deployment()) == {}
