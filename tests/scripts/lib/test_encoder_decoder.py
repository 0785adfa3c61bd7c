"""What an encoder-decoder's files say of lengths."""

from pathlib import Path
from typing import Any

import pytest

from scripts.lib.encoder_decoder import settings
from tests.models import write_json


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({"model_type": "t5", "n_positions": 300}, {}, {}, {"max_tokens": 300}),
        ({"model_type": "mt5"}, {}, {"model_max_length": 1e30}, {"max_tokens": 512}),
        ({"model_type": "t5"}, {}, {"model_max_length": 256}, {}),
        ({"model_type": "bart"}, {"max_length": 142}, {}, {}),
        ({"model_type": "bart"}, {"max_length": 1025}, {}, {"max_new_tokens": 1024}),
        ({"model_type": "bart", "max_length": 901}, None, {}, {"max_new_tokens": 900}),
        ({"model_type": "bart"}, {"max_new_tokens": 700, "max_length": 5}, {}, {"max_new_tokens": 700}),
        ({"model_type": "bart", "task_specific_params": {"s": {"max_length": 601}}}, {}, {}, {"max_new_tokens": 600}),
    ],
)
def test_lengths(
    tmp_path: Path,
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    tokenizer: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    files = {"tokenizer_config.json": tokenizer} | (
        {} if generation is None else {"generation_config.json": generation}
    )
    for name, content in files.items():
        write_json(tmp_path / name, content)
    found, notes = settings({name: tmp_path / name for name in files}, config)
    assert found == expected
    assert bool(notes) == ("max_tokens" in expected)
