"""What is wrong around the models: who may reach the server, what it runs, what its log and its snapshots tell."""

import re
from collections.abc import Iterator

from scripts.lib.addresses import address
from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.finding import Finding, Severity
from scripts.lib.diagnosis.running import Running, missing, running, undeclared
from scripts.lib.diagnosis.settings import DEFAULT_TOKEN_EXPIRATION, Served, is_true, properties, served
from scripts.lib.effective import health
from scripts.lib.errors import UserError
from scripts.lib.serving import is_loopback

_A_DAY = 1440  # minutes
_ANY_URL = "http://a.host.of.anybody/model.mar"
#: What an envelope does with a batch.
_ENVELOPES = {
    "kserve": "it reads the first request of a batch only",
    "kservev2": "it reads the first request of a batch only",
    "json": "one request that it cannot parse fails the whole batch",
    "body": "it takes a request without a body for None, which can fail the whole batch",
}


def reachable(deployment: Deployment) -> Iterator[Finding]:
    """Who can reach the management API, and the server without a token."""
    if deployment.file is None:
        return
    found = properties(deployment)
    values = {key: str(setting.value) for key, setting in found.items()}
    open_doors = []
    for name in ("inference", "management"):
        key = f"{name}_address"
        try:
            host, _ = address(values, name)
        except UserError:
            host = ""
        if key in found and not re.fullmatch(r"https?://[^:/]+(:[0-9]+)?/?|unix:/.*", values[key], re.IGNORECASE):
            yield Finding(
                "address-invalid", Severity.ERROR, found[key].place, f"{key}={values[key][:80]} is no address",
                "TorchServe does not start, or listens elsewhere", "write http://HOST:PORT (IPv4 or a name)",
            )  # fmt: skip
        elif host and not is_loopback(host):
            open_doors.append((name, found[key].place, host))
    if "management_address" in found and values["management_address"] == values.get("inference_address"):
        yield Finding(
            "management-shared", Severity.WARNING, found["management_address"].place,
            "the management API has the inference API's address",
            "whoever may send requests reaches it as well", "give it a port of its own, on 127.0.0.1",
        )  # fmt: skip
    for name, place, host in open_doors:
        if is_true(found, "disable_token_authorization"):
            yield Finding(
                "tokens-off", Severity.ERROR, place, f"the {name} API listens on {host} without tokens",
                "whoever reaches the machine can "
                + ("scale, register and unregister models" if name == "management" else "use its models"),
                "remove disable_token_authorization, or listen on 127.0.0.1",
            )  # fmt: skip
        elif name == "management":
            yield Finding(
                "management-exposed", Severity.WARNING, place, f"the management API listens on {host}",
                "with a leaked key whoever reaches the machine changes what it serves, and may run code on it",
                "let it listen on 127.0.0.1, or behind a firewall",
            )  # fmt: skip


def tokens(deployment: Deployment) -> Iterator[Finding]:
    """Keys that expire while the server runs."""
    found = properties(deployment)
    if deployment.file is None or is_true(found, "disable_token_authorization"):
        return
    setting = found.get("token_expiration_min")
    try:
        minutes = float(setting.value) if setting else DEFAULT_TOKEN_EXPIRATION
    except ValueError:
        minutes = DEFAULT_TOKEN_EXPIRATION
    if minutes < _A_DAY:
        yield Finding(
            "token-expires", Severity.WARNING, setting.place if setting else deployment.file.path.name,
            f"the keys live {minutes:g} minutes" + ("" if setting else ", TorchServe's default"),
            "then every call fails with 400 until somebody fetches new ones",
            "set token_expiration_min to the server's life, for example 5256000 (ten years)",
        )  # fmt: skip


def allowed_urls(deployment: Deployment) -> Iterator[Finding]:
    """Models, which are code, from anywhere."""
    found = properties(deployment)
    if deployment.file is None or not is_true(found, "enable_model_api"):
        return
    setting = found.get("allowed_urls")
    if setting is None or any(_matches_anything(pattern) for pattern in str(setting.value).split(",")):
        yield Finding(
            "allowed-urls-open", Severity.WARNING, setting.place if setting else deployment.file.path.name,
            "models may be registered from any URL",
            "a model is code: whoever may call the management API runs what they like on this machine",
            "set allowed_urls to the places that models come from, for example file:///models/.*",
        )  # fmt: skip


def _matches_anything(pattern: str) -> bool:
    try:
        return re.fullmatch(pattern, _ANY_URL) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def envelope(deployment: Deployment) -> Iterator[Finding]:
    """An envelope around handlers that get batches."""
    setting = properties(deployment).get("service_envelope")
    batched = [model.name for model in served(deployment) if model.count("batchSize") > 1]
    if setting is None or not setting.value or not batched:
        return
    name = str(setting.value).strip()
    does = _ENVELOPES.get(name, "a request that it cannot read fails the whole batch")
    first = "first request" in does
    yield Finding(
        "envelope-batch", Severity.ERROR if first else Severity.WARNING, setting.place,
        f"service_envelope={name[:40]} with batches ({', '.join(batched)})", does,
        "remove the envelope and read the requests in the handler, or keep the batch size at 1",
    )  # fmt: skip


