"""An extracted archive run in this process through TorchServe's own loader and Service, as a worker runs it.

Needs only `ts` and the standard library, so that it also runs as a script where nothing of this checkout is on the
path: `python -I service.py DIRECTORY` loads the archive, answers one request and prints one line of JSON;
`python -I service.py DIRECTORY BODIES` also answers each line of the file BODIES, and prints before it a line for each.
"""

import json
import os
import struct
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Body:
    """A request as a client sends it.

    Args:
        data: the raw body.
        content_type: its media type; None sends none.
        name: `body`, or the name of a form field.
        headers: request headers, `url_path` for a route among them.
    """

    data: bytes
    content_type: str | None = "application/json"
    name: str = "body"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One request's answer as it goes over the wire."""

    status: int
    phrase: str
    content_type: str | None
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def load(directory: Path, *, gpu_id: int | None = None, batch_size: int = 32, metrics: Any = None) -> Any:
    """Load an extracted archive exactly as a TorchServe worker does.

    Args:
        directory: the extracted archive. It goes first on `sys.path` and becomes the current directory.
        gpu_id: as TorchServe would assign it.
        metrics: a metrics cache of TorchServe's, or None for a fresh one.

    Returns:
        A `ts.service.Service`.
    """
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
    from ts.model_loader import TsModelLoader

    directory = directory.resolve()
    manifest = json.loads((directory / "MAR-INF" / "MANIFEST.json").read_text(encoding="utf-8"))
    model = manifest["model"]
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    os.chdir(directory)
    if metrics is None:
        import ts

        metrics = MetricsCacheYamlImpl(str(Path(ts.__file__).parent / "configs" / "metrics.yaml"))
        metrics.initialize_cache()
        metrics.model_name = model["modelName"]
    # By position, as the worker calls it
    service = TsModelLoader().load(
        model["modelName"], str(directory), model["handler"], gpu_id, batch_size, None, True, metrics
    )
    service.set_cl_socket(None)
    return service


def predict(service: Any, bodies: Sequence[Body | Sequence[Body]], *, seconds: float = 300.0) -> list[Answer]:
    """Send requests as one batch and decode what would go over the wire.

    A handler of TorchServe's `continuousBatching` mode is called until every request has its last piece, as the
    frontend calls it; the pieces of an answer are put together.

    Args:
        service: from `load`.
        bodies: one per request; a sequence of bodies is a form of several fields.
        seconds: the most that all calls together may take.

    Returns:
        One answer per request, in order.

    Raises:
        TimeoutError: not all requests were answered in time.
    """
    batch = [_request(body if isinstance(body, Sequence) else [body]) for body in bodies]
    ids = [request["requestId"].decode() for request in batch]
    found: dict[str, Answer] = {}
    pieces: dict[str, list[bytes]] = {id: [] for id in ids}
    deadline = time.monotonic() + seconds
    while len(found) < len(ids):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(ids) - len(found)} of {len(ids)} requests are unanswered after {seconds:g} s")
        for id, answer in answers(bytes(service.predict(batch))):
            pieces[id].append(answer.body)
            if answer.headers.get("ts_stream_next") != "true":
                found[id] = replace(answer, body=b"".join(pieces[id]))
        # after its first call a request comes without its body
        batch = [{"requestId": id.encode(), "headers": [], "parameters": []} for id in ids if id not in found]
    return [found[id] for id in ids]


def _request(parts: Sequence[Body]) -> dict[str, Any]:
    headers = {name: value for part in parts for name, value in part.headers.items()}
    if parts and parts[0].content_type and "content-type" not in {name.lower() for name in headers}:
        headers["content-type"] = parts[0].content_type
    return {
        "requestId": str(uuid.uuid4()).encode(),
        "headers": [{"name": name.encode(), "value": value.encode()} for name, value in headers.items()],
        "parameters": [
            {"name": part.name, "contentType": (part.content_type or "").split(";")[0], "value": _decoded(part)}
            for part in parts
        ],
    }


def _decoded(part: Body) -> Any:
    """The value as TorchServe's `otf_message_handler` hands it over."""
    kind = (part.content_type or "").split(";")[0]
    try:
        if kind == "application/json":
            return json.loads(part.data.decode())
        if kind.startswith("text"):
            return part.data.decode()
    except (ValueError, RecursionError):
        pass
    return bytearray(part.data)


def answers(message: bytes) -> list[tuple[str, Answer]]:
    """Take apart what `create_predict_response` put together: each answer with its request's id."""
    at = 0

    def integer() -> int:
        nonlocal at
        at += 4
        return int(struct.unpack_from("!i", message, at - 4)[0])

    def chunk() -> bytes:
        nonlocal at
        size = integer()
        at += size
        return message[at - size : at]

    code, text = integer(), chunk().decode()
    found = []
    while at < len(message):
        size = integer()
        if size == -1:
            break
        at += size
        id = message[at - size : at].decode()
        content_type = chunk().decode() or None
        status, phrase = integer(), chunk().decode()
        headers = {chunk().decode(): chunk().decode() for _ in range(integer())}
        answer = Answer(status, phrase or (text if status == code else ""), content_type, headers, chunk())
        found.append((id, answer))
    return found


def _forget_checkout() -> None:
    """Take this checkout, and whatever an editable install put in its place, off the import path."""
    checkout = Path(__file__).resolve().parents[2]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (checkout, Path(__file__).parent)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]


def _smoke(directory: Path, bodies: Sequence[bytes], reports: IO[str]) -> None:
    """Load the archive and answer one request, then those with these bodies, and report on all.

    Raises:
        RuntimeError: code that is not the archive's was used, or the first request got no 200.
    """
    service = load(directory)
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if name.split(".")[0] == "handlers" and place and not Path(place).resolve().is_relative_to(directory.resolve()):
            raise RuntimeError(f"{name} was not loaded from the archive")
    handler = getattr(service._entry_point, "__self__", None)  # Service has no public way to it
    sample = handler.sample() if handler is not None and hasattr(handler, "sample") else {"text": "hello"}
    answer = predict(service, [Body(json.dumps(sample).encode())])[0]
    if answer.status != 200:
        raise RuntimeError(f"one request got {answer.status}: {answer.body.decode(errors='replace')[:500]}")
    card = handler.card() if handler is not None and hasattr(handler, "card") else {}
    for body in bodies:
        answered = predict(service, [Body(body)])[0]
        print(json.dumps({"status": answered.status, "body": answered.json()}), file=reports)
    print(json.dumps({"ok": True, "bytes": len(answer.body), "card": card}), file=reports, flush=True)


if __name__ == "__main__":
    _forget_checkout()
    lines = Path(sys.argv[2]).read_bytes().splitlines() if len(sys.argv) > 2 else []
    # what libraries print, and the processes that an engine has, does not get among the reports
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _smoke(Path(sys.argv[1]), lines, kept)
