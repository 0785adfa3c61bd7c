"""The `handler:` section of model-config.yaml, checked, and the tables that need no torch."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_args

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTION = ("auto", "packed", "padded")
POOLING = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# Of torch.nn: those that a reranker's files may name, finite for finite logits
ACTIVATIONS = (
    *("Identity", "Sigmoid", "Tanh", "Softmax", "ReLU", "GELU", "SiLU"),
    *("Softplus", "Softsign", "LogSigmoid", "Hardsigmoid", "Hardtanh"),
)
SPLADE_STRATEGIES = ("max", "sum")
SPLADE_ACTIVATIONS = ("relu", "log1p_relu")

# Families whose activations are known to pass fp16's largest number (65,504).
OVERFLOWS_FP16 = frozenset({"t5", "mt5", "umt5", "longt5", "gemma", "gemma2", "gemma3", "gemma3_text"})


class ConfigError(ValueError):
    """The `handler:` section cannot be used; the message names the key and what is allowed."""


class Section:
    """What the configs of all handlers share: how a mapping becomes one, and the checks of its values."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Check `mapping` and make a config of it.

        Raises:
            ConfigError: an unknown key (the nearest known one is named), a wrong type or a value out of range.
        """
        known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # subclasses are dataclasses
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
                raise ConfigError(f"handler: unknown key {key!r}; did you mean {near[0]!r}?")
            values[key] = _checked(key, value, known[key].type)
        if "task" not in values:
            raise ConfigError("handler: the key 'task' is missing")
        config = cls(**values)
        config._check()
        return config

    def _check(self) -> None:
        """Raise ConfigError where values are out of range or do not go together."""
        raise NotImplementedError

    def _one_of(self, key: str, allowed: Sequence[str]) -> None:
        if getattr(self, key) not in allowed:
            raise ConfigError(f"handler: {key} is {getattr(self, key)!r}; allowed are {', '.join(allowed)}")

    def _at_least_one(self, *keys: str) -> None:
        for key in keys:
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"handler: {key} is {value}; it must be at least 1")


@dataclass(frozen=True)
class HandlerConfig(Section):
    """What an archive says of its model. Every field is a key of `handler:`; README explains those that users set.

    Args:
        task: which entry module the archive was built for.
        model: directory of the model's files inside the archive.
        dtype: `auto` or the name of a torch dtype, see `resolve_dtype`.
        attention: `packed` (no padding), `padded`, or `auto`: packed where the model gives equal answers that way.
        max_tokens: longest input in tokens, special tokens counted.
        max_items: most texts in one request.
        max_batch_tokens: tokens run at once; None takes the device's default.
        max_batch_items: texts run at once.
        max_new_tokens: most tokens of a text that the model writes.
        threads: intra-op threads; None follows cores ÷ workers.
        max_response_bytes: TorchServe's `max_response_size`; a larger answer would kill the worker.
        pooling: one pooling mode or several to concatenate.
        include_prompt: whether a prompt's tokens count in the pooling.
        normalize: whether vectors leave with unit length unless the request says otherwise.
        lower_case: lower-case texts before the tokenizer's own normaliser.
        prompts: prompt name → text put before the input.
        default_prompt_name: prompt used when a request names none.
        activation: of torch.nn, applied to a reranker's logits.
        calibration: file of the archive with the vectors that int8 and uint8 take their ranges from.
        splade_strategy: how a sparse embedding pools the tokens' scores of a word.
        splade_activation: what is applied to those scores.
        max_active_dims: most words of a sparse embedding, unless the request says otherwise; None keeps all.
        dense: directories, relative to `model`, of dense layers applied after pooling, in order.
        trust_remote_code: whether code in the model's directory may run; only ever set by the builder on request.
        profile: TorchServe's own switch for its `timed` decorator.
    """

    task: str
    model: str = "model"
    dtype: str = "auto"
    attention: str = "auto"
    max_tokens: int = 512
    max_items: int = 1024
    max_batch_tokens: int | None = None
    max_batch_items: int = 256
    max_new_tokens: int = 512
    threads: int | None = None
    max_response_bytes: int = 6_553_500
    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    normalize: bool = False
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    activation: str = "Identity"
    calibration: str | None = None
    splade_strategy: str = "max"
    splade_activation: str = "relu"
    max_active_dims: int | None = None
    dense: tuple[str, ...] = ()
    trust_remote_code: bool = False
    profile: bool = False

    def _check(self) -> None:
        for key, allowed in (
            ("dtype", DTYPES),
            ("attention", ATTENTION),
            ("activation", ACTIVATIONS),
            ("splade_strategy", SPLADE_STRATEGIES),
            ("splade_activation", SPLADE_ACTIVATIONS),
        ):
            self._one_of(key, allowed)
        for mode in self.pooling:
            if mode not in POOLING:
                raise ConfigError(f"handler: pooling mode {mode!r} is unknown; allowed are {', '.join(POOLING)}")
        if not self.pooling:
            raise ConfigError("handler: pooling names no mode")
        self._at_least_one("max_tokens", "max_items", "max_batch_tokens", "max_batch_items", "max_new_tokens")
        self._at_least_one("threads", "max_response_bytes", "max_active_dims")
        if self.default_prompt_name is not None and self.default_prompt_name not in self.prompts:
            raise ConfigError(f"handler: default_prompt_name {self.default_prompt_name!r} is not among the prompts")
        parts = [self.model, *self.dense, self.calibration or ""]
        if any(part.startswith("/") or ".." in part.split("/") for part in parts):
            raise ConfigError("handler: model, dense and calibration are paths inside the archive")


def _checked(key: str, value: Any, annotation: Any) -> Any:
    """`value` when it has the annotated type. Lists become tuples, one string a tuple of one."""
    if annotation == tuple[str, ...]:
        value = (value,) if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"handler: {key} must be a string or a list of strings")
        return tuple(value)
    if annotation == Mapping[str, str]:
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(s, str) for kv in value.items() for s in kv):
            raise ConfigError(f"handler: {key} must map names to texts")
        return dict(value)
    if annotation == Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"handler: {key} must be a section")
        return dict(value)
    allowed = get_args(annotation) or (annotation,)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int in Python, and `max_tokens: yes` is a bool in YAML
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
        raise ConfigError(f"handler: {key} must be {names}, not {type(value).__name__}")
    return value


def resolve_dtype(requested: str, device: str, model_type: str, *, bf16_on_device: bool = True) -> str:
    """The dtype that a model runs in.

    Args:
        requested: a name of DTYPES.
        device: torch's device type (`cpu`, `cuda`, …).
        model_type: the model's `model_type` in transformers.
        bf16_on_device: whether the device computes in bfloat16.

    Returns:
        `auto` is float16 on CUDA, bfloat16 there for families that overflow float16 (float32 where the device has no
        bfloat16), float32 everywhere else. A dtype asked for by name is taken, but never float16 for those families.
    """
    overflows = model_type in OVERFLOWS_FP16
    if requested == "auto":
        requested = "float16" if device == "cuda" else "float32"
    if requested == "float16" and overflows:
        return "bfloat16" if bf16_on_device else "float32"
    return requested
