"""An encoder-decoder writes texts: `generate` until a deadline, what that costs, and what fits into a micro-batch."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from handlers import batching
from handlers.batching import Limits
from handlers.decoding_options import Decoding, defaults
from handlers.errors import Overloaded, RequestError
from handlers.model import Model
from handlers.tokens import Encoding, Text

# Positions of sources, and as many of texts, that a decoder remembers at once, per token that the encoder runs at
# once: a step costs little more for many rows than for one, and what is remembered is small beside what is computed.
POSITIONS_PER_TOKEN = 8
STEPS, ROWS, ROUNDS = 12, 8, 2  # of the fit
_LEAST = 1e-6  # tokens that a step or row costs at least
_READ_SOURCES = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}  # and when they do nothing


@dataclass(frozen=True)
class Pace:
    """What decoding costs, in tokens of the encoder, and how long texts become.

    Args:
        step: fixed cost of a decoding step.
        row: cost of one more row in a step.
        ratio: steps per token of the longest source in a micro-batch.
        length: tokens of a usual longest source.
    """

    step: float
    row: float
    ratio: float = 2.0
    length: float = 64.0

    def steps(self, length: float, decoding: Decoding) -> int:
        """Steps that sources of at most `length` tokens are expected to take."""
        expected = max(math.ceil(self.ratio * length), decoding.min_length - 1)
        return max(1, min(expected, decoding.max_length - 1))

    def work(self, steps: int, rows: int) -> float:
        """Cost of steps over rows, beams counted."""
        return steps * (self.step + rows * self.row)

    def after(self, steps: int, length: int) -> "Pace":
        """This pace, a step nearer to what a micro-batch has just done."""
        return replace(self, ratio=0.8 * self.ratio + 0.2 * steps / length, length=0.8 * self.length + 0.2 * length)


class _Guard(LogitsProcessor):
    """Notes rows whose scores overflow, and evens those: drawing from them would stop the device."""

    def __init__(self) -> None:
        self.spoilt: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        spoilt = ~scores.amax(-1).isfinite()  # NaN and inf win, and -inf only where nothing is left to choose
        self.spoilt = spoilt if self.spoilt is None else self.spoilt | spoilt
        return scores.masked_fill(spoilt[:, None], 0.0)


class _Clock(StoppingCriteria):
    """Counts steps, and stops all rows at the deadline."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.steps = 0
        self.rang = False

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.steps += 1
        self.rang = time.monotonic() >= self.deadline
        return torch.full((len(input_ids),), self.rang, device=input_ids.device)


