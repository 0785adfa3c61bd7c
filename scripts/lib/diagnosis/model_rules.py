"""What is wrong with how a model is batched and how many workers it has."""

from collections.abc import Iterator

from scripts.lib.diagnosis import gson
from scripts.lib.diagnosis.archives import weights
from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.finding import Finding, Severity
from scripts.lib.diagnosis.running import Running, running
from scripts.lib.diagnosis.settings import Served, Setting, properties, served

LONG_DELAY = 1000  # ms
_FILLED = 4  # a batch size this many times what the batches held is out of proportion
_FEWEST_BATCHES = 50  # that say something of the load
_PROCESS = 300 << 20  # bytes of a Python process that has loaded torch and transformers, before any weights
_GIB = 1 << 30
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def batching_off(deployment: Deployment) -> Iterator[Finding]:
    """A batch size that nobody set."""
    for model in _batched(deployment, "batchSize"):
        if not model.settings["batchSize"].given:
            yield Finding(
                "batching-off", Severity.NOTE, model.title, "nothing sets its batch size",
                "TorchServe's default is 1: every request runs alone",
                f"set batchSize for {model.title} in the models property"
                if isinstance(model, Served) else "register it again with batch_size, or set batchSize in its models",
            )  # fmt: skip


def delay_zero(deployment: Deployment) -> Iterator[Finding]:
    """A delay of 0 in an archive."""
    for model in served(deployment):
        value = model.stored.archive.config.get("maxBatchDelay")
        if value == 0 and not isinstance(value, bool):
            yield Finding(
                "delay-zero", Severity.ERROR, f"{model.stored.file}: model-config.yaml", "maxBatchDelay is 0",
                f"TorchServe takes 0 for unset: {model.name} waits {model.count('maxBatchDelay')} ms",
                "leave it out of the archive, and set maxBatchDelay to 1 in the models property",
            )  # fmt: skip


def delay_long(deployment: Deployment) -> Iterator[Finding]:
    """A delay that a lone request feels."""
    for model in _batched(deployment, "batchSize", "maxBatchDelay"):
        delay = model.settings["maxBatchDelay"]
        if delay.value > LONG_DELAY and model.count("batchSize") > 1:
            yield Finding(
                "delay-long", Severity.WARNING, _at(model, delay), f"its maxBatchDelay is {delay.value} ms",
                "a request that is alone waits all of it, idle workers or not; under load a batch fills from the queue"
                " and gains nothing by it",
                "set 1 to 20 ms",
            )  # fmt: skip


def batch_over_queue(deployment: Deployment) -> Iterator[Finding]:
    """Batches that the queue cannot fill."""
    for model in _batched(deployment, "batchSize", "jobQueueSize", "minWorkers"):
        batch, queue = model.count("batchSize"), model.count("jobQueueSize")
        workers = model.count("minWorkers")
        where = _at(model, model.settings["jobQueueSize"])
        if batch > queue:
            yield Finding(
                "batch-over-queue", Severity.ERROR, where, f"its batch size is {batch} and its queue holds {queue}",
                "no batch is ever full, and requests are refused with 503 before there are enough",
                f"set job_queue_size to {10 * batch * max(workers, 1)} or more, or a batch size below {queue}",
            )  # fmt: skip
        elif batch > 1 and batch * workers > queue:
            yield Finding(
                "batches-over-queue", Severity.WARNING, where,
                f"{workers} workers × batches of {batch} are {batch * workers}, and the queue holds {queue}",
                "the workers can never all have full batches while requests are refused with 503",
                f"set job_queue_size to {batch * workers} or more",
            )  # fmt: skip


def batches_not_filled(deployment: Deployment) -> Iterator[Finding]:
    """A batch size far above what the log shows."""
    if deployment.log is None:
        return
    for model in _batched(deployment, "batchSize", "maxBatchDelay"):
        batches, requests = deployment.log.batches.get((model.name, model.version), (0, 0))
        batch = model.count("batchSize")
        if batches < _FEWEST_BATCHES or requests == 0 or batch <= _FILLED * requests / batches:
            continue
        yield Finding(
            "batches-not-filled", Severity.NOTE, f"{deployment.log.path.name}, {model.title}",
            f"its batches held {requests / batches:.1f} requests on average ({batches} batches), of {batch}",
            f"every request waits up to {model.count('maxBatchDelay')} ms for others that don't come",
            "lower the delay to 1 or 2 ms; a batch size near clients ÷ workers is enough",
        )  # fmt: skip


def workers_default(deployment: Deployment) -> Iterator[Finding]:
    """Workers that nobody counted."""
    for model in _batched(deployment, "minWorkers"):
        workers = model.settings["minWorkers"]
        if not workers.given:
            count = f"{workers.value} here" if workers.value else "as many as the machine has"
            yield Finding(
                "workers-default", Severity.WARNING, model.title, "nothing sets its number of workers",
                f"TorchServe starts one per GPU or CPU ({count}), each with its own copy of the model",
                "set minWorkers and maxWorkers in the models property",
            )  # fmt: skip


