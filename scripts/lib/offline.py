"""The yardstick: sentence-transformers' own `encode` on the same model directory, in a process of its own.

Its memory and its threads are thereby its own, and it is loaded once however many rounds are measured. The process
waits on its standard input between rounds and burns nothing meanwhile. This file is both sides: imported, it is the
parent's handle; run as a script, it is the child (and then needs nothing of this repository).
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

# sentence-transformers' own default: what a person gets who asks for nothing.
BATCH_SIZE = 32


@dataclass(frozen=True)
class SingleText:
    """Median milliseconds of one text at a time.

    Attributes:
        forward_ms: the model's forward alone, tokens ready.
        encode_ms: the library's `encode([text])`, tokenizing included.
    """

    forward_ms: float
    encode_ms: float


class OfflineError(RuntimeError):
    """The offline process could not load the model or ended; the text is its own."""


class Offline:
    """sentence-transformers in its own process; a context manager that ends it.

    Args:
        model_directory: a sentence-transformers directory.
        dtype: `float32`, `bfloat16` or `float16`.
        threads: torch's intra-op threads.

    Raises:
        OfflineError: on entering, when the model can't be loaded.
    """

    def __init__(self, model_directory: Path, dtype: str, threads: int) -> None:
        self.dtype = dtype
        self.threads = threads
        self._arguments = [str(model_directory), dtype, str(threads)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Offline":
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "true",
            "TQDM_DISABLE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).resolve()), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            # Ctrl-C in the terminal is for the parent, which ends this process.
            start_new_session=True,
        )
        try:
            self._answer()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """The process's id.

        Raises:
            OfflineError: it isn't running.
        """
        if self._process is None:
            raise OfflineError("the offline process isn't running")
        return self._process.pid

    def encode(self, texts: Sequence[str]) -> float:
        """Encode all texts in one call, sorted as the library does; seconds it took.

        Raises:
            OfflineError: the process failed.
        """
        return float(self._ask({"do": "encode", "texts": list(texts)})["seconds"])

    def single(self, texts: Sequence[str], threads: int | None = None) -> SingleText:
        """Run the texts one at a time, at `threads` threads (the process's own unless told otherwise).

        Raises:
            OfflineError: the process failed.
        """
        answer = self._ask({"do": "single", "texts": list(texts), "threads": threads or self.threads})
        return SingleText(float(answer["forward_ms"]), float(answer["encode_ms"]))

    def vectors(self, texts: Sequence[str]) -> list[list[float]]:
        """The texts' vectors, one per text, in order.

        Raises:
            OfflineError: the process failed.
        """
        vectors: list[list[float]] = self._ask({"do": "vectors", "texts": list(texts)})["vectors"]
        return vectors

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            raise OfflineError("the offline process isn't running")
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as failure:
            raise OfflineError(f"the offline process ended: {failure}") from failure
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        if self._process is None or self._process.stdout is None:
            raise OfflineError("the offline process isn't running")
        line = self._process.stdout.readline()
        if not line:
            raise OfflineError(f"the offline process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OfflineError(answer["error"])
        return answer

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _median_ms(run: Any, inputs: Sequence[Any]) -> float:
    seconds = []
    for each in inputs:
        start = time.perf_counter()
        run(each)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def _child(model_directory: str, dtype: str, threads: int) -> None:
    """Load the model, say so, then answer one question per line of standard input until it ends."""
    # The answers' channel is kept apart from what libraries print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        model = SentenceTransformer(model_directory, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
        model.encode(["warm"] * BATCH_SIZE + ["warm up " * 100] * 4, batch_size=BATCH_SIZE, show_progress_bar=False)
    except Exception as failure:  # noqa: BLE001 - whatever it is, the parent must hear it
        say({"error": f"sentence-transformers could not load the model: {type(failure).__name__}: {failure}"})
        return
    say({"ready": True})

    def encode(texts: list[str]) -> Any:
        return model.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False)

    for line in sys.stdin:
        question = json.loads(line)
        texts = question["texts"]
        try:
            if question["do"] == "encode":
                start = time.perf_counter()
                encode(texts)
                say({"seconds": time.perf_counter() - start})
            elif question["do"] == "vectors":
                say({"vectors": [[float(x) for x in row] for row in encode(texts)]})
            else:
                torch.set_num_threads(question["threads"])
                features = [model.preprocess([text]) for text in texts]
                with torch.inference_mode():
                    model(dict(features[0]))
                    forward = _median_ms(lambda each: model(dict(each)), features)
                whole = _median_ms(lambda text: encode([text]), texts)
                torch.set_num_threads(threads)
                say({"forward_ms": forward, "encode_ms": whole})
        except Exception as failure:  # noqa: BLE001 - whatever it is, the parent must hear it
            say({"error": f"{type(failure).__name__}: {failure}"})


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
