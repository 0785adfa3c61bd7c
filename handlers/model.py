"""Load the network and its tokenizer, place them, prove the packed path, time a forward pass."""

import contextlib
import copy
import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from handlers import attention, costs, memory
from handlers.batching import Limits
from handlers.config import HandlerConfig, resolve_dtype
from handlers.costs import Costs
from handlers.errors import RequestError
from handlers.packing import agree, unpacked
from handlers.tokens import Encoding, Layout, Text, Tokens, collate

logger = logging.getLogger(__name__)

# Tokens run at once. On a CPU larger micro-batches fall out of the caches (measured best at 512-1024 with MiniLM); on
# CUDA they fill the device.
BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}
PROBE_TOKENS = 300  # of the longest text that packing is tried on; windows longer than that show when they matter


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
        pads: whether padding changes no answer; else, unless packed, only texts of equal length run together.
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
        self.packed, self.pads = False, False
        self.why_padded = "asked for by the archive"
        self._positions_skip: int | None = None
        self._batch_tokens = config.max_batch_tokens or BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"])
        # The model's own padding: some heads find a text's end by it, and RoBERTa's rule numbers positions by it
        padding, rows = (
            getattr(self.net.config, "pad_token_id", None),
            getattr(described, "vocab_size", None) or math.inf,
        )
        self._pad_id = padding if isinstance(padding, int) and 0 <= padding < rows else self.tokens.pad_id
        # XLNet takes segments without a table of them; GPT-2 takes them too, but its tokenizer makes none
        typed = "token_type_ids" in tokenizer.model_input_names
        taken = "token_type_ids" in inspect.signature(_encoder(self.net).forward).parameters
        self._takes_types = bool(getattr(self.net.config, "type_vocab_size", 0)) or (typed and taken)
        self.costs = Costs(seconds_per_token=1e-4, launch_cost=128)
        self.work: Callable[[Sequence[Encoding]], Any] = self.hidden if reads == "states" else self.logits
        self._choose_layout()

    @property
    def layout(self) -> str:
        """How texts of different lengths run, and why not packed."""
        if self.packed:
            return "packed"
        return f"{self._unpacked_layout()}: {self.why_padded}"

    def limits(self) -> Limits:
        """What the planner may put into one micro-batch."""
        return Limits(
            max_tokens=self._batch_tokens,
            max_items=self.config.max_batch_items,
            # Where a launch costs nothing, no plan pads
            launch_cost=self.costs.launch_cost if self.packed or self.pads else 0,
            # tensor cores want multiples of 8 in half precision
            multiple_of=8 if self.pads and not self.packed and self.dtype != torch.float32 else 1,
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

    def _choose_layout(self) -> None:
        """Learn, by a few texts alone and together, how this very model may run texts of different lengths.

        Packed where that is wanted and possible; else padded; else not at all, since some models look at padding (the
        convolutions of ConvBERT, FNet's transform, XLNet's classifier).
        """
        probe = self._probe()
        alone = torch.cat([self._outputs([text]) for text in probe])
        self.pads = True
        self.pads = agree(alone, self._outputs(probe), self.dtype)
        if self.config.attention != "padded":
            self._try_packing(probe, alone)

    def _try_packing(self, probe: Sequence[Encoding], alone: Tensor) -> None:
        """Pack from now on if this very model gives the answers of each text alone that way, else say why not.

        Models number positions from 0 or by RoBERTa's rule (see `tokens.collate`): both are tried, on texts that
        differ in length, one with a padding token in it, one long.
        """
        if self.net.config.is_encoder_decoder and self.net.can_generate():
            self._refuse_packing("its decoder reads padded texts")
            return
        attention.register()
        reasons = []
        for skip in (None, self._pad_id):
            self.packed, self._positions_skip = True, skip
            try:
                self.net.set_attn_implementation(attention.NAME)
                if agree(alone, self._outputs(probe), self.dtype):
                    self.why_padded = ""
                    return
                reasons.append("packed outputs differ from those of each text alone")
            except attention.CannotPack as error:
                reasons.insert(0, str(error))
                break
            except Exception as error:  # noqa: BLE001 - whatever a model does not like about packing, padding still works
                reasons.append(f"{type(error).__name__}: {error}")
        # Of two that failed, the second mostly says that a table of positions has no room for RoBERTa's rule
        self._refuse_packing(reasons[0])

    def _refuse_packing(self, reason: str) -> None:
        if self.config.attention == "packed":
            raise ValueError(f"attention is 'packed', but this model cannot be packed: {reason}")
        self._run_padded(reason)

    def _run_padded(self, reason: str) -> None:
        """Pad from now on, where the model allows that."""
        self.packed, self._positions_skip, self.why_padded = False, None, reason
        self.net.set_attn_implementation(self._padded_attention)
        logger.warning("Running %s: this model cannot be packed (%s)", self._unpacked_layout(), reason)

    def _unpacked_layout(self) -> str:
        return "padded" if self.pads else "equal lengths together, since padding changes its answers"

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
        return torch.cat(layout.split(found)).float()

    def fit(self) -> None:
        """Warm up and time forward passes, so that the planner knows this device: call once threads are set."""
        self._warm_up()
        small = [self._synthetic([self._any_id()] * min(8, self.config.max_tokens))]
        text = self._synthetic([self._any_id()] * min(64, self.config.max_tokens))
        large = [text] * max(2, min(self._batch_tokens // len(text), self.config.max_batch_items))
        self.costs = costs.fitted(self._timed, small, large)

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
