"""The engine on vLLM's AsyncLLM, where vllm is installed: its event loop runs in a thread of ours, its engine in
processes of its own.

Texts, stop strings and answers stay ours, so a client sees no difference; sampling, the cache and the schedule are
vLLM's. What the archive's `engine_options` say goes to vLLM as it is: `tensor_parallel_size`, `speculative_config`,
`gpu_memory_utilization` and the rest of its AsyncEngineArgs.
"""

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from handlers.config import ConfigError
from handlers.errors import Overloaded, RequestError, nearest
from handlers.generation.engine import Engine, EngineDead, EngineFailure, Output, Sequence, Stats, Token
from handlers.generation.settings import GenerationConfig
from handlers.generation.sizing import CPU_BUDGET_GIB, Sizes
from handlers.generation.vllm_guard import Guard, running

logger = logging.getLogger(__name__)

START_SECONDS = 900.0  # compiling and capturing graphs may take long
STOP_SECONDS = 5.0
SMALLEST_TOP_P = 1e-6  # vLLM has no 0, which leaves the most probable token
LARGEST_SEED = 2**63 - 1  # vLLM takes -1 for none
MILLISECONDS_PER_LEVEL = 5000  # of waiting that make up for one level of priority, as in the other engine
# Options by which the cache of a CPU is sized; where none is given, it gets what the other engine's gets.
_CACHE = ("kv_cache_memory_bytes", "gpu_memory_utilization")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "device_ids")


