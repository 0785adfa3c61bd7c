"""What a live server runs, in the shape that the rules look at: each setting with the place it came from."""

from collections.abc import Mapping
from dataclasses import dataclass

from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.settings import Served, Setting, load_list, properties, served
from scripts.lib.effective import Effective, Source, Value

_SERVER = "live server"
#: What the server tells by its values; TorchServe never tells where it has them from.
_PLACES = {
    Source.REST: f"{_SERVER}: REST, or a restored snapshot",
    Source.ARCHIVE: f"{_SERVER}: the archive",
    Source.PROPERTIES: f"{_SERVER}: its configuration",
    Source.DEFAULT: f"{_SERVER}: TorchServe's default",
    Source.UNKNOWN: f"{_SERVER}: in no file that was read",
}


@dataclass(frozen=True)
class Running:
    """A version of a model on the live server.

    Args:
        live: what the server tells of it.
        settings: its values by TorchServe's camelCase names.
        declared: what the files make of the same name and version; None when they have none, or were not named.
    """

    live: Effective
    settings: Mapping[str, Setting]
    declared: Served | None

    @property
    def name(self) -> str:
        """What it is registered as."""
        return self.live.name

    @property
    def version(self) -> str:
        """The version that it is registered as."""
        return self.live.version

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{self.name} {self.version} on the server"

    def count(self, key: str) -> int:
        """A setting that is a whole number."""
        return int(self.settings[key].value)

    @property
    def differing(self) -> list[str]:
        """The settings that are other ones than the files come to; those that the files leave open count as equal."""
        wanted = self.declared.settings if self.declared else {}
        return [
            key
            for key, setting in self.settings.items()
            if key in wanted and setting.value != wanted[key].value and not _open(wanted[key])
        ]


def _open(setting: Setting) -> bool:
    return not setting.given and setting.value == 0  # one per core of a machine that isn't this one


def running(deployment: Deployment) -> list[Running]:
    """Everything on the live server, in its order; [] without one."""
    models = {(model.name, model.stored.version): model for model in _declared(deployment)}
    return [_running(one, models.get((one.name, one.version))) for one in deployment.server or ()]


def _declared(deployment: Deployment) -> list[Served]:
    return [] if deployment.file is None or deployment.archives is None else served(deployment)


def _running(one: Effective, declared: Served | None) -> Running:
    values = {
        "minWorkers": one.workers,
        "maxWorkers": Value(one.max_workers, one.workers.source),
        "batchSize": one.batch_size,
        "maxBatchDelay": one.max_batch_delay,
        "jobQueueSize": one.queue,
        "responseTimeout": one.response_timeout,
        "startupTimeout": one.startup_timeout,
    }
    settings = {}
    for key, value in values.items():
        settings[key] = Setting(value.value, _PLACES[value.source], given=value.source is not Source.DEFAULT)
        if declared is not None and one.at_startup and declared.settings[key].value == value.value:
            settings[key] = declared.settings[key]
    if one.continuous:
        settings["continuousBatching"] = Setting(True, _PLACES[Source.ARCHIVE])
    return Running(one, settings, declared)


def missing(deployment: Deployment) -> list[Served]:
    """Models that load_models names and the live server does not have."""
    if deployment.server is None or "load_models" not in properties(deployment):
        return []
    live = {(one.name, one.version) for one in deployment.server}
    return [model for model in _declared(deployment) if (model.name, model.stored.version) not in live]


def undeclared(deployment: Deployment) -> list[Running]:
    """What the live server has and the files certainly do not load."""
    if deployment.file is None or deployment.archives is None:
        return []
    wanted = load_list(deployment)
    unread = {*deployment.passed_over, *(one.path.name for one in deployment.unreadable)}
    if wanted is None:
        # All of the store, or what the command line said: only one that came later is certainly from elsewhere.
        if unread:
            return []
        return [one for one in running(deployment) if one.declared is None and not one.live.at_startup]
    elsewhere = [
        (name, url) for name, url in wanted if url not in deployment.archives and (url in unread or "/" in url)
    ]
    if any(not name for name, _ in elsewhere):
        return []  # one of them has the name of its manifest, which was not read
    names = {name for name, _ in elsewhere}
    return [one for one in running(deployment) if one.declared is None and one.name not in names]
