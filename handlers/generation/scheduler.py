"""Who is computed next, and transformers' manager with our parts in it.

transformers' FIFO scheduler gives every running sequence its token, then fills the step with pieces of prompts. Ours
orders those that wait, lets nobody overtake one that has waited long, and lets them in again after cancellations, which
the stock one forgets.
"""

import gc
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from handlers.generation.engine import Sequence

NAME = "batchserve"
SECONDS_PER_LEVEL = 5.0  # of waiting that make up for one level of priority
PATIENCE = 5.0  # seconds at the head of the queue, after which nobody overtakes any more

Choose = Callable[[Tensor, list[str]], list[int]]
Deliver = Callable[[GenerationOutput], None]


class PriorityScheduler(FIFOScheduler):
    """First come, first admitted; priorities reorder those that wait.

    Attributes:
        tickets: sequence → (priority, time of arrival); the manager's.
        preemptions, prefix_tokens: counted, see `engine.Stats`.
    """

    tickets: dict[str, tuple[int, float]]

    def reset(self) -> None:
        """Forget everything that waits and runs."""
        super().reset()
        self.preemptions = 0
        self.prefix_tokens = 0
        self._head: tuple[str, float] | None = None

    def add_waiting_request(self, state: RequestState) -> None:
        """Let a new or preempted sequence wait."""
        self.preemptions += state._true_initial_tokens > 0
        super().add_waiting_request(state)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Drop cancelled sequences; their blocks may be what the waiting ones need."""
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        if cancelled:
            self.block_new_requests = False
        return cancelled

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """See `Scheduler.schedule_batch`."""
        if not self.active_requests:
            self.block_new_requests = False
        return super().schedule_batch(token_budget, cache_budget)

    def _get_waiting_candidates(self) -> list[RequestState]:
        now = time.monotonic()
        waiting = sorted(super()._get_waiting_candidates(), key=lambda state: self._rank(state.request_id))
        if not waiting:
            self._head = None
            return waiting
        first = waiting[0].request_id
        if self._head is None or self._head[0] != first:
            self._head = (first, now)
        return waiting[:1] if now - self._head[1] > PATIENCE else waiting

    def _rank(self, id: str) -> float:
        """Lower goes first. Time makes up for priority, so nobody waits for ever."""
        priority, arrived = self.tickets[id]
        return priority * SECONDS_PER_LEVEL + arrived

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        before = state.position_offset
        tokens: list[int] = super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        self.prefix_tokens += state.position_offset - before
        return tokens


SCHEDULER_MAPPING[NAME] = PriorityScheduler


class _Router(OutputRouter):
    """Hands outputs to the engine in the generation thread, without a queue between."""

    def __init__(self, deliver: Deliver) -> None:
        super().__init__()
        self._deliver = deliver

    def deliver(self, output: GenerationOutput) -> None:
        self._deliver(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self._deliver(output)


class Manager(ContinuousBatchingManager):
    """transformers' manager with our sampler, scheduler and delivery.

    Args:
        model: the network.
        config: the cache's sizes.
        choose: called for each step with (rows, vocabulary) float32 logits and the sequences of the first rows, in the
            generation thread; returns a token each.
        deliver: called with what a step brought for a sequence, in the generation thread.
        after: called after each step and each idle moment, in the generation thread.

    Attributes:
        tickets: sequence → its priority and when it came.
    """

    batch_processor: Any

    def __init__(
        self,
        model: Any,
        config: ContinuousBatchingConfig,
        choose: Choose,
        deliver: Deliver,
        after: Callable[["Manager"], None],
    ) -> None:
        # greedy to transformers: it then makes no processors and no draws of its own
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        super().__init__(model, greedy, config)
        self.output_router = _Router(deliver)
        self.tickets: dict[str, tuple[int, float]] = {}
        self._choose = choose
        self._after = after

    def submit(self, sequence: Sequence) -> None:
        """Let a sequence wait. Unlike `add_request` this logs nothing of it, whatever happens."""
        self.tickets[sequence.id] = (sequence.priority, time.monotonic())
        self.input_queue.put(
            RequestState(
                request_id=sequence.id,
                initial_tokens=list(sequence.prompt),
                max_new_tokens=sequence.max_tokens,
                eos_token_id=sorted(sequence.end),
                streaming=True,
            )
        )
        self._wake_up_loop.set()

    def start(self) -> None:
        """Start the generation thread, as a daemon: a worker that must end does not wait for it."""
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop, kwargs={"use_inference_mode": True}, name="generation", daemon=True
        )
        self._generation_thread.start()

    def end(self, seconds: float) -> None:
        """Stop the generation thread and wait for it so long. `stop` would also collect garbage, which takes long."""
        if self._generation_thread is not None and self.is_running():
            self.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)
            self._wake_up_loop.set()
            self._generation_thread.join(seconds)

    @property
    def failed(self) -> bool:
        """Whether the generation thread has ended."""
        return not self.is_running() or self.background_thread_status.can_accept_new_requests() is not None

    @property
    def cause(self) -> Exception | None:
        """What the generation thread died of, as far as it is known."""
        error: Exception | None = self.background_thread_status.fatal_error
        return error

    def forget(self) -> None:
        """Let the cache of a manager that has failed go: what it died of holds it too, in the frames of its trace."""
        self.batch_processor = None
        error: BaseException | None = self.cause
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        self.background_thread_status.fatal_error = None
        gc.collect()  # it is in a circle

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        processor.model_runner._sample = self._sample
        processor.scheduler.tickets = self.tickets
        return processor

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        assert self.batch_processor is not None
        batch = self.batch_processor.inputs_and_outputs.requests_in_batch
        # rows are there for all requests of the step; those that end no prompt in it have none of their own
        ids = [request.state.request_id for request in batch if request.has_new_token]
        if ids:
            tokens = torch.tensor(self._choose(scores[0], ids), dtype=output_ids.dtype)
            output_ids[0, : len(ids)].copy_(tokens)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        goes_on: bool = super()._generation_loop_body(batch_processor, bootstrapping)
        self._after(self)
        return goes_on