class VllmEngine(Engine):
    """See the module.

    Args:
        directory: the model's files.
        config: the archive's handler section.
        gpu_id: the CUDA device that TorchServe assigned; unless engine_options name devices, it is the one used.

    Raises:
        ConfigError: vLLM refuses its options, or does not start with them.
    """

    def __init__(self, directory: Path, config: GenerationConfig, gpu_id: int | None = None) -> None:
        self._arguments = _arguments(directory, config, gpu_id)
        self._threads = config.threads
        self._changed = threading.Condition()
        self._renewal = threading.Lock()
        self._open: set[str] = set()
        self._news: list[Output] = []
        self._fresh: list[Output] = []  # of this round of the loop
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._counts = _Counts()
        self._before = Stats()  # counted by engines that have died
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._llm, self._guard = self._make()
        found = self._llm.vllm_config
        self.max_model_len = int(found.model_config.max_model_len)
        self.vocabulary = int(found.model_config.get_vocab_size())
        atexit.register(self.stop)

    # The interface

    def submit(self, sequence: Sequence) -> None:
        """See Engine.submit."""
        with self._renewal:
            if self._llm.errored:
                self._rebuild()
        with self._changed:
            self._open.add(sequence.id)
        self._loop.call_soon_threadsafe(self._begin, sequence)

    def collect(self, timeout: float) -> list[Output]:
        """See Engine.collect."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._news), timeout)
            news, self._news = self._news, []
        return news

    def cancel(self, id: str) -> None:
        """See Engine.cancel."""
        with self._changed:
            self._open.discard(id)
            self._news = [output for output in self._news if output.id != id]
        self._loop.call_soon_threadsafe(self._end, id)

    def stats(self) -> Stats:
        """See Engine.stats."""
        with self._changed:
            held = len(self._open | self._tasks.keys())
            now, before = self._counts.stats, self._before
            # vLLM tells after a step, so it knows nothing of what came since, nor that all have gone
            active = min(now.running, held)
            return replace(
                now,
                running=active,
                waiting=held - active,
                used_blocks=now.used_blocks if held else 0,
                preemptions=now.preemptions + before.preemptions,
                prefix_tokens=now.prefix_tokens + before.prefix_tokens,
                rebuilds=before.rebuilds,
            )

    def stop(self) -> None:
        """See Engine.stop."""
        atexit.unregister(self.stop)
        self._guard.release()
        self._llm.shutdown(timeout=STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def card(self) -> dict[str, Any]:
        """See Engine.card."""
        found = self._llm.vllm_config
        schedule = found.scheduler_config
        a_token_each = min(schedule.max_num_batched_tokens, schedule.max_num_seqs)
        sizes = Sizes(found.cache_config.block_size, self._counts.stats.blocks, self.max_model_len, a_token_each)
        return {
            "engine": "vllm",
            "dtype": str(found.model_config.dtype).removeprefix("torch."),
            "device": current_platform.device_type,
            "max_model_len": self.max_model_len,
            "max_batch_tokens": schedule.max_num_batched_tokens,
            "page_size": sizes.page_size,
            "blocks": sizes.blocks,
            "cache_tokens": sizes.tokens,
            "longest_at_once": sizes.longest_at_once,
            "suits": {"batch_size": sizes.batch_size, "queue": sizes.queue},
        }

    # vLLM's life

    def _make(self) -> tuple[Any, Guard]:
        unknown = next((key for key in self._arguments if key not in _known()), None)
        if unknown is not None:
            near = nearest(unknown, _known())
            meant = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"handler: engine_options: vLLM has no option {unknown!r}{meant}")
        # unless told not to, vLLM reports its use to its makers, and its processes look for files on the hub
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if self._threads is not None:
            os.environ.update(OMP_NUM_THREADS=str(self._threads), VLLM_CPU_OMP_THREADS_BIND="nobind")
        others = running()
        try:
            llm = self._in_loop(self._start(), START_SECONDS)
        except Exception as error:
            raise ConfigError(f"handler: engine_options: vLLM does not start with them: {_said(error)}") from error
        return llm, Guard(others)

    async def _start(self) -> Any:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments), stat_loggers=[self._counts.follow])
        # what it cannot compute, it finds out by the first request, which kills it
        try:
            async for _ in llm.generate(tokens_input([0]), SamplingParams(max_tokens=1, detokenize=False), "first"):
                pass
        except Exception:
            llm.shutdown()
            raise
        return llm

    def _rebuild(self) -> None:
        logger.error("vLLM's engine has died: a new one is made")
        with self._changed:  # in one: what moves to the sum must not be counted beside it
            self._before = replace(self.stats(), rebuilds=self._before.rebuilds + 1)
            self._counts = _Counts()
        self._guard.release()
        self._llm.shutdown(timeout=STOP_SECONDS)
        try:
            self._llm, self._guard = self._make()
        except ConfigError as error:
            logger.error("No new engine can be made: %s", error)
            raise EngineDead("the engine failed and could not be replaced") from error

    def _in_loop(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    # In the loop

    def _begin(self, sequence: Sequence) -> None:
        with self._changed:
            if sequence.id not in self._open:
                return  # cancelled meanwhile
            task = self._tasks[sequence.id] = self._loop.create_task(self._run(sequence))
        task.add_done_callback(lambda _: self._gone(sequence.id))

    def _gone(self, id: str) -> None:
        with self._changed:
            del self._tasks[id]

    def _end(self, id: str) -> None:
        task = self._tasks.get(id)
        if task is not None:
            task.cancel()

    async def _run(self, sequence: Sequence) -> None:
        """Bring a sequence's outputs to whoever collects."""
        llm = self._llm
        try:
            stream = llm.generate(
                tokens_input(list(sequence.prompt)),
                _parameters(sequence, self.vocabulary),
                request_id=sequence.id,
                priority=_rank(sequence.priority),
            )
            async for found in stream:
                part = found.outputs[0]
                tokens = tuple(
                    _token(id, part.logprobs[place] if part.logprobs else None, sequence.sampling.logprobs)
                    for place, id in enumerate(part.token_ids)
                )
                self._put(_output(sequence.id, tokens, part.finish_reason))
        except asyncio.CancelledError:
            # generate() aborts what it has begun, but not what a cancellation meets on its way to the engine
            await llm.abort(sequence.id)
        except (VLLMClientError, ValueError) as error:
            self._put(Output(sequence.id, error=RequestError(f"vLLM refuses this: {error}", code="engine_refused")))
        except GracefulHTTPError:
            self._put(Output(sequence.id, error=Overloaded("vLLM's queue is full; try again.")))
        except Exception as error:  # noqa: BLE001 - whatever it is, this request has failed and its client is told
            logger.error("vLLM failed on a request: %s", type(error).__name__)
            self._put(Output(sequence.id, error=_failure()))

    def _put(self, output: Output) -> None:
        """Hand an output over together with those of the same step."""
        if not self._fresh:
            self._loop.call_soon(self._deliver)
        self._fresh.append(output)

    def _deliver(self) -> None:
        fresh, self._fresh = self._fresh, []
        with self._changed:
            for output in fresh:
                if output.id in self._open:
                    self._news.append(output)
                    if output.finish is not None or output.error is not None:
                        self._open.discard(output.id)
            self._changed.notify()


