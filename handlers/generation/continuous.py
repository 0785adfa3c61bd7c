"""The engine on transformers' continuous batching: a paged cache, shared beginnings, prompts in pieces, preemption.

The manager's thread computes; what it brings is put into a list under a lock, and whoever collects is woken. When that
thread dies, everything that ran is told so, and the next sequence finds a new manager on the same network.
"""

import atexit
import logging
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from handlers import memory
from handlers.config import ConfigError, resolve_dtype
from handlers.errors import ModelFailure
from handlers.generation import attention
from handlers.generation.cache_reader import CacheReader
from handlers.generation.engine import Engine, EngineDead, EngineFailure, Output, Sampling, Sequence, Stats, Token
from handlers.generation.linear import pack_linears
from handlers.generation.sampler import Chain, next_tokens
from handlers.generation.scheduler import NAME as SCHEDULER
from handlers.generation.scheduler import Manager
from handlers.generation.settings import GenerationConfig
from handlers.generation.sizing import CPU_BUDGET_GIB, Geometry, Sizes, sizes
from handlers.threads import apart

logger = logging.getLogger(__name__)

GPU_SHARE = 0.8  # of the free memory that the cache takes
PACKED_SHARE = 0.25  # of the free memory that packed weights may take
STEP_ROWS = 256  # sequences that one step computes at most: each needs a row of logits
STOP_SECONDS = 5.0


