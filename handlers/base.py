"""TorchServe's life cycle ↔ the pipeline. The only module that imports `ts`.

`BaseHandler.handle` stays as it is: preprocess, inference and postprocess are TorchServe's three. Between them a batch
travels as `Work`, one slot per row; an error fills its slot and goes no further. Only postprocess turns slots into
bodies and statuses, so a bad request cannot change what its neighbours get.
"""

import logging
import math
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.metrics.metric_type_enum import MetricTypes
from ts.torch_handler.base_handler import BaseHandler

from handlers import batching, decoding, parking, protocol, runner
from handlers.config import HandlerConfig
from handlers.errors import ModelFailure, Overloaded, RequestError, TooLarge
from handlers.metrics import ERRORS, Metrics
from handlers.model import Model
from handlers.protocol import Nouns, Request, Usage
from handlers.threads import Threads
from handlers.tokens import Encoding, Text

logger = logging.getLogger(__name__)

RESPONSE_TIMEOUT = 120  # seconds; TorchServe's, when model-config.yaml says nothing
TIME_SHARE = 0.7  # of the response timeout that a batch may be predicted to take
TOKENIZE_SHARE = 0.2  # of it, after which no further request of the batch is tokenised
MAX_TEXT_CHARACTERS = 1_000_000  # of one text, prompt included: tokenising takes up to 4 µs and 600 bytes for each
MAX_REQUEST_CHARACTERS = 8_000_000  # more than TorchServe lets in, unless a prompt is put before many texts
ENVELOPE_BYTES = 1024  # of an answer beside its items


@dataclass
class Slot:
    """One row of the batch.

    Args:
        openai: whether errors are answered in OpenAI's form.
        request: what the client asks; None for a describe request.
        error: why it cannot be answered.
        encodings, outputs: of the request's items, in order.
    """

    openai: bool = False
    request: Request | None = None
    error: RequestError | None = None
    encodings: list[Encoding] = field(default_factory=list)
    outputs: list[Tensor | RequestError] = field(default_factory=list)


@dataclass
class Work:
    """A batch on its way through the pipeline: one slot per row."""

    slots: list[Slot]
    started: float


