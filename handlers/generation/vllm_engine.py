"""The engine on vLLM's AsyncLLM, where vllm is installed: its event loop runs in a thread of ours.

Texts, stop strings and answers stay ours, so a client sees no difference; sampling, the cache and the schedule are
vLLM's. What the archive's `engine_options` say goes to vLLM as it is: `tensor_parallel_size`, `speculative_config`,
`gpu_memory_utilization` and the rest of its AsyncEngineArgs.
"""

import asyncio
import atexit
import logging
import threading
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from handlers.config import ConfigError
from handlers.generation.engine import Engine, EngineDead, EngineFailure, Output, Sequence, Stats, Token
from handlers.generation.settings import GenerationConfig

logger = logging.getLogger(__name__)

START_SECONDS = 900.0  # compiling and capturing graphs may take long
STOP_SECONDS = 10.0
SMALLEST_TOP_P = 1e-6  # vLLM has no 0, which leaves the most probable token
# What the archive says elsewhere, or what the engine decides.
_OURS = ("model", "dtype", "max_model_len", "max_num_batched_tokens", "trust_remote_code", "enable_prefix_caching")


class VllmEngine(Engine):
    """See the module.

    Args:
        directory: the model's files.
        config: the archive's handler section.
    """

    def __init__(self, directory: Path, config: GenerationConfig) -> None:
        for key in _OURS:
            if key in config.engine_options:
                raise ConfigError(f"handler: {key} in engine_options has a key of its own in the handler section")
        self._arguments: dict[str, Any] = {
            "scheduling_policy": "priority",
            "disable_log_stats": True,
            **config.engine_options,
            "model": str(directory),
            "dtype": config.dtype,
            "trust_remote_code": config.trust_remote_code,
            "enable_prefix_caching": config.prefix_sharing,
        }
        if config.max_model_len is not None:
            self._arguments["max_model_len"] = config.max_model_len
        if config.max_batch_tokens is not None:
            self._arguments["max_num_batched_tokens"] = config.max_batch_tokens
        described = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        self.vocabulary = int(described.get_text_config().vocab_size)
        self._changed = threading.Condition(threading.RLock())
        self._news: list[Output] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()
        self._rebuilds = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._llm: Any = self._in_loop(self._make(), START_SECONDS)
        self.max_model_len = int(self._llm.model_config.max_model_len)
        atexit.register(self.stop)

    def submit(self, sequence: Sequence) -> None:
        """See Engine.submit."""
        with self._changed:
            if self._llm.errored:
                self._rebuild()
        self._in_loop(self._begin(sequence), STOP_SECONDS)

    def collect(self, timeout: float) -> list[Output]:
        """See Engine.collect."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._news), timeout)
            news, self._news = self._news, []
        return news

    def cancel(self, id: str) -> None:
        """See Engine.cancel."""
        with self._changed:
            task = self._tasks.pop(id, None)
            self._begun.discard(id)
            self._news = [output for output in self._news if output.id != id]
        if task is not None:
            # generate() aborts its request when it is cancelled
            self._loop.call_soon_threadsafe(task.cancel)

    def stats(self) -> Stats:
        """See Engine.stats."""
        with self._changed:
            running = len(self._begun)
            return Stats(running=running, waiting=len(self._tasks) - running, rebuilds=self._rebuilds)

    def stop(self) -> None:
        """See Engine.stop."""
        atexit.unregister(self.stop)
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def card(self) -> dict[str, Any]:
        """See Engine.card."""
        config = self._llm.model_config
        return {
            "engine": "vllm",
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
        }

    # In the loop

    def _in_loop(self, coroutine: Any, seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    async def _make(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            arguments = AsyncEngineArgs(**self._arguments)
        except TypeError as error:  # names the argument
            raise ConfigError(f"handler: engine_options: {error}") from None
        return AsyncLLM.from_engine_args(arguments)

    def _rebuild(self) -> None:
        logger.error("vLLM's engine has died: a new one is made")
        self._llm.shutdown()
        try:
            self._llm = self._in_loop(self._make(), START_SECONDS)
        except Exception as error:
            logger.error("No new engine can be made: %s", type(error).__name__)
            raise EngineDead("the engine failed and could not be replaced") from error
        self._rebuilds += 1

    async def _begin(self, sequence: Sequence) -> None:
        self._tasks[sequence.id] = asyncio.get_running_loop().create_task(self._run(sequence))

    async def _run(self, sequence: Sequence) -> None:
        """Bring a sequence's outputs to whoever collects."""
        try:
            stream = self._llm.generate(
                {"prompt_token_ids": list(sequence.prompt)},
                _parameters(sequence),
                request_id=sequence.id,
                priority=sequence.priority,
            )
            async for found in stream:
                part = found.outputs[0]
                tokens = tuple(
                    _token(id, part.logprobs[place] if part.logprobs else None, sequence.sampling.logprobs)
                    for place, id in enumerate(part.token_ids)
                )
                self._put(_output(sequence.id, tokens, part.finish_reason))
        except Exception as error:  # noqa: BLE001 - whatever it is, this request has failed and its client is told
            logger.error("vLLM failed on a request: %s", type(error).__name__)
            self._put(Output(sequence.id, error=_failure()))

    def _put(self, output: Output) -> None:
        with self._changed:
            if output.id not in self._tasks:
                return
            if output.finish is not None or output.error is not None:
                del self._tasks[output.id]
                self._begun.discard(output.id)
            else:
                self._begun.add(output.id)
            self._news.append(output)
            self._changed.notify()


def _failure() -> EngineFailure:
    return EngineFailure("The engine failed while it ran this request; try again.")


def _output(id: str, tokens: tuple[Token, ...], reason: str | None) -> Output:
    """What vLLM says of a sequence, in our words; what neither stopped nor got long was aborted."""
    if reason is None:
        return Output(id, tokens)
    if reason == "stop":
        return Output(id, tokens, "stop")
    return Output(id, tokens, "length") if reason == "length" else Output(id, tokens, error=_failure())


def _parameters(sequence: Sequence) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = sequence.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=max(sampling.top_p, SMALLEST_TOP_P),
        top_k=sampling.top_k,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        min_tokens=sampling.min_tokens,
        max_tokens=sequence.max_tokens,
        logprobs=sampling.logprobs,
        stop_token_ids=sorted(sequence.end),
        ignore_eos=True,  # the ends are given above
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _token(id: int, found: Any, count: int | None) -> Token:
    """A token with its log-probabilities: vLLM gives the `count` best, and the token's own where it is none of them."""
    if found is None or count is None:
        return Token(id)
    best = sorted(found.items(), key=lambda pair: -pair[1].logprob)[:count]
    return Token(id, found[id].logprob, tuple((token, value.logprob) for token, value in best))