class _Counts:
    """What vLLM says of itself after each step, of all its engines (there are several with data parallelism)."""

    def __init__(self) -> None:
        self._each: dict[int, Stats] = {}

    @property
    def stats(self) -> Stats:
        """The sum."""
        each = list(self._each.values())
        return Stats(**{field.name: sum(getattr(stats, field.name) for stats in each) for field in fields(Stats)})

    def follow(self, config: Any, engine: int = 0) -> StatLoggerBase:
        """What vLLM is given, to tell it."""
        self._each[engine] = Stats()
        return _Teller(self._each, config, engine)


class _Teller(StatLoggerBase):
    def __init__(self, each: dict[int, Stats], vllm_config: Any, engine_index: int = 0) -> None:
        self._each, self._config, self._engine = each, vllm_config, engine_index

    def log_engine_initialized(self) -> None:
        """The cache has its size by now."""
        self._each[self._engine] = Stats(blocks=self._config.cache_config.num_gpu_blocks or 0)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Called in vLLM's loop after each step."""
        stats = self._each[self._engine]
        if iteration_stats is not None:
            stats = replace(stats, preemptions=stats.preemptions + iteration_stats.num_preempted_reqs)
        if scheduler_stats is not None:
            stats = replace(
                stats,
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs,
                used_blocks=round(scheduler_stats.kv_cache_usage * max(0, stats.blocks - 1)),  # one is never given out
                prefix_tokens=stats.prefix_tokens + scheduler_stats.prefix_cache_stats.hits,
            )
        self._each[self._engine] = stats


def _known() -> list[str]:
    return [field.name for field in fields(AsyncEngineArgs)]


def _arguments(directory: Path, config: GenerationConfig, gpu_id: int | None) -> dict[str, Any]:
    """AsyncEngineArgs of an archive."""
    options = dict(config.engine_options)
    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        **options,
        "model": str(directory),
        # vLLM's own `auto` would halve float32 on a CPU too
        "dtype": "float32" if config.dtype == "auto" and on_cpu else config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "enable_prefix_caching": config.prefix_sharing,
    }
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if config.max_batch_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_batch_tokens
    if on_cpu and not any(key in options for key in _CACHE):
        arguments["kv_cache_memory_bytes"] = int(CPU_BUDGET_GIB * 2**30)
    if gpu_id is not None and not on_cpu and not any(key in options for key in _PARALLEL):
        arguments["device_ids"] = [gpu_id]
    return arguments


def _said(error: Exception) -> str:
    """Why vLLM does not start, in a line: pydantic's list is made one, and names the options."""
    listed = getattr(error, "errors", None)
    if callable(listed):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ") for each in listed())
    return " ".join(str(error).split()) or type(error).__name__


def _failure() -> EngineFailure:
    return EngineFailure("The engine failed while it ran this request; try again.")


def _rank(priority: int) -> int:
    """vLLM lets the lowest number go first, for ever; with the time of arrival in it nobody waits for ever."""
    return priority * MILLISECONDS_PER_LEVEL + int(time.monotonic() * 1000)


def _output(id: str, tokens: tuple[Token, ...], reason: str | None) -> Output:
    """What vLLM says of a sequence, in our words; what neither stopped nor got long was aborted."""
    if reason is None:
        return Output(id, tokens)
    if reason == "stop":
        return Output(id, tokens, "stop")
    return Output(id, tokens, "length") if reason == "length" else Output(id, tokens, error=_failure())


def _parameters(sequence: Sequence, vocabulary: int) -> Any:
    sampling = sequence.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=max(sampling.top_p, SMALLEST_TOP_P),
        top_k=min(sampling.top_k, vocabulary),
        seed=None if sampling.seed is None else sampling.seed & LARGEST_SEED,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        # where nothing ends a text, vLLM would still keep the model's own end away
        min_tokens=min(sampling.min_tokens, sequence.max_tokens) if sequence.end else 0,
        max_tokens=sequence.max_tokens,
        logprobs=sampling.logprobs,
        stop_token_ids=sorted(sequence.end),
        ignore_eos=True,  # the ends are given above
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _token(id: int, found: Mapping[int, Any] | None, count: int | None) -> Token:
    """A token with its log-probabilities: vLLM gives the `count` best, and the token's own where it is none of them."""
    if found is None or count is None:
        return Token(id)
    best = sorted(found.items(), key=lambda pair: -pair[1].logprob)[:count]
    return Token(id, found[id].logprob, tuple((token, value.logprob) for token, value in best))