def snapshots(deployment: Deployment) -> Iterator[Finding]:
    """Snapshots that win over the file."""
    found, file = properties(deployment), deployment.file
    if "model_snapshot" in found:
        yield Finding(
            "snapshot-config", Severity.WARNING, found["model_snapshot"].place,
            "the file is a snapshot of TorchServe's",
            "its model_snapshot decides everything: models, load_models and the archives' own settings have no effect",
            "remove model_snapshot, and say load_models and models instead",
        )  # fmt: skip
    elif deployment.snapshots and file is not None:
        latest = deployment.snapshots[-1]
        yield Finding(
            "snapshot-wins", Severity.WARNING, str(latest), f"{len(deployment.snapshots)} snapshots lie here",
            f"TorchServe restores this one, and ignores {file.path.name}, when it is started there without --ts-config"
            " and --ncs",
            "start it with --ts-config and --ncs, and remove the snapshots",
        )  # fmt: skip


def live(deployment: Deployment) -> Iterator[Finding]:
    """A running server that is not well, or not what the file says."""
    if deployment.server is None:
        return
    for line in health(deployment.server):
        yield Finding(
            "server-health", Severity.ERROR, "server", line, "requests fail or wait",
            "see the server's log: batchserve doctor --log FILE",
        )  # fmt: skip
    for model in missing(deployment):
        yield Finding(
            "server-missing", Severity.ERROR, model.title, "load_models names it, and the server does not have it",
            "requests to it get 404: it failed to load, was unregistered, or the server started before the last edit",
            "see the server's log: batchserve doctor --log FILE; then restart it, or register the model",
        )  # fmt: skip
    for one in undeclared(deployment):
        yield Finding(
            "server-undeclared", Severity.WARNING, one.title, f"it runs {one.live.archive}, which no file loads",
            "after a restart with --ts-config and --ncs it is gone",
            "add it to load_models and models, or unregister it",
        )  # fmt: skip
    for one in running(deployment):
        if one.declared is None:
            continue
        if not one.live.at_startup and "load_models" in properties(deployment):
            yield Finding(
                "server-restored", Severity.WARNING, one.title,
                "it was not loaded from load_models: a snapshot was restored, or it was registered over REST",
                "the settings in the files were not asked for it, and edits of them have no effect at a restart that"
                " restores the snapshot", "restart it with --ts-config and --ncs",
            )  # fmt: skip
        yield from _differs(one, one.declared)


def _differs(one: Running, declared: Served) -> Iterator[Finding]:
    for key in one.differing:
        if key == "maxWorkers" and "minWorkers" in one.differing:
            continue  # scaled, which is told
        wanted = declared.settings[key]
        yield Finding(
            "server-differs", Severity.WARNING, f"{declared.title} {key}",
            f"the server runs with {one.settings[key].value}, the files come to {wanted.value} ({wanted.place})",
            "it was registered or scaled over REST, restored from a snapshot, or started before the last edit",
            "restart it with --ts-config and --ncs, or register the model again",
        )  # fmt: skip


def log(deployment: Deployment) -> Iterator[Finding]:
    """What the log tells of failures."""
    facts = deployment.log
    if facts is None:
        return
    where = facts.path.name
    for failure in facts.failures:
        yield Finding(
            "log-failed", Severity.ERROR, where, failure[:500], "the model, or the server, did not start",
            "correct what it names",
        )  # fmt: skip
    for worker, count in facts.restarts.items():
        dead = worker in facts.dead
        yield Finding(
            "log-worker-died", Severity.ERROR if dead else Severity.WARNING, where,
            f"{worker} died {count} time{'s' * (count > 1)}"
            + (f" and did not come back: {facts.dead[worker][:300]}" if dead else ", and came back"),
            "its running batch failed each time, and /ping says Healthy for a while all the same",
            "see the lines of that worker before it died",
        )  # fmt: skip
    if facts.restored:
        yield Finding(
            "log-snapshot", Severity.WARNING, where, "the server restored a snapshot",
            "what config.properties and the archives say was not used", "start it with --ts-config and --ncs",
        )  # fmt: skip
    for words in facts.refused:
        yield Finding(
            "log-setting", Severity.ERROR, where, f"TorchServe did not take a setting: {words}",
            "it went on without it", "correct the archive's model-config.yaml",
        )  # fmt: skip
    for model, count in facts.unavailable.items():
        yield Finding(
            "log-unavailable", Severity.WARNING, where, f"{count} request{'s' * (count > 1)} to {model} got 503",
            "the queue was full, no worker was there, or the handler failed a whole batch",
            "a longer job_queue_size takes a burst; for more load, workers; for the rest see the worker's lines",
        )  # fmt: skip


RULES = (reachable, tokens, allowed_urls, envelope, snapshots, live, log)
