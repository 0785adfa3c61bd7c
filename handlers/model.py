"""Load the network and its tokenizer, place them, prove the packed path, time a forward pass."""

import contextlib
import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from handlers import attention, memory
from handlers.batching import Limits
from handlers.config import HandlerConfig, resolve_dtype
from handlers.errors import RequestError
from handlers.tokens import Encoding, Layout, Text, Tokens, collate

logger = logging.getLogger(__name__)

# Tokens run at once. On a CPU larger micro-batches fall out of the caches (measured best at 512-1024 with MiniLM); on
# CUDA they fill the device.
BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}
# Largest launch cost that a fit may find, in tokens: a hiccup while timing must not talk the planner into padding.
MAX_LAUNCH_COST = 8192
ROUNDS = 5  # of the fit
SLOWEST = 4  # times the expected cost: what is slower is a stall
PROBE_TOKENS = 300  # of the longest text that packing is tried on; windows longer than that show when they matter


@dataclass(frozen=True)
class Costs:
    """What a forward pass takes on this device.

    Args:
        seconds_per_token: marginal cost of one more token.
        launch_cost: fixed cost of a forward pass, in tokens.
    """

    seconds_per_token: float
    launch_cost: int

    def seconds(self, tokens: int, launches: int = 1) -> float:
        """Predicted time of `launches` forward passes that run `tokens` tokens in all."""
        return (tokens + launches * self.launch_cost) * self.seconds_per_token

    def after(self, tokens: int, launches: int, seconds: float) -> "Costs":
        """These costs, a step nearer to what a batch has just taken.

        The fit at start-up may have met a busy machine, and scaling changes a worker's threads: a prediction that
        stayed wrong would refuse work that fits, or take on work that does not. A stall says little of the next batch,
        so what is seen counts as at most SLOWEST times what was expected.
        """
        if not tokens:
            return self
        seen = seconds / (tokens + launches * self.launch_cost)
        return Costs(0.8 * self.seconds_per_token + 0.2 * min(seen, SLOWEST * self.seconds_per_token), self.launch_cost)

    def relaxed(self) -> "Costs":
        """Slightly lower costs, for after a refusal: what is refused never runs and could not correct them."""
        return Costs(0.9 * self.seconds_per_token, self.launch_cost)


#: What a task reads of the model: the encoder's states, or a head's logits per token or per text, or per token for the
#: starts and ends of spans.
Reads = Literal["states", "tokens", "texts", "spans"]