def workers_of_the_machine(deployment: Deployment) -> Iterator[Finding]:
    """Workers × memory and workers × threads against the machine."""
    host, models = deployment.host, served(deployment)
    workers = sum(model.count("minWorkers") for model in models)
    if host is None or workers == 0:
        return
    listed = ", ".join(f"{model.name}: {model.count('minWorkers')}" for model in models)
    need = sum(model.count("minWorkers") * (weights(model.stored.archive) + _PROCESS) for model in models)
    on_gpus = sum(model.count("minWorkers") * weights(model.stored.archive) for model in models)
    if host.gpus and on_gpus > sum(host.gpus):
        yield Finding(
            "workers-over-gpu-memory", Severity.ERROR, listed,
            f"the workers' weights are {on_gpus / _GIB:.1f} GiB, the GPUs have {sum(host.gpus) / _GIB:.1f}",
            "workers run out of memory while they load", "fewer workers, or smaller weights",
        )  # fmt: skip
    if not host.gpus and need > host.memory:
        yield Finding(
            "workers-over-memory", Severity.ERROR, listed,
            f"{workers} workers need about {need / _GIB:.1f} GiB, the machine has {host.memory / _GIB:.1f}",
            "the system kills workers, or swaps", "fewer workers: each has its own copy of the model",
        )  # fmt: skip
    if not host.gpus and workers > host.cores:
        yield Finding(
            "workers-over-cores", Severity.WARNING, listed,
            f"{workers} workers share {host.cores} cores",
            "they take turns: each batch is slower and none runs sooner",
            f"at most {host.cores} workers in all",
        )  # fmt: skip
    free = [model.name for model in models if not model.stored.sets_threads and model.count("minWorkers")]
    if not host.gpus and host.cores > 1 and workers > 1 and free and not _threads_set(deployment):
        yield Finding(
            "threads-over-cores", Severity.WARNING, ", ".join(free),
            f"{workers} workers, and nothing sets the threads of {', '.join(free)}",
            f"each worker computes with {host.cores} threads on {host.cores} cores: they get in each other's way",
            f"set OMP_NUM_THREADS={max(1, host.cores // workers)} where the server starts, or call"
            " torch.set_num_threads in the handler",
        )  # fmt: skip


def _threads_set(deployment: Deployment) -> bool:
    launcher = properties(deployment).get("cpu_launcher_enable", Setting("false", ""))
    return any(name in deployment.environment for name in _THREADS) or str(launcher.value).lower() == "true"


def continuous_batching(deployment: Deployment) -> Iterator[Finding]:
    """Continuous batching with several workers."""
    for model in _judged(deployment, "minWorkers", "maxWorkers"):
        workers = max(model.count("minWorkers"), model.count("maxWorkers"))
        if "continuousBatching" in model.settings and workers > 1:
            yield Finding(
                "continuous-batching-workers", Severity.ERROR, model.title,
                f"continuousBatching with {workers} workers",
                "an idle worker holds the model's queue, and the streams of the others stall",
                "set minWorkers and maxWorkers to 1",
            )  # fmt: skip


def async_communication(deployment: Deployment) -> Iterator[Finding]:
    """asyncCommunication with batches."""
    for model in served(deployment):
        if "asyncCommunication" in model.settings and model.count("batchSize") > 1:
            yield Finding(
                "async-batch", Severity.ERROR, model.title,
                f"asyncCommunication with a batch size of {model.count('batchSize')}",
                "the frontend fails with a ConcurrentModificationException, and requests hang",
                "set batchSize to 1, or use continuousBatching",
            )  # fmt: skip


def archive_wins(deployment: Deployment) -> Iterator[Finding]:
    """Settings in the `models` JSON that the archive overrules."""
    for model in served(deployment):
        for key, setting in model.settings.items():
            if key not in model.entry or "model-config.yaml" not in setting.place:
                continue
            try:
                wanted = gson.as_int(model.entry[key])
            except gson.GsonError:
                continue
            if wanted and wanted != setting.value:
                default = "" if setting.given else " by default"
                yield Finding(
                    "archive-wins", Severity.WARNING, f"{model.title} {key}",
                    f"config.properties says {wanted} and {setting.place} says {setting.value}{default}",
                    "the archive wins", "leave it out of one of them; what a deployment tunes belongs in the former",
                )  # fmt: skip


def _judged(deployment: Deployment, *keys: str) -> list[Served | Running]:
    """What the files make, and what the live server runs where one of these settings is not what they come to."""
    live = [one for one in running(deployment) if one.declared is None or not set(keys).isdisjoint(one.differing)]
    return [*served(deployment), *live]


def _batched(deployment: Deployment, *keys: str) -> list[Served | Running]:
    """Those that TorchServe batches by size and delay: a continuous engine's delay and size mean other things."""
    return [model for model in _judged(deployment, *keys) if "continuousBatching" not in model.settings]


def _at(model: Served | Running, setting: Setting) -> str:
    return f"{model.title} ({setting.place})"


RULES = (
    batching_off, delay_zero, delay_long, batch_over_queue, batches_not_filled, workers_default, workers_of_the_machine,
    continuous_batching, async_communication, archive_wins,
)  # fmt: skip
