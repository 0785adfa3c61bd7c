"""A deployment as it was read: everything that the rules look at, and nothing that reads or decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.archive import Archive
from scripts.lib.diagnosis.handler_source import HandlerSource
from scripts.lib.diagnosis.properties_file import PropertiesFile
from scripts.lib.effective import Effective


@dataclass(frozen=True)
class StoredArchive:
    """An archive of the model store.

    Args:
        archive: what it says of itself.
        handler: what its handler's source shows; None when the source isn't in it and isn't one of TorchServe's own.
        sets_threads: whether some source in it sets torch's number of threads.
        requirements: the lines of its requirements.txt.
    """

    archive: Archive
    handler: HandlerSource | None = None
    sets_threads: bool = False
    requirements: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The file's name."""
        return self.archive.path.name

    @property
    def version(self) -> str:
        """The version that TorchServe registers it as."""
        return self.archive.version or "1.0"


@dataclass(frozen=True)
class Unreadable:
    """A file that could not be read, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Host:
    """The machine that the server runs on. Memory is bytes; `gpus` has each GPU's."""

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class LogFacts:
    """What a log tells.

    Args:
        path: the file.
        failures: why models could not be registered or the configuration was refused.
        dead: workers that died and did not load their model again → the last line that they printed.
        restarts: worker → how often it died.
        restored: whether a snapshot was restored at the start.
        refused: settings of model-config.yaml that TorchServe did not take, in its words.
        batches: (name, version) → batches run and requests in them.
        unavailable: model → requests answered with 503.
    """

    path: Path
    failures: tuple[str, ...] = ()
    dead: Mapping[str, str] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    restored: bool = False
    refused: tuple[str, ...] = ()
    batches: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    unavailable: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Deployment:
    """A deployment, as far as it was given; what was not is None.

    Args:
        file: config.properties.
        store_argument: the model store that was named, which wins over the file's.
        archives: the store's archives by file name.
        store_fault: why the store that the file names cannot be read here, "" when it can.
        unreadable: archives that could not be read.
        passed_over: what else TorchServe could load from the store and nobody looked into (directories, .tar.gz).
        environment: this process's environment, taken for the server's.
        server: what the live server runs.
        log: what its log tells.
        host: its machine; None when it is another one.
        snapshots: files that TorchServe would restore, the newest last.
    """

    file: PropertiesFile | None = None
    store_argument: Path | None = None
    archives: Mapping[str, StoredArchive] | None = None
    store_fault: str = ""
    unreadable: tuple[Unreadable, ...] = ()
    passed_over: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    server: tuple[Effective, ...] | None = None
    log: LogFacts | None = None
    host: Host | None = None
    snapshots: tuple[Path, ...] = ()
