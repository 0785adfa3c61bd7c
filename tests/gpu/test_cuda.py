"""What only a CUDA device shows: half precision, the varlen kernel, real out-of-memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from handlers.config import HandlerConfig
from handlers.model import Model
from handlers.pooling import Head
from handlers.runner import Tally, run
from handlers.tokens import Text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TEXTS = ["the cat", "a dog runs in the old house and eats " * 8, "hello", "", "the young woman plays guitar"]


def vectors(model: Model, texts: list[str]) -> np.ndarray[Any, Any]:
    encodings = [e for slot in model.tokens.encode([Text(t) for t in texts]) if isinstance(slot, list) for e in slot]
    order = sorted(range(len(encodings)), key=lambda i: len(encodings[i]))
    hidden, layout = model.hidden([encodings[i] for i in order])
    rows = Head(["mean"])(hidden, layout).cpu().numpy()
    out = np.empty_like(rows)
    out[order] = rows
    return out


def config(**settings: Any) -> HandlerConfig:
    return HandlerConfig.from_mapping({"task": "embedding", "max_tokens": 48, **settings})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_packed_on_cuda_equals_padded_on_the_cpu(tiny_model: Path, dtype: str) -> None:
    cpu = vectors(Model(tiny_model, config()), TEXTS)
    model = Model(tiny_model, config(dtype=dtype), gpu_id=0)
    assert model.packed, model.why_padded
    cuda = vectors(model, TEXTS)
    cosine = np.sum(cpu * cuda, axis=1) / np.linalg.norm(cpu, axis=1) / np.linalg.norm(cuda, axis=1)
    assert (cosine > (0.99999 if dtype == "float32" else 0.999)).all()


def test_auto_is_float16_and_gpu_0_is_a_device(tiny_model: Path) -> None:
    model = Model(tiny_model, config(), gpu_id=0)
    assert (model.dtype, model.device) == (torch.float16, torch.device("cuda:0"))


def test_real_out_of_memory_is_halved(tiny_model: Path) -> None:
    model = Model(tiny_model, config(), gpu_id=0)
    model.fit()
    encodings = [e for slot in model.tokens.encode([Text(t) for t in TEXTS]) if isinstance(slot, list) for e in slot]
    free = torch.cuda.mem_get_info()[0]

    def forward(batch: Any, precise: bool) -> torch.Tensor:
        if len(batch) > 1:
            torch.empty(free * 2, dtype=torch.uint8, device="cuda")
        hidden, layout = model.hidden(batch, precise=precise)
        return Head(["mean"])(hidden, layout)

    from handlers.batching import plan

    tally = Tally()
    rows = run(encodings, plan([len(e) for e in encodings], model.limits()), forward, tally=tally)
    assert tally.splits > 0
    assert all(isinstance(row, torch.Tensor) for row in rows)
