"""The yardstick: the task's own library on the same model directory, in a process of its own.

Its memory and its threads are thereby its own, and it is loaded once however many rounds are measured. The process
waits on its standard input between rounds and burns nothing meanwhile. This file is both sides: imported, it is the
parent's handle; run as a script, it is the child (and then needs nothing of this repository).
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
    """The library in its own process; a context manager that ends it.

    Args:
        model_directory: the model.
        dtype: `float32`, `bfloat16` or `float16`.
        threads: torch's intra-op threads.
        task: embedding (sentence-transformers' `encode`), reranking (its `CrossEncoder.predict`), classification or
            token_classification (transformers' pipelines), seq2seq (`generate` in unsorted batches).

    Raises:
        OfflineError: on entering, when the model can't be loaded.
    """

    #: What the process runs: this file, or a subclass's; by what interpreter; with what beside the environment.
    script = Path(__file__)
    python = sys.executable
    environment: Mapping[str, str] = {}

    def __init__(self, model_directory: Path, dtype: str, threads: int, task: str = "embedding") -> None:
        self.dtype = dtype
        self.threads = threads
        self._arguments = [str(model_directory), dtype, str(threads), task]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Offline":
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "true",
            "TQDM_DISABLE": "1",
            **self.environment,
        }
        self._process = subprocess.Popen(
            [self.python, "-I", str(self.script.resolve()), *self._arguments],
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

    def run(self, inputs: Sequence[Any]) -> float:
        """Run all texts, or pairs, in one call, ordered as the library does; seconds it took.

        Raises:
            OfflineError: the process failed.
        """
        return float(self.ask({"do": "run", "texts": list(inputs)})["seconds"])

    def single(self, texts: Sequence[str], threads: int | None = None) -> SingleText:
        """Embed the texts one at a time, at `threads` threads (the process's own unless told otherwise).

        Raises:
            OfflineError: the process failed.
        """
        answer = self.ask({"do": "single", "texts": list(texts), "threads": threads or self.threads})
        return SingleText(float(answer["forward_ms"]), float(answer["encode_ms"]))

    def values(self, inputs: Sequence[Any]) -> list[list[Any]]:
        """What the library answers, one list of numbers (or of words, of seq2seq) per text, in order.

        Raises:
            OfflineError: the process failed.
        """
        values: list[list[Any]] = self.ask({"do": "values", "texts": list(inputs)})["values"]
        return values

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Put one question to the process and wait for its answer.

        Raises:
            OfflineError: the process failed.
        """
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
        # and the processes of its own that it may have
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
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


class _Embedding:
    """sentence-transformers' encode."""

    def __init__(self, directory: str, dtype: Any) -> None:
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(directory, device="cpu", model_kwargs={"dtype": dtype})

    def run(self, texts: list[str]) -> Any:
        return self.model.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False)

    def values(self, texts: list[str]) -> list[list[Any]]:
        return [[float(x) for x in row] for row in self.run(texts)]


class _Reranking:
    """sentence-transformers' CrossEncoder.predict."""

    def __init__(self, directory: str, dtype: Any) -> None:
        from sentence_transformers import CrossEncoder

        self.model = CrossEncoder(directory, device="cpu", model_kwargs={"dtype": dtype})

    def run(self, pairs: list[Any]) -> Any:
        pairs = [(pair, pair) if isinstance(pair, str) else tuple(pair) for pair in pairs]
        return self.model.predict(pairs, batch_size=BATCH_SIZE, show_progress_bar=False)

    def values(self, pairs: list[Any]) -> list[list[Any]]:
        return [[float(score)] for score in self.run(pairs)]


class _Pipeline:
    """A pipeline of transformers, in batches."""

    def __init__(self, directory: str, dtype: Any, task: str) -> None:
        from transformers import pipeline

        name = task if task.startswith("token") else f"text-{task}"
        self.model = pipeline(name.replace("_", "-"), directory, dtype=dtype, device="cpu", batch_size=BATCH_SIZE)
        self.texts = task == "classification"

    def run(self, texts: list[str]) -> Any:
        return self.model(texts, **({"truncation": True} if self.texts else {}))

    def values(self, texts: list[str]) -> list[list[Any]]:
        return [
            [found["score"]] if self.texts else [float(entity["score"]) for entity in found]
            for found in self.run(texts)
        ]


class _Seq2seq:
    """generate in batches of the texts' own order."""

    def __init__(self, directory: str, dtype: Any) -> None:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self.model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def run(self, texts: list[str]) -> Any:
        found = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = self.tokenizer(
                texts[start : start + BATCH_SIZE], padding=True, truncation=True, return_tensors="pt"
            )
            batch.pop("token_type_ids", None)
            found += self.tokenizer.batch_decode(self.model.generate(**batch), skip_special_tokens=True)
        return found

    def values(self, texts: list[str]) -> list[list[Any]]:
        return [text.split() for text in self.run(texts)]


def _library(directory: str, dtype: Any, task: str) -> Any:
    if task in ("classification", "token_classification"):
        return _Pipeline(directory, dtype, task)
    return {"embedding": _Embedding, "reranking": _Reranking, "seq2seq": _Seq2seq}[task](directory, dtype)


Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(prepare: Callable[[], Answer]) -> None:
    """Make what answers, say so, then answer one question per line of standard input until it ends.

    Args:
        prepare: loads the model; what it raises, and what an answer raises, the parent is told.
    """
    # The answers' channel is kept apart from what libraries print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        answer = prepare()
    except Exception as failure:  # noqa: BLE001 - whatever it is, the parent must hear it
        say({"error": f"the offline library could not load the model: {type(failure).__name__}: {failure}"})
        return
    say({"ready": True})
    for line in sys.stdin:
        try:
            say(answer(json.loads(line)))
        except Exception as failure:  # noqa: BLE001 - whatever it is, the parent must hear it
            say({"error": f"{type(failure).__name__}: {failure}"})


def _answer(model_directory: str, dtype: str, threads: int, task: str) -> Answer:
    """Load a task's library; what answers the questions of `Offline`."""
    import torch

    torch.set_num_threads(threads)
    library = _library(model_directory, getattr(torch, dtype), task)
    library.run(["warm"] * BATCH_SIZE + ["warm up " * 100] * 4)
    model = library.model

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        texts = question["texts"]
        if question["do"] == "run":
            start = time.perf_counter()
            with torch.inference_mode():
                library.run(texts)
            return {"seconds": time.perf_counter() - start}
        if question["do"] == "values":
            return {"values": library.values(texts)}
        torch.set_num_threads(question["threads"])
        features = [model.preprocess([text]) for text in texts]
        with torch.inference_mode():
            model(dict(features[0]))
            forward = _median_ms(lambda each: model(dict(each)), features)
        whole = _median_ms(lambda text: library.run([text]), texts)
        torch.set_num_threads(threads)
        return {"forward_ms": forward, "encode_ms": whole}

    return answer


if __name__ == "__main__":
    directory, name, count, task = sys.argv[1:]
    serve(lambda: _answer(directory, name, int(count), task))
