"""What forward passes cost on this device: fitted once, and followed while the model serves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from handlers.tokens import Encoding

# Largest launch cost that a fit may find, in tokens: a hiccup while timing must not talk the planner into padding.
MAX_LAUNCH_COST = 8192
ROUNDS = 5  # of the fit
SLOWEST = 4  # times the expected cost: what is slower is a stall


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


def fitted(timed: Callable[[Sequence[Encoding]], float], small: Sequence[Encoding], large: Sequence[Encoding]) -> Costs:
    """Costs by two micro-batches.

    Args:
        timed: runs a micro-batch and says how many seconds that took.
        small, large: of few and of many tokens.
    """
    tokens = [sum(len(encoding) for encoding in batch) for batch in (small, large)]
    # In turn, and the least of several: a busy moment then spoils neither side
    rounds = [[timed(batch) for batch in (small, large)] for _ in range(ROUNDS)]
    seconds = [min(side) for side in zip(*rounds, strict=True)]
    slope = max(1e-9, (seconds[1] - seconds[0]) / (tokens[1] - tokens[0]))
    launch = round(max(0.0, seconds[0] / slope - tokens[0]))
    return Costs(slope, min(launch, MAX_LAUNCH_COST))
