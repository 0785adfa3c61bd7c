"""Every finding: the smallest deployment that has it, and the nearest one that hasn't."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.diagnosis.deployment import Deployment, Host, LogFacts, Unreadable
from scripts.lib.diagnosis.diagnose import diagnose
from scripts.lib.effective import Source, Value
from tests.scripts.lib.diagnosis.deployments import BASE, ENTRY, MODELS, deployment, running, stored

RULES = Path(__file__).parents[4] / "scripts" / "lib" / "diagnosis"
LOG = Path("ts_log.log")


def codes(given: Deployment) -> set[str]:
    return {finding.code for finding in diagnose(given)}


def with_line(line: str, **more: Any) -> Deployment:
    return deployment(f"{BASE}{MODELS}{line}\n", **more)


def with_entry(entry: str, base: str = BASE, **more: Any) -> Deployment:
    return deployment(f'{base}models={{"m":{{"1.0":{entry}}}}}\n', **more)


def with_config(**config: Any) -> Deployment:
    return deployment(BASE + MODELS, stored(config=config))


def with_handler(source: str, entry: str = ENTRY) -> Deployment:
    text = f'{BASE}models={{"m":{{"1.0":{entry}}}}}\n'
    return deployment(text, stored(source=f"class H:\n    def handle(self, data, context):\n        {source}\n"))


def with_log(**facts: Any) -> Deployment:
    return deployment(log=LogFacts(LOG, **facts))


def without(key: str) -> str:
    return re.sub(rf"(?m)^{key}=.*\n", "", BASE)


ONE = '{"minWorkers":1,"maxWorkers":1,"batchSize":1}'
FIRST_ROW = "return [data[0]]"
OPEN = BASE.replace("127.0.0.1", "0.0.0.0") + MODELS
INSTALL = BASE + MODELS + "install_py_dep_per_model=true\n"
CUT = BASE + 'models={\n "m":{"1.0":' + ENTRY + "}\n}\n"
CASES: list[tuple[str, Deployment, Deployment]] = [
    ("ignored-key", with_line("batch_size=8"), with_line("# batch_size=8")),
    ("ignored-key", with_line("initial_workers=2"), with_line("default_workers_per_model=2")),
    ("ignored-key", with_line("maxBatchDelay=8"), with_line("max_request_size=8")),
    ("unknown-key", with_line("jobQueueSize=5"), with_line("number_of_netty_threads=5")),
    ("repeated-key", with_line("job_queue_size=5"), with_line("job_queue_size=1000")),
    ("trailing-blank", with_line("number_of_gpu=1 "), with_line("number_of_gpu=1")),
    ("trailing-blank", with_line("enable_model_api=true "), with_line("metrics_config=a ")),
    ("blank-after-backslash", with_line("cors_allowed_origin=a\\ "), with_line("cors_allowed_origin=a\\\n ")),
    ("bad-number", with_line("number_of_gpu=one"), with_line("number_of_gpu=1")),
    ("models-cut", deployment(CUT), deployment(CUT.replace("{\n", "{\\\n").replace("}\n}", "}\\\n}"))),
    ("models-json", deployment(BASE + "models={a\n"), deployment(BASE + MODELS)),
    ("models-key", with_entry('{"batch_size":8}'), with_entry('{"batchSize":8}')),
    ("models-key", with_entry('{"jobQueueSize":8}'), with_entry('{"runtimeType":"python"}')),
    ("models-number", with_entry('{"batchSize":"many"}'), with_entry('{"batchSize":"8"}')),
    ("models-number", with_entry('{"batchSize":0}'), with_entry('{"batchSize":1}')),
    ("delay-zero", with_entry('{"maxBatchDelay":0}'), with_entry('{"maxBatchDelay":1}')),
    ("delay-zero", with_config(maxBatchDelay=0), with_config(maxBatchDelay=1)),
    ("models-name", deployment(f'{BASE}models={{"M":{{"1.0":{ENTRY}}}}}\n'), deployment()),
    ("models-version", deployment(f'{BASE}models={{"m":{{"1":{ENTRY}}}}}\n'), deployment()),
    ("load-models-blank", deployment(without("load_models") + "load_models=m=m.mar, n=m.mar\n"), deployment()),
    ("load-models-missing", deployment(without("load_models") + "load_models=n.mar\n"),
     deployment(without("load_models") + "load_models=m.mar\n")),
    ("environment-missing", with_line("metrics_config=$$HERE$$"),
     with_line("metrics_config=$$HERE$$", environment={"HERE": "a"})),
    ("environment-ignored", deployment(environment={"TS_JOB_QUEUE_SIZE": "5"}),
     with_line("enable_envvars_config=true", environment={"TS_JOB_QUEUE_SIZE": "5"})),
    ("environment-wins", with_line("enable_envvars_config=true", environment={"TS_JOB_QUEUE_SIZE": "5"}),
     with_line("enable_envvars_config=true", environment={"TS_METRICS_MODE": "log"})),
    ("config-file-environment", deployment(environment={"TS_CONFIG_FILE": "other.properties"}),
     deployment(environment={"TS_CONFIG_FILE": "config.properties"})),
    ("batching-off", with_entry('{"minWorkers":1,"maxWorkers":1}'), with_entry(ONE)),
    ("delay-long", with_entry('{"batchSize":8,"maxBatchDelay":1001}'),
     with_entry('{"batchSize":8,"maxBatchDelay":999}')),
    ("batch-over-queue", with_entry('{"batchSize":1001}'), with_entry('{"batchSize":1000,"minWorkers":1}')),
    ("batches-over-queue", with_entry('{"batchSize":501,"minWorkers":2}'),
     with_entry('{"batchSize":500,"minWorkers":2}')),
    ("batches-not-filled", with_log(batches={("m", "1.0"): (100, 110)}), with_log(batches={("m", "1.0"): (100, 210)})),
    ("workers-default", with_entry('{"batchSize":8}'), with_entry(ENTRY)),
    ("workers-over-cores", with_entry('{"minWorkers":5,"batchSize":8}'), with_entry('{"minWorkers":4,"batchSize":8}')),
    ("threads-over-cores", with_entry('{"minWorkers":2}'),
     with_entry('{"minWorkers":2}', environment={"OMP_NUM_THREADS": "2"})),
    ("workers-over-memory", deployment(BASE + MODELS, stored(size=16 << 30)),
     deployment(BASE + MODELS, stored(size=15 << 30))),
    ("workers-over-gpu-memory", deployment(BASE + MODELS, stored(size=9 << 30), host=Host(4, 1 << 40, (8 << 30,))),
     deployment(BASE + MODELS, stored(size=7 << 30), host=Host(4, 1 << 40, (8 << 30,)))),
    ("continuous-batching-workers",
     deployment(BASE + MODELS.replace('"maxWorkers":1', '"maxWorkers":2'), stored(config={"continuousBatching": True})),
     with_config(continuousBatching=True)),
    ("async-batch", with_config(asyncCommunication=True),
     deployment(f'{BASE}models={{"m":{{"1.0":{ONE}}}}}\n', stored(config={"asyncCommunication": True}))),
    ("archive-wins", with_config(batchSize=4), with_config(batchSize=8)),
    ("archive-wins",
     deployment(f'{BASE}models={{"m":{{"1.0":{ONE[:-1]},"responseTimeout":60}}}}}}\n', stored(config={"x": 1})),
     deployment(f'{BASE}models={{"m":{{"1.0":{ONE[:-1]},"responseTimeout":120}}}}}}\n', stored(config={"x": 1}))),
    ("archive-unreadable", deployment(unreadable=(Unreadable(Path("a.mar"), "a.mar is empty"),)), deployment()),
    ("model-store-missing", replace(deployment(), archives=None, store_fault="no such directory"),
     replace(deployment(), archives=None)),
    ("yaml-key", with_config(batch_size=8), with_config(batchSize=8)),
    ("yaml-key", with_config(frontend={"maxBatchDelay": 8}), with_config(torchrun={"maxWorkers": 8})),
    ("yaml-key", with_config(maxBatchDelays=8), with_config(my_own_threshold=8)),
    ("yaml-key", with_config(handler={"batch_size": 8}),
     deployment(BASE + MODELS, stored(config={"handler": {"batch_size": 8}}, source='x = c["batch_size"]'))),
    ("yaml-value", with_config(batchSize="8"), with_config(batchSize=8)),
    ("yaml-value", with_config(useJobTicket="yes"), with_config(useJobTicket=True)),
    ("yaml-workers", with_config(minWorkers=1), with_config(minWorkers=1, maxWorkers=1)),
    ("manifest-undeclared", deployment(BASE + MODELS, stored(members=("model-config.yaml",))), with_config(x=1)),
    ("manifest-missing", deployment(BASE + MODELS, stored(manifest={"configFile": "a.yaml"})), with_config(x=1)),
    ("requirements-ignored", deployment(BASE + MODELS, stored(requirements="emoji")),
     deployment(INSTALL, stored(requirements="emoji"))),
    ("requirements-shadow", deployment(INSTALL, stored(requirements="Torch>2")),
     deployment(INSTALL, stored(requirements="torchmetrics"))),
    ("handler-missing", deployment(BASE + MODELS, replace(stored(), handler=None)),
     deployment(BASE + MODELS + "default_service_handler=a.py\n", replace(stored(), handler=None))),
    ("handler-syntax", with_handler("return ["), with_handler("return []")),
    ("handler-first-row", with_handler(FIRST_ROW), with_handler(FIRST_ROW, ONE)),
    ("handler-fails-together", with_handler("return [row['a'] for row in data]"),
     with_handler("return [row['a'] for row in data]", ONE)),
    ("handler-tensor", with_handler("return list(data.logits)"), with_handler("return data.logits.tolist()")),
    ("handler-pads-to-maximum", with_handler("return f(data, padding='max_length')"), with_handler("return f(data)")),
    ("address-invalid", deployment(BASE.replace("http://127", "127") + MODELS), deployment()),
    ("tokens-off", deployment(OPEN + "disable_token_authorization=true\n"),
     with_line("disable_token_authorization=true")),
    ("management-exposed", with_line("management_address=http://0.0.0.0:8081"),
     with_line("management_address=http://localhost:8081")),
    ("management-shared", with_line("management_address=http://127.0.0.1:8080"),
     with_line("management_address=http://127.0.0.1:8081")),
    ("token-expires", deployment(without("token_expiration_min") + MODELS),
     deployment(without("token_expiration_min") + MODELS + "disable_token_authorization=true\n")),
    ("allowed-urls-open", with_line("enable_model_api=true"),
     with_line("enable_model_api=true\nallowed_urls=file:///store/.*")),
    ("allowed-urls-open", with_line("enable_model_api=true\nallowed_urls=file:///store/.*,.*"), deployment()),
    ("envelope-batch", with_line("service_envelope=kserve"),
     deployment(f'{BASE}models={{"m":{{"1.0":{ONE}}}}}\nservice_envelope=kserve\n')),
    ("snapshot-config", with_line('model_snapshot={"models":{}}'), deployment()),
    ("snapshot-wins", deployment(snapshots=(Path("logs/config/20260101-startup.cfg"),)), deployment()),
    ("server-health", deployment(server=(running(ready=0),)), deployment(server=(running(),))),
    ("server-differs", deployment(server=(running(batch_size=Value(1, Source.REST)),)),
     deployment(server=(running(),))),
    ("server-differs", deployment(server=(running(response_timeout=Value(60, Source.UNKNOWN)),)),
     deployment(BASE + "models={}\n", host=None, server=(
         running(workers=Value(3, Source.UNKNOWN), max_workers=3, batch_size=Value(1, Source.DEFAULT),
                 max_batch_delay=Value(100, Source.DEFAULT)),))),
    ("server-missing", deployment(server=()), deployment(without("load_models") + MODELS, server=())),
    ("server-undeclared", deployment(server=(running(), running(version="2.0"))),
     deployment(BASE.replace("m.mar", "m.mar,n=http://elsewhere/n.mar") + MODELS,
                server=(running(), running(name="n")))),
    ("server-undeclared",
     deployment(without("load_models") + MODELS, server=(running(), running(name="n", at_startup=False))),
     deployment(without("load_models") + MODELS, server=(running(), running(name="n")))),
    ("server-restored", deployment(server=(running(at_startup=False),)),
     deployment(without("load_models") + MODELS, server=(running(at_startup=False),))),
    ("delay-long", Deployment(server=(running(max_batch_delay=Value(2000, Source.REST)),)),
     Deployment(server=(running(),))),
    ("batch-over-queue", Deployment(server=(running(batch_size=Value(2000, Source.REST)),)),
     Deployment(server=(running(),))),
    ("batching-off", Deployment(server=(running(batch_size=Value(1, Source.DEFAULT)),)),
     Deployment(server=(running(batch_size=Value(1, Source.REST)),))),
    ("continuous-batching-workers",
     Deployment(server=(running(continuous=True, workers=Value(2, Source.REST), max_workers=2),)),
     Deployment(server=(running(continuous=True),))),
    ("log-failed", with_log(failures=("Failed to load model: m.mar",)), with_log()),
    ("log-worker-died", with_log(restarts={"W-9000-m_1.0": 3}, dead={"W-9000-m_1.0": "KeyError"}), with_log()),
    ("log-snapshot", with_log(restored=True), with_log()),
    ("log-setting", with_log(refused=("Invalid batchSize: 8, should be integer",)), with_log()),
    ("log-unavailable", with_log(unavailable={"m": 3}), with_log()),
]  # fmt: skip


@pytest.mark.parametrize(("code", "has", "has_not"), CASES, ids=[case[0] for case in CASES])
def test_finding(code: str, has: Deployment, has_not: Deployment) -> None:
    found = [finding for finding in diagnose(has) if finding.code == code]
    assert found
    assert all(finding.where and finding.what and finding.consequence and finding.fix for finding in found)
    assert code not in codes(has_not)


def test_every_code_has_a_case() -> None:
    known = set()
    for path in RULES.glob("*_rules.py"):
        known |= set(re.findall(r'(?:Finding\(\s*|return Finding\(\s*)"([a-z-]+)"', path.read_text(encoding="utf-8")))
    assert known == {case[0] for case in CASES}


def test_a_sound_deployment_has_none() -> None:
    assert diagnose(deployment()) == []
    assert diagnose(deployment(server=(running(),), log=LogFacts(LOG))) == []


def test_nothing_to_look_at_has_none() -> None:
    assert diagnose(Deployment()) == []


def test_the_worst_comes_first_and_the_cause_replaces_its_effect() -> None:
    given = deployment(f'{BASE}models={{"m":{{"1":{ENTRY}}}}}\n', host=None)
    assert [finding.code for finding in diagnose(given)] == ["models-version"]
    both = diagnose(with_line("batch_size=8\nmanagement_address=http://0.0.0.0:8081"))
    assert [finding.severity.value for finding in both] == ["error", "warning"]


def test_names_without_load_models_are_the_manifests() -> None:
    assert codes(deployment(without("load_models") + MODELS)) == set()


def test_an_archive_that_nothing_loads_may_get_batches() -> None:
    lone = stored("n.mar", source="class H:\n    def handle(self, data, context):\n        return [data[0]]\n")
    assert codes(deployment(BASE + MODELS, stored(), lone)) == {"handler-first-row"}


def test_lines_of_a_cut_models_are_no_keys() -> None:
    assert codes(deployment(CUT, host=None)) == {"models-cut"}


def test_what_is_wrong_with_a_live_model_is_told_once() -> None:
    slow = MODELS.replace('"maxBatchDelay":2', '"maxBatchDelay":2000')
    delay = Value(2000, Source.PROPERTIES)
    same = diagnose(deployment(BASE + slow, server=(running(max_batch_delay=delay),)))
    assert [(one.code, one.where) for one in same] == [("delay-long", "m 1.0 (config.properties:6 models)")]
    scaled = running(max_batch_delay=delay, ready=2, workers=Value(2, Source.REST), max_workers=2)
    found = [(one.code, one.where) for one in diagnose(deployment(BASE + slow, server=(scaled,)))]
    assert found == [("delay-long", "m 1.0 (config.properties:6 models)"), ("server-differs", "m 1.0 minWorkers")]