class ContinuousEngine(Engine):
    """See the module.

    Args:
        directory: the model's files.
        config: the archive's handler section.
        gpu_id: the CUDA device that TorchServe assigned; None for the CPU.
        slots: requests that TorchServe hands over at once.

    Attributes:
        sizes: the cache's and the steps'.
    """

    def __init__(self, directory: Path, config: GenerationConfig, gpu_id: int | None, slots: int) -> None:
        on_gpu = gpu_id is not None and torch.cuda.is_available()
        device = "cuda" if on_gpu else "cpu"
        if not on_gpu:
            memory.keep_freed()
        self.model, self._packed = apart(lambda: _load(directory, config, gpu_id if on_gpu else None))
        text_config = self.model.config.get_text_config()
        self.vocabulary: int = text_config.vocab_size
        self.sizes: Sizes = sizes(
            _geometry(text_config, self.model.dtype),
            device,
            _budget(config, self.model.device),
            page_size=config.page_size,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            max_batch_tokens=config.max_batch_tokens,
            slots=slots,
        )
        self.max_model_len = self.sizes.max_model_len
        self._cache = ContinuousBatchingConfig(
            page_size=self.sizes.page_size,
            num_blocks=self.sizes.blocks,
            max_batch_tokens=self.sizes.max_batch_tokens,
            max_requests_per_batch=min(STEP_ROWS, self.sizes.max_batch_tokens),
            allow_block_sharing=config.prefix_sharing,
            scheduler_type=SCHEDULER,
            # the sampler looks at the token before: no step may start before the last one's tokens are known
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=device == "cuda",
            max_memory_percent=1.0,
        )
        self._chains: dict[str, Chain] = {}
        self._fresh: dict[str, list[Token]] = {}
        self._news: list[Output] = []
        self._changed = threading.Condition(threading.RLock())
        self._stats = Stats(blocks=self.sizes.blocks)
        self._counted = Stats()  # by managers that have failed
        self._manager = apart(self._start)
        atexit.register(self.stop)
        self._try()

    # The interface

    def submit(self, sequence: Sequence) -> None:
        """See Engine.submit."""
        with self._changed:
            if self._manager.failed:
                self._rebuild()
            self._chains[sequence.id] = Chain(sequence)
            self._fresh[sequence.id] = []
            self._manager.submit(sequence)

    def collect(self, timeout: float) -> list[Output]:
        """See Engine.collect."""
        with self._changed:
            self._changed.wait_for(lambda: self._news or (self._chains and self._manager.failed), timeout)
            if self._manager.failed and self._chains:
                # a thread that died without a word, or while a sequence was handed over
                self._news += [Output(id, error=_failure()) for id in self._chains]
                for id in list(self._chains):
                    self._forget(id)
            news, self._news = self._news, []
        return news

    def cancel(self, id: str) -> None:
        """See Engine.cancel."""
        with self._changed:
            known = id in self._chains
            self._forget(id)
            self._news = [output for output in self._news if output.id != id]
            if known:
                self._manager.cancel_request(id)

    def stats(self) -> Stats:
        """See Engine.stats."""
        with self._changed:
            now, before = self._stats, self._counted
            return replace(
                now,
                preemptions=now.preemptions + before.preemptions,
                prefix_tokens=now.prefix_tokens + before.prefix_tokens,
                rebuilds=before.rebuilds,
            )

    def stop(self) -> None:
        """See Engine.stop."""
        atexit.unregister(self.stop)
        self._manager.end(STOP_SECONDS)

    def card(self) -> dict[str, Any]:
        """See Engine.card."""
        return {
            "engine": "transformers",
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "attention": self.model.config._attn_implementation,
            "packed_weights_mib": round(self._packed / 2**20),
            "max_model_len": self.sizes.max_model_len,
            "max_batch_tokens": self.sizes.max_batch_tokens,
            "page_size": self.sizes.page_size,
            "blocks": self.sizes.blocks,
            "cache_tokens": self.sizes.tokens,
            "longest_at_once": self.sizes.longest_at_once,
            "suits": {"batch_size": self.sizes.batch_size, "queue": self.sizes.queue},
        }

    # The manager's life

    def _try(self) -> None:
        """Generate a little: a prompt, a step that reads the cache, and one more when it is known how it is best read.

        Raises:
            ConfigError: the engine died of it, as it would of any request.
        """
        prompt = (0,) * min(3, self.max_model_len - 1)
        self.submit(Sequence("trial", prompt, min(3, self.max_model_len - len(prompt)), Sampling(temperature=0)))
        ended: Output | None = None
        while ended is None:
            ended = next((output for output in self.collect(1.0) if output.error or output.finish), None)
        if self._manager.failed:
            self.stop()
            cause = self._manager.cause
            raise ConfigError(
                f"transformers' continuous batching cannot run {self.model.config.model_type} models "
                f"({type(cause).__name__}: {cause}); where vLLM is installed, engine: vllm may"
            ) from cause
        if ended.error is not None:
            logger.warning("The first tokens of the vocabulary are answered with: %s", ended.error)

    def _start(self) -> Manager:
        if self.model.config._attn_implementation == attention.NAME:
            self.model.set_attn_implementation("sdpa")  # the manager accepts no name of ours
        manager = Manager(self.model, self._cache, self._choose, self._deliver, self._look)
        if self.model.device.type == "cpu" and self.model.config._attn_implementation == "sdpa":
            attention.register()
            self.model.set_attn_implementation(attention.NAME)
        manager.batch_processor = manager._create_batch_processor()
        if self.model.config._attn_implementation == attention.NAME:
            runner, reader = manager.batch_processor.model_runner, CacheReader(manager.batch_processor.cache)
            runner.compute_batch = reader.arranging(runner.compute_batch)
        most = infer_max_single_request_tokens(manager.batch_processor.cache)
        if most < self.max_model_len:  # layers of several kinds share the cache
            logger.warning("The cache holds sequences of %d tokens, not %d", most, self.max_model_len)
            self.max_model_len = most
            self.sizes = replace(self.sizes, max_model_len=most)
        manager.start()
        return manager

    def _rebuild(self) -> None:
        """Replace the manager; called under the lock."""
        logger.error("The generation thread has ended: a new one is made")
        self._counted = replace(self.stats(), rebuilds=self._counted.rebuilds + 1)
        for id in list(self._chains):
            self._news.append(Output(id, error=_failure()))
            self._forget(id)
        self._manager.forget()  # the new one needs its cache's memory
        memory.release()
        try:
            self._manager = apart(self._start)
        except Exception as error:
            logger.error("No new engine can be made: %s\n%s", type(error).__name__, _trace(error))
            # Only a new process can help; TorchServe starts one when this one ends.
            raise EngineDead("the engine failed and could not be replaced") from error
        self._stats = Stats(blocks=self.sizes.blocks)

    def _forget(self, id: str) -> None:
        self._chains.pop(id, None)
        self._fresh.pop(id, None)

    # In the generation thread

    def _choose(self, logits: Tensor, ids: list[str]) -> list[int]:
        with self._changed:
            chains = [self._chains.get(id) for id in ids]
        rows = [row for row, chain in enumerate(chains) if chain is not None]
        tokens: list[Token | None] = [Token(0)] * len(ids)  # a cancelled one's token is looked at by nobody
        present = [chain for chain in chains if chain is not None]
        chosen = next_tokens(logits if len(rows) == len(ids) else logits[rows], present)
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
        with self._changed:
            for id, token in zip(ids, tokens, strict=True):
                if id not in self._chains:
                    continue
                if token is None:
                    self._forget(id)
                    self._manager.cancel_request(id)
                    self._news.append(Output(id, error=ModelFailure("The model's output is not finite for this text.")))
                else:
                    self._fresh[id].append(token)
        return [0 if token is None else token.id for token in tokens]

    def _deliver(self, output: GenerationOutput) -> None:
        with self._changed:
            id = output.request_id
            chain = self._chains.get(id)
            if chain is None:
                return
            tokens = tuple(self._fresh[id])
            self._fresh[id].clear()
            if output.status == RequestStatus.FAILED:
                self._news.append(Output(id, tokens, error=_failure()))
                self._forget(id)
            elif output.is_finished():
                last = tokens[-1].id if tokens else None
                self._news.append(Output(id, tokens, "stop" if last in chain.sequence.end else "length"))
                self._forget(id)
            else:
                self._news.append(Output(id, tokens))

    def _look(self, manager: Manager) -> None:
        """Take the stats where nothing changes meanwhile."""
        processor = manager.batch_processor
        if processor is None or manager is not self._manager:
            return
        scheduler, cache = processor.scheduler, processor.cache
        held = sum(
            len({block for table in allocator.block_table.values() for block in table})
            for allocator in cache.cache_allocators.values()
        )
        stats = Stats(
            running=len(scheduler.active_requests),
            waiting=len(scheduler.waiting_requests) + manager.input_queue.qsize(),
            used_blocks=held,
            blocks=self.sizes.blocks,
            preemptions=scheduler.preemptions,
            prefix_tokens=scheduler.prefix_tokens,
        )
        with self._changed:
            for id in manager.tickets.keys() - self._chains.keys():
                if id not in scheduler.active_requests and id not in scheduler.waiting_requests:
                    del manager.tickets[id]
            self._stats = stats
            if self._news:
                self._changed.notify()


