"""Whether a model answers alike however its texts are laid out, and heads that read whole texts over packed ones."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from handlers.tokens import Layout


def agree(expected: Tensor, found: Tensor, dtype: torch.dtype) -> bool:
    """Whether two (tokens or texts, …) outputs are equal but for rounding in `dtype`."""
    if expected.shape != found.shape or not bool(torch.isfinite(found).all()):
        return False
    if dtype == torch.float32:
        return bool(torch.allclose(expected, found, rtol=1e-4, atol=1e-4 * float(expected.abs().max())))
    near = float((expected - found).norm()) <= 0.14 * float(expected.norm())  # as far as 0.99 is of a cosine
    return near and bool((nn.functional.cosine_similarity(expected, found, dim=-1) > 0.99).all())


@contextlib.contextmanager
def unpacked(net: Any, layout: Layout) -> Iterator[None]:
    """Let a head that reads whole texts see a packed row as the padded texts that it stands for.

    While this lasts, the states that leave the encoder, (1, tokens, dimension), reach the head as (texts, longest,
    dimension), zeros behind the shorter ones, and the encoder's own pooler, if it has one, runs over those. Heads look
    at a text's first token or, padded with a mask, at all: the probe at start-up shows whether this one is content.
    """

    def spread(module: Any, _: Any, output: Any) -> Any:
        states = nn.utils.rnn.pad_sequence(output.last_hidden_state[0].split(layout.lengths), batch_first=True)
        output.last_hidden_state = states
        pooler = getattr(module, "pooler", None)
        if output.get("pooler_output") is not None and pooler is not None:
            beside = getattr(module, "pooler_activation", None)  # ALBERT's: its pooler is a bare linear layer
            output.pooler_output = pooler(states) if beside is None else beside(pooler(states[:, 0]))
        return output

    hook = net.base_model.register_forward_hook(spread)
    try:
        yield
    finally:
        hook.remove()