class TransformerHandler(BaseHandler):
    """Parse, forward and render are a task's own; everything between is the same for all.

    Class attributes:
        nouns: the task's words for one result and for several.
        options: the request options it knows → a check that returns the value to use or raises RequestError.
    """

    nouns: ClassVar[Nouns] = Nouns("result", "results")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    # TorchServe's life cycle

    def initialize(self, context: Any) -> None:
        """Load the model, fit its costs and warm it up; only then does TorchServe call the worker READY."""
        self.context = context
        self.manifest = context.manifest
        settings = context.model_yaml_config or {}
        self.settings = HandlerConfig.from_mapping(settings.get("handler") or {})
        self.response_timeout = float(settings.get("responseTimeout") or RESPONSE_TIMEOUT)
        self.time_budget = TIME_SHARE * self.response_timeout
        properties = context.system_properties
        self.directory = Path(properties["model_dir"]) / self.settings.model
        self.model_name = context.model_name
        self.metrics = Metrics(context.metrics, MetricTypes.COUNTER, context.model_name)
        self.threads = Threads(self.settings.threads)
        self.model = Model(self.directory, self.settings, properties.get("gpu_id"))
        self.device = self.model.device
        self.setup()
        self.model.fit()
        self.initialized = True
        logger.info("Ready: %s", self.card())

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Work:
        """Rows → requests → encodings; what is wrong with a request stays in its slot."""
        work = Work([], time.monotonic())
        work.slots += [self._slot(i, row) for i, row in enumerate(data)]
        self.metrics.batch(len(work.slots))
        self._encode(work.slots, work.started + TOKENIZE_SHARE * self.response_timeout)
        self._admit(work.slots, work.started + self.time_budget - time.monotonic())
        self.metrics.count("batchserve_tokenize_seconds_total", time.monotonic() - work.started)
        return work

    @torch.inference_mode()
    def inference(self, data: Work, *args: Any, **kwargs: Any) -> Work:
        """Plan micro-batches over all texts of all requests, run them, hand the rows back to their requests."""
        self.threads.follow()
        begun = time.monotonic()
        open_slots = [slot for slot in data.slots if slot.request and not slot.error]
        encodings = [encoding for slot in open_slots for encoding in slot.encodings]
        plan = batching.plan([len(encoding) for encoding in encodings], self.model.limits())
        tally = runner.Tally()
        rows = iter(
            runner.run(encodings, plan, self.forward, deadline=data.started + self.time_budget, tally=tally)
            if encodings
            else []
        )
        for slot in open_slots:
            slot.outputs = [next(rows) for _ in slot.encodings]
        spent = time.monotonic() - begun
        self.model.costs = self.model.costs.after(tally.tokens, tally.micro_batches, spent)
        for name, value in {
            "batchserve_items_total": len(encodings),
            "batchserve_tokens_total": tally.real_tokens,
            "batchserve_padding_tokens_total": tally.tokens - tally.real_tokens,
            "batchserve_truncated_tokens_total": sum(encoding.cut for encoding in encodings),
            "batchserve_micro_batches_total": tally.micro_batches,
            "batchserve_oom_splits_total": tally.splits,
            "batchserve_fp32_retries_total": tally.retries,
            "batchserve_forward_seconds_total": spent,
        }.items():
            self.metrics.count(name, value)
        return data

    def postprocess(self, data: Work) -> list[bytes]:
        """Slots → bodies, with each request's own status and headers."""
        begun = time.monotonic()
        bodies = [self._answer(index, slot) for index, slot in enumerate(data.slots)]
        self.metrics.count("batchserve_render_seconds_total", time.monotonic() - begun)
        self.metrics.emit()
        return bodies

    # What a task or a user's subclass says

    def setup(self) -> None:
        """Load what the task needs beside the encoder. Called once, before the warm-up."""

    def parse(self, request: Request) -> Request:
        """The request to run: its items may be changed, not their number. RequestError refuses it."""
        return request

    def prompt(self, request: Request) -> str:
        """Text to put before every item of the request."""
        return ""

    @abstractmethod
    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Tensor:
        """Run encodings at once: one fp32 row per encoding, in order. `precise` asks for fp32 throughout."""

    @abstractmethod
    def render(self, request: Request, rows: Tensor) -> Sequence[Any]:
        """(items, …) rows of a request → one JSON value or float32 array per item."""

    @abstractmethod
    def item_bytes(self, request: Request) -> int:
        """Most bytes that one item's result takes in the answer, so that what is too large is refused at once."""

    def card(self) -> dict[str, Any]:
        """What is served, for `GET /models/NAME?customized=true` and the log."""
        limits = self.model.limits()
        return {
            "task": self.settings.task,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": "packed" if self.model.packed else f"padded: {self.model.why_padded}",
            "max_tokens": self.settings.max_tokens,
            "max_items": self.settings.max_items,
            "micro_batch_tokens": limits.max_tokens,
            "micro_batch_items": limits.max_items,
            "threads": self.threads.count,
            "launch_cost_tokens": limits.launch_cost,
            "microseconds_per_token": round(self.model.costs.seconds_per_token * 1e6, 2),
        }

    # Rows → slots

    def _slot(self, index: int, row: Mapping[str, Any]) -> Slot:
        headers = decoding.Headers(self.context.get_all_request_header(index) or {})
        route = decoding.route_of(headers)
        slot = Slot(openai=route == protocol.OPENAI_ROUTE)
        try:
            protocol.check_route(route)
            if headers.get("describe") == "True" and not row:
                return slot
            if headers.get("explain") == "True" and not slot.openai:
                raise RequestError("This model gives no explanations.", code="no_explanations")
            request = protocol.parse(decoding.decode(row, headers), self.options, self.settings.max_items)
            checked = {name: self._option(name, value) for name, value in request.options.items()}
            slot.request = self.parse(replace(request, options=checked))
            self._check_answer(slot.request)
        except RequestError as error:
            slot.error = error
        except Exception as error:  # noqa: BLE001 - a subclass's fault on one row must stay with that row
            slot.error = _failure("parse", error)
        return slot

    def _option(self, name: str, value: Any) -> Any:
        check = self.options.get(name)
        if check is None:
            return value
        try:
            return check(value)
        except RequestError as error:
            raise error.at(name) from None

    def _check_answer(self, request: Request) -> None:
        """Refuse before compute what TorchServe could not send: a larger answer kills the worker."""
        room = self.settings.max_response_bytes - ENVELOPE_BYTES
        each = self.item_bytes(request)
        if each * len(request.items) > room:
            raise TooLarge(
                f"The answer may pass {self.settings.max_response_bytes} bytes; "
                f"at most {max(0, room // each)} items fit in one request.",
                code="answer_too_large",
                param=request.field,
            )

    def _encode(self, slots: Sequence[Slot], deadline: float) -> None:
        """Tokenise the texts of the batch, in few calls, a request at a time once there is much of it."""
        waiting: list[tuple[Slot, list[Text]]] = []
        characters = 0
        for slot in slots:
            if slot.request is None or slot.error:
                continue
            try:
                texts = self._texts(slot.request)
            except RequestError as error:
                slot.error = error
                continue
            except Exception as error:  # noqa: BLE001 - as in _slot
                slot.error = _failure("prompt", error)
                continue
            characters += sum(map(len, texts))
            waiting.append((slot, texts))
            if characters > MAX_TEXT_CHARACTERS:
                self._tokenise(waiting, deadline)
                waiting, characters = [], 0
        self._tokenise(waiting, deadline)

    def _texts(self, request: Request) -> list[Text]:
        """What to tokenise for a request.

        Raises:
            RequestError: the prompt cannot be had.
            TooLarge: tokenising would take too long or too much memory.
        """
        prompt = self.prompt(request)
        truncate = request.options.get("truncate", True)
        texts = [Text(item, prompt, truncate) for item in request.items]
        for i, text in enumerate(texts):
            if len(text) > MAX_TEXT_CHARACTERS:
                said = f"the text has {len(text)} characters; at most {MAX_TEXT_CHARACTERS} are read."
                raise _placed(TooLarge(said, code="text_too_long"), request, i)
        total = sum(map(len, texts))
        if total > MAX_REQUEST_CHARACTERS:
            raise TooLarge(
                f"With their prompt the texts have {total} characters; at most {MAX_REQUEST_CHARACTERS} fit.",
                code="too_large",
                param=request.field,
            )
        return texts

    def _tokenise(self, waiting: Sequence[tuple[Slot, list[Text]]], deadline: float) -> None:
        if time.monotonic() > deadline:
            for slot, _ in waiting:
                slot.error = Overloaded("The batch holds too much text beside this request; try again.")
            return
        encoded = iter(self.model.tokens.encode([text for _, texts in waiting for text in texts]))
        for slot, texts in waiting:
            for i, encoding in enumerate([next(encoded) for _ in texts]):
                if isinstance(encoding, Encoding):
                    slot.encodings.append(encoding)
                elif slot.error is None and slot.request is not None:
                    slot.error = _placed(encoding, slot.request, i)

    def _admit(self, slots: Sequence[Slot], budget: float) -> None:
        """Refuse, in order of arrival, what the worker could not finish before TorchServe gives up on it."""
        spent = 0.0
        for slot in slots:
            if slot.error or not slot.request:
                continue
            tokens = sum(len(encoding) for encoding in slot.encodings)
            launches = math.ceil(tokens / self.model.limits().max_tokens)
            seconds = self.model.costs.seconds(tokens, launches)
            if seconds > self.time_budget:
                fit = int(len(slot.encodings) * self.time_budget / seconds)
                slot.error = TooLarge(
                    f"{tokens} tokens would take about {seconds:.0f} s; at most about {fit} items like these fit "
                    f"in the {self.time_budget:.0f} s of one request.",
                    code="too_much_work",
                    param=slot.request.field,
                )
                self.model.costs = self.model.costs.relaxed()
            elif spent + seconds > budget:
                slot.error = Overloaded("The batch holds too much work beside this request; try again.")
                self.model.costs = self.model.costs.relaxed()
            else:
                spent += seconds

    # Slots → answers

    def _answer(self, index: int, slot: Slot) -> bytes:
        self.context.set_response_content_type(index, "application/json")
        if slot.request is None and slot.error is None:
            return self._describe(index)
        if slot.error is None and slot.request is not None:
            try:
                return self._rendered(index, slot.request, slot)
            except RequestError as error:
                slot.error = error
            except Exception as error:  # noqa: BLE001 - as in _slot
                slot.error = _failure("render", error)
        assert slot.error is not None
        failure = slot.error
        self.metrics.count(ERRORS, 1, failure.code)
        self.context.set_response_status(failure.status, protocol.phrase(failure.status), index)
        if isinstance(failure, Overloaded):
            self.context.set_response_header(index, "Retry-After", "1")
        return protocol.error_answer(failure, openai=slot.openai)

    def _describe(self, index: int) -> bytes:
        """The card; a worker that is named in the request's headers answers and then holds still until it is killed."""
        headers = decoding.Headers(self.context.get_all_request_header(index) or {})
        alone = len(self.context.request_ids) == 1
        seconds = parking.seconds(headers) if alone else 0.0
        body = protocol.dumps({**self.card(), "worker": parking.worker(parked=seconds > 0)})
        if seconds:
            send_intermediate_predict_response([body], self.context.request_ids, "parked", 200, self.context)
            parking.hold(seconds)
        return body

    def _rendered(self, index: int, request: Request, slot: Slot) -> bytes:
        rows = []
        for i, output in enumerate(slot.outputs):
            if isinstance(output, RequestError):
                raise _placed(output, request, i)
            rows.append(output)
        usage = Usage(sum(len(e) for e in slot.encodings), sum(e.cut for e in slot.encodings))
        results = self.render(request, torch.stack(rows))
        if len(results) != len(request.items):
            raise ValueError(f"render returned {len(results)} results for {len(request.items)} items")
        body = protocol.answer(request, results, self.nouns, self.model_name, usage)
        if len(body) > self.settings.max_response_bytes:
            raise TooLarge("The answer is larger than TorchServe can send; send fewer items.", code="answer_too_large")
        if usage.cut:
            self.context.set_response_header(index, "X-Truncated-Tokens", str(usage.cut))
        return body

    # A client's header must not turn the whole batch into something else: both are looked at per row

    def _is_describe(self) -> bool:
        return False

    def _is_explain(self) -> bool:
        return False


def _placed(error: RequestError, request: Request, index: int) -> RequestError:
    """The error of one item, naming it."""
    param = request.param(index)
    message = error.message
    if message[:1].islower():  # «the text's 90 tokens …», «token 3 is …»: said of an item
        message = f"{param}: {message}"
    return type(error)(message, code=error.code, param=param)


def _failure(step: str, error: Exception) -> ModelFailure:
    """An unexpected exception of one request: its place goes to the log, its message (which may quote) nowhere."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed on one request: %s\n%s", step, type(error).__name__, trace)
    return ModelFailure(f"The handler's {step} failed on this request.", code="handler_failure")