class Generator:
    """Writes a text for each encoding, whose key is its `Decoding`.

    Args:
        model: an encoder-decoder.
        most: most new tokens of a text; fewer where the model's positions end before.

    Attributes:
        limit: most new tokens of a text.
        apart: whether the model's own settings make padding of a source change its text, so that each runs alone.
        pace: what is known of costs and lengths.
    """

    def __init__(self, model: Model, most: int) -> None:
        self.model = model
        self.generation: dict[str, Any] = model.net.generation_config.to_dict()
        positions = _positions(model.net.config)
        self.limit = most if positions is None else min(most, positions - 1)
        self.apart = any((self.generation.get(name) or none) != none for name, none in _READ_SOURCES.items())
        ends = self.generation.get("eos_token_id")
        self._ends = torch.tensor([] if ends is None else ends, device=model.device).reshape(-1)
        self.pace = Pace(_LEAST, _LEAST)
        self._worked = 0.0

    def defaults(self, specific: dict[str, Any]) -> Decoding:
        """What the model does by itself, with `specific` settings of one of its tasks on top."""
        known = dict(self.generation)
        for end in ("max", "min"):  # of two names for the same, the specific one
            if {f"{end}_length", f"{end}_new_tokens"} & specific.keys():
                known |= {f"{end}_length": None, f"{end}_new_tokens": None}
        return defaults(known | specific, self.limit)

    def limits(self, decoding: Decoding) -> Limits:
        """What one micro-batch may hold: rows and positions, beams counted, and a launch that costs all its steps."""
        limits = self.model.limits()
        beams = decoding.num_beams
        factor = POSITIONS_PER_TOKEN if self.model.config.max_batch_tokens is None else 1
        positions = max(1, limits.max_tokens * factor // beams)
        steps = self.pace.steps(self.pace.length, decoding)
        launch = limits.launch_cost + steps * self.pace.step
        # Longer sources mean more steps for all rows: a token of padding costs that, too
        token = 1 + steps / self.pace.length * beams * self.pace.row
        return replace(
            limits,
            max_tokens=positions,
            max_items=max(1, min(limits.max_items // beams, positions // decoding.max_length)),
            launch_cost=round(launch / token),
        )

    def seconds(self, encodings: Sequence[Encoding]) -> float:
        """Predicted time of writing texts for these encodings, in seconds."""
        lengths, keys = [len(encoding) for encoding in encodings], [encoding.key for encoding in encodings]
        plan = batching.plan_apart(lengths, keys, self.limits)  # type: ignore[arg-type]
        work = 0.0
        for batch in plan:
            decoding = encodings[batch.indices[0]].key
            assert isinstance(decoding, Decoding)
            rows = len(batch.indices) * decoding.num_beams
            work += batch.tokens + self.pace.work(self.pace.steps(batch.length, decoding), rows)
        return self.model.costs.seconds(math.ceil(work), len(plan))

    def write(self, encodings: Sequence[Encoding], precise: bool, deadline: float) -> list[Tensor | RequestError]:
        """Write texts at once.

        Args:
            encodings: of equal keys.
            precise: run in fp32 whatever the model's dtype.
            deadline: `time.monotonic()` after which no further step is begun.

        Returns:
            Per encoding the new tokens' ids, an end at most as the last one; NaN where scores overflow; Overloaded
            (503) where the deadline came first.
        """
        decoding = encodings[0].key
        assert isinstance(decoding, Decoding)
        guard, clock = _Guard(), _Clock(deadline)
        with self._seeded(decoding.seed):
            ids = self.model.generate(
                encodings,
                precise=precise,
                logits_processor=LogitsProcessorList([guard]),
                stopping_criteria=StoppingCriteriaList([clock]),
                **decoding.settings(),
            )[:, 1:]
        self._worked += self.pace.work(clock.steps, len(encodings) * decoding.num_beams)
        if not clock.rang:
            self.pace = self.pace.after(clock.steps, max(map(len, encodings)))
        assert guard.spoilt is not None
        spoilt = guard.spoilt.reshape(len(encodings), -1).any(1).tolist()
        ends = torch.isin(ids, self._ends)
        rows: list[Tensor | RequestError] = []
        for row, end, bad in zip(ids, ends, spoilt, strict=True):
            ended = bool(end.any())
            full = len(row) == decoding.max_length - 1
            if bad:
                rows.append(torch.full((1,), torch.nan))
            elif clock.rang and (decoding.num_beams > 1 or not (ended or full)):
                rows.append(
                    Overloaded("the text was not finished in time; ask for less, or try again.", code="deadline")
                )
            else:
                rows.append(row[: int(end.int().argmax()) + 1] if ended else row)
        return rows

    def fit(self) -> None:
        """Time decoding steps, once the encoder's costs are known."""
        long = min(STEPS, self.limit)
        short = max(1, long // 3)
        source = self.model.tokens.encode([Text("a " * 32)])[0]
        assert isinstance(source, list)
        sides = [(rows, steps) for rows in (1, ROWS) for steps in (short, long)]
        timed = [[self._timed(source * rows, steps) for rows, steps in sides] for _ in range(ROUNDS)]
        few_short, few_long, many_short, many_long = (min(side) for side in zip(*timed, strict=True))
        span = max(1, long - short) * self.model.costs.seconds_per_token
        few, many = max(_LEAST, (few_long - few_short) / span), (many_long - many_short) / span  # tokens per step
        row = min(max(_LEAST, (many - few) / (ROWS - 1)), few / 2)  # a busy machine must not make a step look free
        self.pace = replace(self.pace, step=few - row, row=row)

    def learn(self, tokens: int, launches: int, seconds: float) -> None:
        """Correct the costs by what a batch has just taken, its encoder having run `tokens`."""
        self.model.costs = self.model.costs.after(tokens + round(self._worked), launches, seconds)
        self._worked = 0.0

    def _timed(self, encodings: Sequence[Encoding], steps: int) -> float:
        """Seconds of exactly `steps` steps."""
        start = time.perf_counter()
        decoding = Decoding(max_length=steps + 1, min_length=steps + 1)
        self.model.generate(encodings, **decoding.settings()).cpu()
        return time.perf_counter() - start

    @contextlib.contextmanager
    def _seeded(self, seed: int | None) -> Iterator[None]:
        """Random numbers of this seed, and the old ones again behind it."""
        if seed is None:
            yield
            return
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield


def _positions(config: Any) -> int | None:
    """Rows of the decoder's table of positions; None without one."""
    text = config.get_text_config(decoder=True)
    for name in ("max_decoder_position_embeddings", "max_position_embeddings"):
        rows = getattr(text, name, None)
        if isinstance(rows, int):
            return rows
    return None
