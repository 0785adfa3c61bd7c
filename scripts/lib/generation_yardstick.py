"""What generation over HTTP is compared with, each in a process of its own: static batches, the engine alone, and vLLM.

As with `offline`, whose process this is, the file is both sides: imported, the parent's handle; run as a script, the
child. The engine alone is the one inside the archive. vLLM is whatever the named interpreter has, at the same dtype,
threads and memory for the cache; it needs nothing of this repository.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.lib.offline import Offline, serve

STATIC, ENGINE, UNSHARED, VLLM = "static", "engine", "unshared", "vllm"
WAIT_S = 1.0
VLLM_CACHE_GIB = 2  # what the archive's engine takes on a CPU where nothing else is said


@dataclass(frozen=True)
class Generated:
    """What came of some requests, in their order.

    Attributes:
        seconds: from the first one sent to the last one answered.
        first_s, latency_s: from when each was sent to its first and to its last token; in a static batch all come last.
        tokens: the ids of each answer.
    """

    seconds: float
    first_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]


class Yardstick(Offline):
    """A process that generates.

    Args:
        model_directory: the model, inside an extracted archive.
        dtype: `float32`, `bfloat16` or `float16`.
        threads: torch's intra-op threads.
        kind: STATIC for transformers' `generate`, ENGINE for the archive's engine, UNSHARED for that without the
            sharing of prefixes, VLLM for vLLM's.
        settings: the archive's `handler:` section.
        slots: sequences that run at once.
        python: the interpreter that has vLLM; None for this one.

    Raises:
        OfflineError: on entering, when the model can't be loaded.
    """

    script = Path(__file__)

    def __init__(
        self,
        model_directory: Path,
        dtype: str,
        threads: int,
        kind: str,
        settings: Mapping[str, Any],
        slots: int,
        python: Path | None = None,
    ) -> None:
        super().__init__(model_directory, dtype, threads, kind)
        if python is not None:
            self.python = str(python)
        if kind == VLLM:
            self.environment = _VLLM_ENVIRONMENT
        elif kind != STATIC:
            from handlers.cores import spinning  # not above: its process imports the archive's own handlers

            self.environment = spinning(os.environ)  # as where it serves
        self._arguments += [json.dumps(dict(settings)), str(slots)]

    def generate(self, requests: Sequence[tuple[Sequence[int], int]], at_once: int) -> Generated:
        """Answer requests, at most `at_once` of them at a time.

        Args:
            requests: token ids and the number of tokens to generate, for each.

        Raises:
            OfflineError: the process failed.
        """
        answer = self.ask({"requests": [[list(prompt), new] for prompt, new in requests], "at_once": at_once})
        return Generated(
            answer["seconds"], tuple(answer["first_s"]), tuple(answer["latency_s"]), tuple(map(tuple, answer["tokens"]))
        )


# Its threads are then those of OMP_NUM_THREADS, wherever they run; nothing is reported to its makers.
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class _Static:
    """transformers' `generate` on batches in the requests' order, each of which runs to its longest answer."""

    def __init__(self, directory: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # it knows no end of text

    def run(self, requests: list[Any], at_once: int) -> dict[str, Any]:
        latencies: list[float] = []
        tokens: list[list[int]] = []
        start = time.perf_counter()
        for first in range(0, len(requests), at_once):
            begun = time.perf_counter()
            batch = requests[first : first + at_once]
            tokens += self._batch(batch)
            latencies += [time.perf_counter() - begun] * len(batch)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "first_s": latencies, "latency_s": latencies, "tokens": tokens}

    def _batch(self, batch: list[Any]) -> list[list[int]]:
        import torch

        width, longest = max(len(prompt) for prompt, _ in batch), max(new for _, new in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest)
        if out.shape[1] != width + longest:
            raise RuntimeError(f"generate made {out.shape[1] - width} tokens, not {longest}")
        return [out[row, width : width + new].tolist() for row, (_, new) in enumerate(batch)]


class _Engine:
    """The archive's engine, without a handler and without HTTP: the next request is sent when one is answered."""

    def __init__(self, directory: str, dtype: str, settings: dict[str, Any], slots: int) -> None:
        from handlers.generation.continuous import ContinuousEngine
        from handlers.generation.settings import GenerationConfig

        config = GenerationConfig.from_mapping({**settings, "dtype": dtype})
        self.engine = ContinuousEngine(Path(directory), config, None, slots)
        self.sent = 0

    def run(self, requests: list[Any], at_once: int) -> dict[str, Any]:
        from handlers.generation.engine import Sampling, Sequence

        waiting = list(enumerate(requests))[::-1]
        running: dict[str, tuple[int, float]] = {}
        firsts, latencies = [0.0] * len(requests), [0.0] * len(requests)
        tokens: list[list[int]] = [[] for _ in requests]

        def send() -> None:
            number, (prompt, new) = waiting.pop()
            self.sent += 1
            running[str(self.sent)] = number, time.perf_counter()
            self.engine.submit(Sequence(str(self.sent), tuple(prompt), new, Sampling(temperature=0.0)))

        start = time.perf_counter()
        while running or waiting:
            while waiting and len(running) < at_once:
                send()
            for output in self.engine.collect(WAIT_S):
                if output.error is not None:
                    raise RuntimeError(output.error.message)
                number, sent = running[output.id]
                since = time.perf_counter() - sent
                if output.tokens and not tokens[number]:
                    firsts[number] = since
                tokens[number] += [token.id for token in output.tokens]
                if output.finish is not None:
                    latencies[number] = since
                    del running[output.id]
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "first_s": firsts, "latency_s": latencies, "tokens": tokens}


