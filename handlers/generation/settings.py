"""The `handler:` section of a generation archive, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from handlers.config import DTYPES, ConfigError, Section

ENGINES = ("transformers", "vllm")
# vLLM's options that have a key of their own here, and that key
_OWN = {
    "model": "model",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_batch_tokens",
    "trust_remote_code": "trust_remote_code",
    "enable_prefix_caching": "prefix_sharing",
}


@dataclass(frozen=True)
class GenerationConfig(Section):
    """What a generation archive says of its model. Every field is a key of `handler:`.

    Args:
        task: `generation`.
        model: directory of the model's files inside the archive.
        engine: `transformers`, or `vllm` where that is installed.
        engine_options: what the vLLM engine is given as it is (`tensor_parallel_size`, `speculative_config` …).
        dtype: `auto` is the model's own half precision on CUDA and float32 on a CPU; or the name of a torch dtype.
        max_model_len: most tokens of a prompt and its answer; None takes what the model and the cache allow.
        max_batch_tokens: tokens that one step computes: a longer prompt is read in pieces beside running answers.
        page_size: tokens in a cache block.
        num_blocks: cache blocks; None takes what fits into cache_gib.
        cache_gib: memory for the cache; None takes most of what is free on a GPU, and 2 GiB on a CPU.
        prefix_sharing: prompts that begin alike share the blocks of their beginning.
        threads: intra-op threads; None takes the machine's cores, or what vLLM takes, whose workers get so many each.
        max_response_bytes: TorchServe's `max_response_size`; a larger answer would kill the worker.
        trust_remote_code: whether code in the model's directory may run; only ever set by the builder on request.
        profile: TorchServe's own switch for its `timed` decorator.
    """

    task: str
    model: str = "model"
    engine: str = "transformers"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    page_size: int | None = None
    num_blocks: int | None = None
    cache_gib: float | None = None
    prefix_sharing: bool = True
    threads: int | None = None
    max_response_bytes: int = 6_553_500
    trust_remote_code: bool = False
    profile: bool = False

    def _check(self) -> None:
        if self.task != "generation":
            raise ConfigError(f"handler: task is {self.task!r}; this handler is for 'generation'")
        for key, allowed in (("dtype", DTYPES), ("engine", ENGINES)):
            self._one_of(key, allowed)
        self._at_least_one(
            "max_model_len", "max_batch_tokens", "page_size", "num_blocks", "threads", "max_response_bytes"
        )
        if self.cache_gib is not None and not 0 < self.cache_gib < float("inf"):
            raise ConfigError(f"handler: cache_gib is {self.cache_gib}; it must be a number above 0")
        if self.num_blocks is not None and self.cache_gib is not None:
            raise ConfigError("handler: num_blocks and cache_gib both size the cache; give one")
        if self.engine_options and self.engine != "vllm":
            raise ConfigError(
                "handler: engine_options are for engine: vllm; the transformers engine has keys of its own"
            )
        if self.engine == "vllm":
            for key in ("page_size", "num_blocks", "cache_gib"):
                if getattr(self, key) is not None:
                    raise ConfigError(
                        f"handler: {key} is the transformers engine's; vLLM's are given in engine_options"
                    )
            for option, key in _OWN.items():
                if option in self.engine_options:
                    raise ConfigError(f"handler: {option} in engine_options is the key {key!r} of the handler section")
        if self.model.startswith("/") or ".." in self.model.split("/"):
            raise ConfigError("handler: model is a path inside the archive")
