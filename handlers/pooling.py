"""Token states → one vector per text, in fp32 whatever the model runs in.

The modes are sentence-transformers'. They work on a flat (tokens, dimension) tensor and a Layout, so that packed and
padded states are pooled by the same code, and a non-finite token can only spoil its own text.
"""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from handlers.tokens import Layout

SPLADE_SLICE = 1 << 25  # scores of a vocabulary that are held at once: 128 MB of fp32


def pool(hidden: Tensor, layout: Layout, modes: Sequence[str]) -> Tensor:
    """Pool each text's tokens.

    Args:
        hidden: (tokens, dimension), padding included where the layout is padded.
        layout: where each text lies.
        modes: pooling modes; several are concatenated.

    Returns:
        (texts, dimension × modes), fp32.
    """
    # A prompt that truncation left alone would leave nothing to pool: its last token stays.
    skips = [min(skip, length - 1) for skip, length in zip(layout.skips, layout.lengths, strict=True)]
    starts = [start + skip for start, skip in zip(layout.starts, skips, strict=True)]
    lengths = [length - skip for length, skip in zip(layout.lengths, skips, strict=True)]
    return torch.cat([_pooled(hidden, mode, starts, lengths, skips) for mode in modes], dim=-1)


def _pooled(hidden: Tensor, mode: str, starts: list[int], lengths: list[int], skips: list[int]) -> Tensor:
    if mode in ("cls", "lasttoken"):
        at = starts if mode == "cls" else [s + n - 1 for s, n in zip(starts, lengths, strict=True)]
        return hidden[torch.tensor(at, device=hidden.device)].float()
    states = _tokens_of(hidden, starts, lengths).float()
    sizes = torch.tensor(lengths, device=hidden.device)
    if mode == "max":
        return torch.segment_reduce(states, "max", lengths=sizes, axis=0)
    if mode == "weightedmean":
        # A token's weight is its place in the text as tokenised, prompt counted
        places = [k for n, skip in zip(lengths, skips, strict=True) for k in range(skip + 1, skip + n + 1)]
        weights = torch.tensor(places, device=hidden.device, dtype=torch.float32)
        total = torch.segment_reduce(weights, "sum", lengths=sizes)
        return torch.segment_reduce(states * weights[:, None], "sum", lengths=sizes, axis=0) / total[:, None]
    sums = torch.segment_reduce(states, "sum", lengths=sizes, axis=0)
    return sums / (sizes.sqrt() if mode == "mean_sqrt_len_tokens" else sizes)[:, None]


def _tokens_of(hidden: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
    """The named stretches of `hidden`, one behind the other."""
    if starts[0] == 0 and all(s + n == t for s, n, t in zip(starts, lengths, starts[1:], strict=False)):
        return hidden[: starts[-1] + lengths[-1]]
    spans = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    return hidden[torch.cat(spans).to(hidden.device)]


def splade(
    hidden: Tensor,
    layout: Layout,
    head: Callable[[Tensor], Tensor],
    *,
    vocabulary: int,
    strategy: str = "max",
    activation: str = "relu",
) -> Tensor:
    """Pool each text's scores of the vocabulary: one weight per word (Formal et al. 2021, SPLADE).

    The scores of all tokens together may take gigabytes, so `head` makes them for a slice of the tokens at a time.

    Args:
        hidden: (tokens, dimension), padding included where the layout is padded.
        layout: where each text lies.
        head: states of some tokens → their fp32 scores, (tokens, vocabulary).
        vocabulary: words that the head scores.
        strategy: `max` or `sum` over a text's tokens of log(1 + max(0, score)).
        activation: `relu`, or `log1p_relu` for a second log(1 + …) of each.

    Returns:
        (texts, vocabulary), fp32.
    """
    states = _tokens_of(hidden, layout.starts, layout.lengths)
    ends = list(accumulate(layout.lengths))
    pooled = torch.zeros(len(ends), vocabulary, device=hidden.device)  # no activation is below 0
    step = max(1, SPLADE_SLICE // vocabulary)
    text = 0
    for start in range(0, len(states), step):
        scores = head(states[start : start + step])
        if strategy == "sum":
            scores = _activated(scores, activation)
        at = start
        while at < start + len(scores):
            until = min(ends[text], start + len(scores))
            part = scores[at - start : until - start]
            if strategy == "sum":
                pooled[text] += part.sum(0)
            else:
                torch.maximum(pooled[text], part.amax(0), out=pooled[text])
            at = until
            text += until == ends[text]
    # An activation never falls, so that the largest score has the largest one
    return pooled if strategy == "sum" else _activated(pooled, activation)


def _activated(scores: Tensor, activation: str) -> Tensor:
    """In place."""
    weights = scores.relu_().log1p_()
    return weights.log1p_() if activation == "log1p_relu" else weights


class Dense(nn.Module):
    """A linear layer with an activation behind the pooling, as sentence-transformers' `Dense`.

    Args:
        directory: holds `config.json` and `model.safetensors`.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        inside, outside = config["in_features"], config["out_features"]
        self.linear = nn.Linear(inside, outside, bias=config.get("bias", True))
        self.activation = _activation(config.get("activation_function", "torch.nn.Tanh"))
        self.use_residual = bool(config.get("use_residual"))
        self.residual: nn.Module = nn.Identity()
        if self.use_residual and inside != outside:
            self.residual = nn.Linear(inside, outside, bias=False)
        self.load_state_dict(load_file(directory / "model.safetensors"))

    def forward(self, x: Tensor) -> Tensor:
        """(texts, in) → (texts, out)."""
        out: Tensor = self.activation(self.linear(x))
        return out + self.residual(x) if self.use_residual else out


def _activation(path: str) -> nn.Module:
    """An activation of torch.nn by its dotted name; nothing else is ever imported."""
    package, _, name = path.rpartition(".")
    kind: Any = getattr(nn, name, None)
    if not package.startswith("torch.nn") or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"activation {path!r} is not a module of torch.nn")
    return kind()


class Head(nn.Module):
    """Pooling and the dense layers behind it.

    Args:
        modes: pooling modes.
        dense: directories of dense layers, in order.
    """

    def __init__(self, modes: Sequence[str], dense: Sequence[Path] = ()) -> None:
        super().__init__()
        self.modes = tuple(modes)
        self.layers = nn.Sequential(*(Dense(directory) for directory in dense))

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """(tokens, dimension) → (texts, embedding dimension), fp32."""
        vectors: Tensor = self.layers(pool(hidden, layout, self.modes))
        return vectors


def finish(vector: Tensor, *, normalize: bool, dimensions: int | None) -> Tensor:
    """Cut (…, dimension) vectors to their first `dimensions` and scale them to unit length where wished.

    Cutting first and normalising after is what OpenAI's `dimensions` means (Matryoshka representations,
    Kusupati et al. 2022).
    """
    if dimensions is not None:
        vector = vector[..., :dimensions]
    return torch.nn.functional.normalize(vector, dim=-1) if normalize else vector