class _Vllm:
    """vLLM's asynchronous engine as it comes: the next request is sent when one is answered."""

    def __init__(self, directory: str, dtype: str, settings: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        options: dict[str, Any] = {"model": directory, "dtype": dtype, "disable_log_stats": True}
        if current_platform.is_cpu():
            options["kv_cache_memory_bytes"] = int((settings.get("cache_gib") or VLLM_CACHE_GIB) * 2**30)
        if settings.get("max_model_len"):
            options["max_model_len"] = settings["max_model_len"]
        self.loop = asyncio.new_event_loop()
        self.sent = 0

        async def make() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

        self.llm = self.loop.run_until_complete(make())

    def run(self, requests: list[Any], at_once: int) -> dict[str, Any]:
        return self.loop.run_until_complete(self._run(requests, at_once))

    async def _run(self, requests: list[Any], at_once: int) -> dict[str, Any]:
        waiting = iter(enumerate(requests))
        firsts, latencies = [0.0] * len(requests), [0.0] * len(requests)
        tokens: list[list[int]] = [[] for _ in requests]

        async def client() -> None:
            for number, (prompt, new) in waiting:
                sent = time.perf_counter()
                async for found in self._tokens(prompt, new):
                    if not tokens[number]:
                        firsts[number] = time.perf_counter() - sent
                    tokens[number] += found
                latencies[number] = time.perf_counter() - sent

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(at_once)))
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "first_s": firsts, "latency_s": latencies, "tokens": tokens}

    async def _tokens(self, prompt: list[int], new: int) -> AsyncIterator[list[int]]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self.sent += 1
        asked = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        async for found in self.llm.generate(tokens_input(prompt), asked, str(self.sent)):
            yield list(found.outputs[0].token_ids)


def _child(directory: str, dtype: str, threads: str, kind: str, settings: str, slots: str) -> None:
    def prepare() -> Any:
        import torch

        torch.set_num_threads(int(threads))
        side: Any
        if kind == STATIC:
            side = _Static(directory, dtype)
        elif kind == VLLM:
            side = _Vllm(directory, dtype, json.loads(settings))
        else:
            sys.path.insert(0, str(Path(directory).parent))  # the archive's own handlers
            sharing = {"prefix_sharing": False} if kind == UNSHARED else {}
            side = _Engine(directory, dtype, {**json.loads(settings), **sharing}, int(slots))
        side.run([[[0] * 16, 4]] * int(slots), int(slots))
        return lambda question: side.run(question["requests"], question["at_once"])

    serve(prepare)


if __name__ == "__main__":
    _child(*sys.argv[1:])