class Model:
    """A transformers model that runs encodings, packed where that gives equal answers.

    Args:
        directory: the model's files.
        config: the archive's handler section.
        gpu_id: the CUDA device that TorchServe assigned; None for the CPU.
        architecture: transformers' auto class that loads it.
        reads: what the task reads of it.

    Attributes:
        net: the transformers model.
        tokens: its tokenizer.
        device, dtype: where and in what it runs.
        packed: whether micro-batches run without padding.
        why_padded: the reason, where they do not.
        costs: set by `fit`.
        work: what `fit` warms up and times: what the task reads, unless a task sets what it does beside.
    """

    def __init__(
        self,
        directory: Path,
        config: HandlerConfig,
        gpu_id: int | None = None,
        *,
        architecture: str = "AutoModel",
        reads: Reads = "states",
    ) -> None:
        self.config = config
        self.reads = reads
        trust = config.trust_remote_code
        described = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust)
        # gpu_id 0 is a device, None is none
        on_gpu = gpu_id is not None and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{gpu_id}") if on_gpu else torch.device("cpu")
        bf16 = not on_gpu or torch.cuda.is_bf16_supported()
        name = resolve_dtype(config.dtype, self.device.type, described.model_type, bf16_on_device=bf16)
        self.dtype: torch.dtype = getattr(torch, name)
        if not on_gpu and self.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            logger.warning("This CPU has no bfloat16 instructions: bfloat16 is slower here than float32")
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust)
        self.tokens = Tokens(
            tokenizer,
            config.max_tokens,
            lower_case=config.lower_case,
            include_prompt=config.include_prompt,
            rows=getattr(described, "vocab_size", None),
        )
        auto_class: Any = getattr(transformers, architecture)
        net: Any = auto_class.from_pretrained(
            directory, dtype=self.dtype, local_files_only=True, use_safetensors=True, trust_remote_code=trust
        )
        self.net = net.to(self.device).eval()
        if not self.net.config.is_encoder_decoder:
            self.net.config.use_cache = False  # a decoder that embeds needs no keys and values of the past
        self._padded_attention = self.net.config._attn_implementation
        self.packed = False
        self.why_padded = "asked for by the archive"
        self._positions_skip: int | None = None
        self._batch_tokens = config.max_batch_tokens or BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"])
        # The model's own padding: some heads find a text's end by it, and RoBERTa's rule numbers positions by it
        padding, rows = (
            getattr(self.net.config, "pad_token_id", None),
            getattr(described, "vocab_size", None) or math.inf,
        )
        self._pad_id = padding if isinstance(padding, int) and 0 <= padding < rows else self.tokens.pad_id
        self._takes_types = bool(getattr(self.net.config, "type_vocab_size", 0))
        self.costs = Costs(seconds_per_token=1e-4, launch_cost=128)
        self.work: Callable[[Sequence[Encoding]], Any] = self.hidden if reads == "states" else self.logits
        if config.attention != "padded":
            self._try_packing()

    def limits(self) -> Limits:
        """What the planner may put into one micro-batch."""
        return Limits(
            max_tokens=self._batch_tokens,
            max_items=self.config.max_batch_items,
            launch_cost=self.costs.launch_cost,
            # tensor cores want multiples of 8 in half precision
            multiple_of=1 if self.packed or self.dtype == torch.float32 else 8,
            packed=self.packed,
        )

    @torch.inference_mode()
    def hidden(self, encodings: Sequence[Encoding], *, precise: bool = False) -> tuple[Tensor, Layout]:
        """Run the encoder over encodings.

        Args:
            encodings: what to run at once.
            precise: run in fp32 whatever the model's dtype.

        Returns:
            Last hidden states, flat: (tokens, dimension), padding included where padded; and where each text lies.
        """
        return self._in(self._states, encodings, precise)

    @torch.inference_mode()
    def logits(self, encodings: Sequence[Encoding], *, precise: bool = False) -> tuple[Tensor, Layout]:
        """Run the model with its head over encodings.

        Args:
            encodings: what to run at once.
            precise: run in fp32 whatever the model's dtype.

        Returns:
            fp32 logits: (texts, labels) for a head that reads texts; else flat, (tokens, labels), or (tokens, 2) of
            starts and ends, padding included where padded; and where each text lies.
        """
        return self._in(self._logits, encodings, precise)

    @torch.inference_mode()
    def head(self, states: Tensor) -> Tensor:
        """Run the model's head alone, for heads that look at one token at a time, such as those of vocabularies.

        Args:
            states: some of what `hidden` returned, (tokens, dimension); fp32 ones are run in fp32.

        Returns:
            fp32 logits, (tokens, labels).
        """
        net = self.net if states.dtype == self.dtype else copy.deepcopy(self.net).to(states.dtype)
        encoder = _encoder(net)
        encoder.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=states[None])  # in place of the class's
        try:
            logits: Tensor = net(input_ids=torch.zeros(1, len(states), dtype=torch.long, device=self.device)).logits
        finally:
            del encoder.forward
        return logits[0].float()

    @torch.inference_mode()
    def generate(self, encodings: Sequence[Encoding], *, precise: bool = False, **settings: Any) -> Tensor:
        """Let an encoder-decoder write a text for each encoding, with transformers' `generate`.

        Args:
            encodings: what to run at once.
            precise: run in fp32 whatever the model's dtype.
            settings: arguments of `generate`.

        Returns:
            Token ids, (texts, longest), the decoder's start token first, filled up behind the end.
        """
        return self._in(lambda net, inputs, _: net.generate(**inputs, **settings), encodings, precise)[0]

    def _in(self, run: Any, encodings: Sequence[Encoding], precise: bool) -> tuple[Tensor, Layout]:
        """`run` in the model's dtype, or in fp32; padded from now on where a text cannot be packed."""
        if precise and self.dtype != torch.float32:
            # A copy: converting the net itself and back would round buffers that are fp32 beside half weights, and
            # memory that runs out half-way would leave it in two dtypes
            return self._run(run, copy.deepcopy(self.net).float(), encodings, torch.float32)
        try:
            return self._run(run, self.net, encodings, self.dtype)
        except attention.CannotPack as error:  # the probe met no such text
            self._run_padded(str(error))
            return self._run(run, self.net, encodings, self.dtype)

    def _run(self, run: Any, net: Any, encodings: Sequence[Encoding], dtype: torch.dtype) -> tuple[Tensor, Layout]:
        tensors, layout = collate(
            encodings,
            self._pad_id,
            packed=self.packed,
            multiple_of=self.limits().multiple_of,
            positions_skip=self._positions_skip,
        )
        inputs: dict[str, Any] = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        if self.packed:
            inputs["segments"] = attention.segments(layout.lengths, self.device, dtype)
        if not self._takes_types:
            del inputs["token_type_ids"]
        result: Tensor = run(net, inputs, layout)
        return result, layout

    def _states(self, net: Any, inputs: dict[str, Any], layout: Layout) -> Tensor:
        states: Tensor = _encoder(net)(**inputs).last_hidden_state.flatten(0, 1)
        return states

    def _logits(self, net: Any, inputs: dict[str, Any], layout: Layout) -> Tensor:
        if self.reads == "texts":
            with unpacked(net, layout) if self.packed else contextlib.nullcontext():
                logits: Tensor = net(**inputs).logits
            return logits.float()
        output = net(**inputs)
        spans = self.reads == "spans"
        logits = torch.stack((output.start_logits, output.end_logits), dim=-1) if spans else output.logits
        return logits.flatten(0, 1).float()

    def _try_packing(self) -> None:
        """Pack from now on if this very model gives the padded answers that way, else say why not.

        Models number positions from 0 or by RoBERTa's rule (see `tokens.collate`): both are tried, on texts that
        differ in length, one with a padding token in it, one long.
        """
        if self.net.config.is_encoder_decoder and self.net.can_generate():
            self._refuse_packing("its decoder reads padded texts")
            return
        attention.register()
        probe = self._probe()
        expected = self._outputs(probe)
        reason = "packed outputs differ from padded ones"
        for skip in (None, self._pad_id):
            self.packed, self._positions_skip = True, skip
            try:
                self.net.set_attn_implementation(attention.NAME)
                found = self._outputs(probe)
                if _agree(expected, found, self.dtype):
                    self.why_padded = ""
                    return
            except Exception as error:  # noqa: BLE001 - whatever a model does not like about packing, padding still works
                reason = f"{type(error).__name__}: {error}"
        self._refuse_packing(reason)

    def _refuse_packing(self, reason: str) -> None:
        if self.config.attention == "packed":
            raise ValueError(f"attention is 'packed', but this model cannot be packed: {reason}")
        self._run_padded(reason)

    def _run_padded(self, reason: str) -> None:
        """Pad from now on."""
        self.packed, self._positions_skip, self.why_padded = False, None, reason
        self.net.set_attn_implementation(self._padded_attention)
        logger.warning("Running padded: this model cannot be packed (%s)", reason)

    def _probe(self) -> list[Encoding]:
        usable = [i for i in range(self.tokens.vocabulary) if i not in self.tokens.special] or [0]
        words = itertools.cycle(usable[:: max(1, len(usable) // 97)])
        lengths = (3, 7, 7, min(self.config.max_tokens, PROBE_TOKENS))
        texts = [list(itertools.islice(words, max(1, length))) for length in lengths]
        texts.insert(1, [texts[0][0], min(self._pad_id, self.tokens.vocabulary - 1), texts[0][-1]])
        return [self._synthetic(text) for text in texts]

    def _synthetic(self, ids: list[int]) -> Encoding:
        """A text of these tokens and the model's special ones, which some heads look for."""
        (found,) = self.tokens.encode([Text(tuple(ids))])
        if isinstance(found, RequestError):
            raise ValueError(f"the tokenizer and the model do not go together: {found.message}")
        return found[0]

    @torch.inference_mode()
    def _outputs(self, encodings: Sequence[Encoding]) -> Tensor:
        """What the task reads: (tokens or texts, …), without padding."""
        read = self._states if self.reads == "states" else self._logits
        found, layout = self._run(read, self.net, encodings, self.dtype)
        if self.reads == "texts":
            return found
        spans = [found[s : s + n] for s, n in zip(layout.starts, layout.lengths, strict=True)]
        return torch.cat(spans).float()

    def fit(self) -> None:
        """Warm up and time forward passes, so that the planner knows this device: call once threads are set."""
        self._warm_up()
        small = [self._synthetic([self._any_id()] * min(8, self.config.max_tokens))]
        text = self._synthetic([self._any_id()] * min(64, self.config.max_tokens))
        large = [text] * max(2, min(self._batch_tokens // len(text), self.config.max_batch_items))
        tokens = [sum(len(e) for e in batch) for batch in (small, large)]
        # In turn, and the least of several: a busy moment then spoils neither side
        timed = [[self._timed(batch) for batch in (small, large)] for _ in range(ROUNDS)]
        seconds = [min(side) for side in zip(*timed, strict=True)]
        slope = max(1e-9, (seconds[1] - seconds[0]) / (tokens[1] - tokens[0]))
        launch = round(max(0.0, seconds[0] / slope - tokens[0]))
        self.costs = Costs(slope, min(launch, MAX_LAUNCH_COST))

    def _warm_up(self) -> None:
        """Run the largest micro-batch, so that its memory is there; one that does not fit halves the token budget."""
        longest = self._synthetic([self._any_id()] * self.config.max_tokens)
        while True:
            count = max(1, min(self._batch_tokens // len(longest), self.config.max_batch_items))
            try:
                self._timed([longest] * count)
                return
            except Exception as error:
                if count == 1 or not memory.is_out_of_memory(error):
                    raise
            memory.release()
            self._batch_tokens //= 2
            logger.warning("Memory is short: micro-batches hold %d tokens", self._batch_tokens)

    def _timed(self, encodings: Sequence[Encoding]) -> float:
        start = time.perf_counter()
        self.work(encodings)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _any_id(self) -> int:
        return next((i for i in range(self.tokens.vocabulary) if i not in self.tokens.special), 0)


def _encoder(net: Any) -> Any:
    """The part of a model that makes hidden states of a text."""
    return net.get_encoder() if net.config.is_encoder_decoder else net.base_model


@contextlib.contextmanager
def unpacked(net: Any, layout: Layout) -> Iterator[None]:
    """Let a head that reads whole texts see a packed row as the padded texts that it stands for.

    While this lasts, the states that leave the encoder, (1, tokens, dimension), reach the head as (texts, longest,
    dimension), zeros behind the shorter ones, and the encoder's own pooler, if it has one, runs over those. Heads look
    at a text's first token or, padded with a mask, at all: the probe at start-up shows whether this one is content.
    """

    def spread(module: Any, _: Any, output: Any) -> Any:
        texts = output.last_hidden_state[0].split(layout.lengths)
        output.last_hidden_state = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        pooler = getattr(module, "pooler", None)
        if output.get("pooler_output") is not None and pooler is not None:
            output.pooler_output = pooler(output.last_hidden_state)
        return output

    hook = net.base_model.register_forward_hook(spread)
    try:
        yield
    finally:
        hook.remove()


def _agree(expected: Tensor, found: Tensor, dtype: torch.dtype) -> bool:
    """Whether two (tokens, dimension) states are equal but for rounding in `dtype`."""
    if not bool(torch.isfinite(found).all()):
        return False
    if dtype == torch.float32:
        return bool(torch.allclose(expected, found, rtol=1e-4, atol=1e-4 * float(expected.abs().max())))
    return bool((torch.nn.functional.cosine_similarity(expected, found, dim=-1) > 0.99).all())
