"""Small deployments for the rules, made without a file on disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.lib.archive import CONFIG, Archive
from scripts.lib.diagnosis.deployment import Deployment, Host, StoredArchive
from scripts.lib.diagnosis.handler_source import examine
from scripts.lib.diagnosis.properties_file import parse
from scripts.lib.effective import Effective, Source, Value

GOOD_HANDLER = "class H:\n    def handle(self, data, context):\n        return [b'' for row in data]\n"
#: A file with nothing wrong; `models` comes from `config`.
BASE = """inference_address=http://127.0.0.1:8080
token_expiration_min=5256000
job_queue_size=1000
model_store=store
load_models=m=m.mar
"""
HOST = Host(4, 16 << 30)
ENTRY = '{"minWorkers":1,"maxWorkers":1,"batchSize":8,"maxBatchDelay":2}'
MODELS = f'models={{"m":{{"1.0":{ENTRY}}}}}\n'


def stored(
    file: str = "m.mar",
    config: Mapping[str, Any] | None = None,
    source: str = GOOD_HANDLER,
    *,
    version: str = "1.0",
    size: int = 0,
    manifest: Mapping[str, Any] | None = None,
    requirements: str = "",
    members: tuple[str, ...] = (),
) -> StoredArchive:
    """An archive called as its file, of one handler."""
    model = {"modelName": file.removesuffix(".mar"), "modelVersion": version, "handler": "handler.py"}
    sizes = {"handler.py": len(source), "model.safetensors": size, **dict.fromkeys(members, 1)}
    if config is not None:
        model["configFile"], sizes[CONFIG] = CONFIG, 1
    if requirements:
        model["requirementsFile"], sizes["requirements.txt"] = "requirements.txt", 1
    about = Archive(Path("store") / file, {"model": {**model, **(manifest or {})}}, dict(config or {}), None, sizes)
    return StoredArchive(
        about, examine(source, "handler.py"), "set_num_threads" in source, tuple(requirements.splitlines())
    )


def deployment(
    text: str = BASE + MODELS, *archives: StoredArchive, host: Host | None = HOST, **more: Any
) -> Deployment:
    """A config.properties and a store: m.mar unless archives are given."""
    found = {one.file: one for one in archives or (stored(),)}
    return Deployment(file=parse(Path("config.properties"), text), archives=found, host=host, **more)


def running(**changes: Any) -> Effective:
    """m 1.0 on a server, as the files of `deployment` have it."""
    values: dict[str, Any] = {
        "name": "m", "version": "1.0", "archive": "m.mar", "default": True, "ready": 1,
        "workers": Value(1, Source.PROPERTIES), "batch_size": Value(8, Source.PROPERTIES),
        "max_batch_delay": Value(2, Source.PROPERTIES), "queue": Value(1000, Source.PROPERTIES), "pending": 0,
        "max_workers": 1, "response_timeout": Value(120, Source.DEFAULT), "startup_timeout": Value(120, Source.DEFAULT),
        "continuous": False, "at_startup": True,
    }  # fmt: skip
    return Effective(**{**values, **changes})
