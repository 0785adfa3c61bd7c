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
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.metrics.metric_type_enum import MetricTypes
from ts.torch_handler.base_handler import BaseHandler

from handlers import batching, card, decoding, intake, options, parking, protocol, runner
from handlers.batching import Limits
from handlers.codecs.codec import Codec
from handlers.config import HandlerConfig
from handlers.errors import HandlerFault, ModelFailure, Overloaded, RequestError, TooLarge, place, reason
from handlers.metrics import BATCH_SIZE_LIMIT, HANDLER_TIME, Metrics
from handlers.model import Model, Reads
from handlers.request import Item, Nouns, Request, Task, Usage, inside
from handlers.serialise import dumps
from handlers.threads import Threads
from handlers.tokens import Encoding, Text
from handlers.work import Slot, Work, placed, rendered

logger = logging.getLogger(__name__)

RESPONSE_TIMEOUT = 120  # seconds; TorchServe's, when model-config.yaml says nothing
TIME_SHARE = 0.7  # of the response timeout that a batch may be predicted to take
TOKENIZE_SHARE = 0.2  # of it, after which no further request of the batch is tokenised
ENVELOPE_BYTES = 1024  # of an answer beside its items


class TransformerHandler(BaseHandler):
    """Parse, forward and render are a task's own; everything between is the same for all.

    Class attributes:
        nouns: the task's words for one result and for several.
        options: the request options it knows → a check that returns the value to use or raises RequestError.
        nullable: options for which null is a value.
        fields: fields of one instance sent as an object; the first is the one that a bare text stands for.
        routes: paths of other servers' interfaces that it answers, of those in `protocol.ROUTES`.
        token_ids: whether a text may be sent as token ids.
        inputs_alone: whether Hugging Face's clients want the result of a single input bare, not in a list.
        arrays: whether results are arrays of numbers, or base64 of them.
        architecture: transformers' auto class that loads the model.
        reads: what the task reads of the model.
    """

    nouns: ClassVar[Nouns] = Nouns("result", "results")
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    nullable: ClassVar[tuple[str, ...]] = ()
    fields: ClassVar[tuple[str, ...]] = ("text",)
    routes: ClassVar[tuple[str, ...]] = ()
    token_ids: ClassVar[bool] = False
    inputs_alone: ClassVar[bool] = False
    arrays: ClassVar[bool] = False
    architecture: ClassVar[str] = "AutoModel"
    reads: ClassVar[Reads] = "states"

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
        self.metrics = Metrics(context.metrics, MetricTypes, context.model_name)
        self.metrics.gauge(BATCH_SIZE_LIMIT, int(properties.get("batch_size") or 1))
        self.threads = Threads(self.settings.threads)
        self.model = Model(
            self.directory, self.settings, properties.get("gpu_id"), architecture=self.architecture, reads=self.reads
        )
        self.device = self.model.device
        self.task = Task(
            self.nouns,
            self.fields,
            self.options,
            self.routes,
            self.item,
            self.nullable,
            self.inputs_alone,
            self.settings.max_items,
            self.arrays,
            self.pipeline_value,
        )
        self.setup()
        self.fit()
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
        lengths = [len(encoding) for encoding in encodings]
        plan = batching.plan_apart(lengths, [encoding.key for encoding in encodings], self.limits)
        tally = runner.Tally()
        self.deadline = data.started + self.time_budget
        rows = iter(runner.run(encodings, plan, self.forward, deadline=self.deadline, tally=tally) if encodings else [])
        for slot in open_slots:
            slot.outputs = [next(rows) for _ in slot.encodings]
        spent = time.monotonic() - begun
        self.learn(tally, spent)
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
        now = time.monotonic()
        self.metrics.count("batchserve_render_seconds_total", now - begun)
        served = sum(slot.error is None or slot.error.status < 500 for slot in data.slots)
        if served:  # the server's own errors are told by their count: quick or slow, nobody was served
            self.metrics.observe(HANDLER_TIME, now - data.started, served)
        self.metrics.emit()
        return bodies

    # What a task or a user's subclass says

    def setup(self) -> None:
        """Load what the task needs beside the encoder. Called once, before the warm-up."""

    def fit(self) -> None:
        """Warm up, and learn what the model's work costs on this device."""
        self.model.fit()

    def item(self, value: Any, param: str) -> Item:
        """An instance as sent, in the field `param` → an item. RequestError refuses the request."""
        if self.token_ids and isinstance(value, list):
            return options.token_ids(value, param)
        name = self.fields[0]
        if isinstance(value, dict):
            name = next((key for key in (name, "data") if key in value), name)
            value, param = options.members(value, param, [name])[name], inside(param, name)
        return options.text(value, param, "a string or a list of token ids" if self.token_ids else "a string")

    def parse(self, request: Request) -> Request:
        """The request to run: its items may be changed, not their number. RequestError refuses it."""
        return request

    def prompt(self, request: Request) -> str:
        """Text to put before every item of the request."""
        return ""

    def texts(self, request: Request) -> Sequence[Text]:
        """What to tokenise for a request: here each item, with the prompt before it."""
        prompt = self.prompt(request)
        truncate = request.options.get("truncate", True)
        return [Text(item, prompt, truncate, request.param(i)) for i, item in enumerate(request.items)]

    @abstractmethod
    def forward(self, encodings: Sequence[Encoding], precise: bool) -> Tensor | Sequence[Tensor | RequestError]:
        """Run encodings at once: one fp32 row per encoding, in order. `precise` asks for fp32 throughout.

        Rows are stacked in one tensor, or are tensors of any shapes and errors. `self.deadline` is the
        `time.monotonic()` at which long work should end.
        """

    @abstractmethod
    def render(self, request: Request, rows: Sequence[Tensor], encodings: Sequence[Encoding]) -> Sequence[Any]:
        """The rows of a request's encodings, on the CPU → one JSON value or float32 array per item.

        Args:
            request: as `parse` returned it.
            rows: what `forward` made of each encoding.
            encodings: of the texts that `texts` returned, in order; a text in windows has several.
        """

    def pipeline_value(self, request: Request, value: Any) -> Any:
        """A result in the form of transformers' pipelines, for Hugging Face's clients: mostly as it is."""
        return value

    def item_bytes(self, request: Request) -> int:
        """Most bytes that one item's result takes in the answer, so that what is too large is refused at once.

        0 where that cannot be told: an answer that turns out too large is then refused after the work.
        """
        return 0

    def limits(self, key: Hashable) -> Limits:
        """What one micro-batch of encodings of this key may hold, and what it costs."""
        return self.model.limits()

    def seconds(self, encodings: Sequence[Encoding]) -> float:
        """Predicted time of running these encodings, in seconds."""
        tokens = sum(len(encoding) for encoding in encodings)
        return self.model.costs.seconds(tokens, math.ceil(tokens / self.model.limits().max_tokens))

    def learn(self, tally: runner.Tally, seconds: float) -> None:
        """Correct what `seconds` predicts by what a batch has just taken."""
        self.model.costs = self.model.costs.after(tally.tokens, tally.micro_batches, seconds)

    def sample(self) -> Any:
        """A JSON body that the model must be able to answer: what a build tries the archive with."""
        return {"text": "hello"}

    def card(self) -> dict[str, Any]:
        """What is served, for `GET /models/NAME?customized=true` and the log."""
        limits = self.model.limits()
        kind = type(self)
        return {
            "task": self.settings.task,
            "handler": f"{kind.__module__}.{kind.__qualname__}",
            **card.origin(self.directory, Path(self.context.system_properties["model_dir"])),
            "fields": list(self.fields),
            "options": list(self.options),
            "routes": protocol.routes(self.task),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": self.model.layout,
            "max_tokens": self.settings.max_tokens,
            "max_items": self.settings.max_items,
            "max_response_bytes": self.settings.max_response_bytes,
            "response_timeout": self.response_timeout,
            "micro_batch_tokens": limits.max_tokens,
            "micro_batch_items": limits.max_items,
            "threads": self.threads.count,
            "launch_cost_tokens": limits.launch_cost,
            "microseconds_per_token": round(self.model.costs.seconds_per_token * 1e6, 2),
        }

    # Rows → slots

    def _slot(self, index: int, row: Mapping[str, Any]) -> Slot:
        slot = Slot()
        try:
            headers = decoding.Headers(self.context.get_all_request_header(index) or {})
            route = decoding.route_of(headers)
            slot.codec = protocol.by_route(route, decoding.media_type(headers), self.task)
            if headers.get("describe") == "True" and not row:
                return slot
            if headers.get("explain") == "True" and not route:
                raise RequestError("This model gives no explanations.", code="no_explanations")
            call = decoding.decode(row, headers, self.fields)
            slot.codec = protocol.by_body(slot.codec, call, self.task)
            slot.writer = protocol.by_accept(slot.codec, decoding.accepted(headers))
            slot.echo = slot.codec.echo(call)
            asked = protocol.read(call, slot.codec, self.task)
            slot.request = intake.parsed(self.parse(asked), asked)
            self._check_answer(slot.request, slot.writer)
        except RequestError as error:
            slot.error = error
        except Exception as error:  # noqa: BLE001 - a subclass's fault on one row must stay with that row
            slot.error = self._failure("parse", error)
        return slot

    def _check_answer(self, request: Request, codec: Codec) -> None:
        """Refuse before compute what TorchServe could not send: a larger answer kills the worker."""
        room = self.settings.max_response_bytes - ENVELOPE_BYTES
        each = codec.bound(self.item_bytes(request), self.task)
        if each * len(request.items) > room:
            fit = room // each
            advice = f"at most {fit} items fit in one request" if fit > 0 else "a single item may; ask for less of it"
            raise TooLarge(
                f"The answer may pass {self.settings.max_response_bytes} bytes; {advice}.",
                code="answer_too_large",
                param=request.field or None,
            )

    def _encode(self, slots: Sequence[Slot], deadline: float) -> None:
        """Tokenise the texts of the batch."""
        for slot in slots:
            if slot.request is None or slot.error:
                continue
            try:
                slot.texts = intake.checked(self.texts(slot.request), slot.request, self.settings.max_items)
            except RequestError as error:
                slot.error = error
            except Exception as error:  # noqa: BLE001 - as in _slot
                slot.error = self._failure("texts", error)
        intake.encode(slots, self.model.tokens, deadline, lambda error: self._failure("texts", error))

    def _admit(self, slots: Sequence[Slot], budget: float) -> None:
        """Refuse what the worker could not finish in time; what is refused never runs, so costs must learn from it."""
        for _ in range(intake.admit(slots, self.seconds, budget, self.time_budget)):
            self.model.costs = self.model.costs.relaxed()

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
                slot.error = self._failure("render", error)
        assert slot.error is not None
        failure = slot.error
        status = slot.codec.status(failure)
        self.metrics.error(failure.code, status)
        logger.info("request %s is refused: %d %s", self.context.get_request_id(index), status, failure.code)
        self.context.set_response_status(status, protocol.phrase(status), index)
        if isinstance(failure, Overloaded):
            self.context.set_response_header(index, "Retry-After", "1")
        return slot.codec.refuse(failure, slot.echo)

    def _describe(self, index: int) -> bytes:
        """The card; a worker that is named in the request's headers answers and then holds still until it is killed."""
        headers = decoding.Headers(self.context.get_all_request_header(index) or {})
        alone = len(self.context.request_ids) == 1
        seconds = parking.seconds(headers) if alone else 0.0
        body = dumps({**self.card(), "worker": parking.worker(parked=seconds > 0)})
        if seconds:
            send_intermediate_predict_response([body], self.context.request_ids, "parked", 200, self.context)
            parking.hold(seconds)
        return body

    def _rendered(self, index: int, request: Request, slot: Slot) -> bytes:
        rows = []
        for param, output in zip(slot.params, slot.outputs, strict=True):
            if isinstance(output, RequestError):
                raise placed(output, param)
            rows.append(output)
        usage = Usage(sum(len(e) for e in slot.encodings), sum(e.cut for e in slot.encodings))
        results = rendered(self.render(request, rows, slot.encodings), request)
        try:
            body = slot.writer.write(request, results, self.task, self.model_name, usage)
        except (TypeError, ValueError) as error:
            raise HandlerFault(f"render returned what is no JSON: {error}") from error
        if len(body) > self.settings.max_response_bytes:
            raise TooLarge(
                "The answer is larger than TorchServe can send; send fewer items.",
                code="answer_too_large",
                param=request.field or None,
            )
        self.context.set_response_content_type(index, slot.writer.content_type)
        if usage.cut:
            self.context.set_response_header(index, "X-Truncated-Tokens", str(usage.cut))
        return body

    def _failure(self, step: str, error: BaseException) -> ModelFailure:
        """An unexpected exception of one request: its place goes to the log, its message (which may quote) nowhere."""
        trace = "".join(traceback.format_tb(error.__traceback__))
        logger.error("%s (%s) failed on one request: %s\n%s", step, place(getattr(self, step)), reason(error), trace)
        return ModelFailure(f"The handler's {step} failed on this request.", code="handler_failure")

    # A client's header must not turn the whole batch into something else: both are looked at per row

    def _is_describe(self) -> bool:
        return False

    def _is_explain(self) -> bool:
        return False