def _load(directory: Path, config: GenerationConfig, gpu_id: int | None) -> tuple[Any, int]:
    """The network where it will compute, and the bytes that its weights' own layouts take."""
    trust = config.trust_remote_code
    described = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust)
    on_gpu = gpu_id is not None
    device = torch.device("cpu" if gpu_id is None else f"cuda:{gpu_id}")
    requested = config.dtype
    if requested == "auto" and on_gpu:
        own = str(getattr(described, "dtype", None) or "").removeprefix("torch.")
        requested = own if own in ("float16", "bfloat16") else "auto"
    bf16 = not on_gpu or torch.cuda.is_bf16_supported()
    name = resolve_dtype(requested, device.type, described.model_type, bf16_on_device=bf16)
    if not on_gpu and name == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning("This CPU has no bfloat16 instructions: bfloat16 is slower here than float32")
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, name), local_files_only=True, use_safetensors=True, trust_remote_code=trust
    )
    model = model.to(device).eval()
    if on_gpu:
        return model, 0
    packed = pack_linears(model, _room())
    memory.trim()
    return model, packed


def _geometry(config: Any, dtype: torch.dtype) -> Geometry:
    heads = config.num_attention_heads
    return Geometry(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        bytes_per_value=dtype.itemsize,
        positions=getattr(config, "max_position_embeddings", None),
    )


def _budget(config: GenerationConfig, device: torch.device) -> int:
    """Bytes for the cache."""
    if config.cache_gib is not None:
        wanted = int(config.cache_gib * 2**30)
        if device.type == "cuda" and wanted > (free := torch.cuda.mem_get_info(device)[0]):
            raise ConfigError(f"handler: cache_gib is {config.cache_gib} and {free / 2**30:.1f} GiB are free")
        return wanted
    if device.type == "cuda":
        return int(GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(CPU_BUDGET_GIB * 2**30)


def _room() -> int:
    """Bytes that packed weights may take: the cache and the workers beside this one want memory too."""
    return int(PACKED_SHARE * memory.available())


def _failure() -> EngineFailure:
    return EngineFailure("The engine failed while it ran this request; try again.")


def _trace(error: BaseException) -> str:
    """Where an error arose; not its message, which may quote."""
    return "".join(traceback.format_tb(error.__traceback__))
