from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, ModernBertConfig, ModernBertModel

from handlers.config import HandlerConfig
from handlers.model import Costs, Model
from handlers.tokens import Encoding, Text
from tests.families import family
from tests.models import HIDDEN, tiny_bert, write_tokenizer

TEXTS = ["the cat", "the cat [PAD] plays guitar", "a dog runs in the old house " * 5, "x"]


def config(**settings: Any) -> HandlerConfig:
    return HandlerConfig.from_mapping({"task": "embedding", "max_tokens": 48, **settings})


def encoded(model: Model, texts: list[str]) -> list[Encoding]:
    return [e for slot in model.tokens.encode([Text(text) for text in texts]) if isinstance(slot, list) for e in slot]


def states(model: Model, encodings: list[Encoding], **options: bool) -> list[torch.Tensor]:
    hidden, layout = model.hidden(encodings, **options)
    return [hidden[s : s + n] for s, n in zip(layout.starts, layout.lengths, strict=True)]


def direct(directory: Path, encodings: list[Encoding]) -> list[torch.Tensor]:
    """The oracle: transformers, one text at a time."""
    net: Any = AutoModel.from_pretrained(directory).eval()
    with torch.inference_mode():
        return [net(input_ids=torch.tensor([e.ids])).last_hidden_state[0] for e in encodings]


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "distilbert"])
def test_packed_states_are_those_of_each_text_alone(tmp_path: Path, family: str) -> None:
    """Also with a padding token in the text, which RoBERTa's numbering of positions leaves out."""
    model = Model(tiny_bert(tmp_path, family=family), config())
    assert model.packed, model.why_padded
    encodings = sorted(encoded(model, TEXTS), key=len)
    for found, expected in zip(states(model, encodings), direct(tmp_path, encodings), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "mpnet", "electra", "modernbert", "albert"])
def test_a_head_alone_gives_the_logits_of_the_whole_model(tmp_path: Path, name: str) -> None:
    model = Model(family(tmp_path, name, head="masked-lm"), config(), architecture="AutoModelForMaskedLM")
    encodings = encoded(model, TEXTS[:2])
    expected, layout = model.logits(encodings)
    wanted = [start + 2 for start in layout.starts]
    torch.testing.assert_close(model.head(model.hidden(encodings)[0][wanted]), expected[wanted], rtol=0, atol=1e-5)
    torch.testing.assert_close(model.logits(encodings)[0], expected)


def test_a_head_runs_in_fp32_on_fp32_states(tmp_path: Path) -> None:
    directory = family(tmp_path, "bert", head="masked-lm")
    half, full = (
        Model(directory, config(dtype=d), architecture="AutoModelForMaskedLM") for d in ("float16", "float32")
    )
    states = full.hidden(encoded(full, TEXTS[:1]))[0]
    torch.testing.assert_close(half.head(states), full.head(states), rtol=0, atol=1e-2)
    assert half.net.dtype == torch.float16


def modern_bert(directory: Path, window: int) -> Path:
    torch.manual_seed(0)
    write_tokenizer(directory, model_max_length=512, types=False)
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    net = ModernBertModel(
        ModernBertConfig(vocab_size=140, max_position_embeddings=512, local_attention=window, **shape, **special)
    )
    net.save_pretrained(directory)
    return directory


def test_a_window_that_the_probe_meets_is_run_padded(tmp_path: Path) -> None:
    model = Model(modern_bert(tmp_path, 16), config(max_tokens=400))
    assert not model.packed
    assert "window" in model.why_padded
    encodings = sorted(encoded(model, [*TEXTS, "the cat sits " * 60]), key=len)
    for found, expected in zip(states(model, encodings), direct(tmp_path, encodings), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_window_that_only_a_long_text_meets_is_run_padded_from_then_on(tmp_path: Path) -> None:
    model = Model(modern_bert(tmp_path, 620), config(max_tokens=500))
    assert model.packed
    encodings = encoded(model, ["the cat", "the cat sits " * 150])
    for found, expected in zip(states(model, encodings), direct(tmp_path, encodings), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not model.packed
    assert model.limits().packed is False


def test_packing_that_is_insisted_on_but_impossible_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be packed"):
        Model(modern_bert(tmp_path, 16), config(max_tokens=400, attention="packed"))


def test_running_precisely_changes_nothing_for_later(tmp_path: Path) -> None:
    """Buffers that are fp32 in a half model (rotary frequencies) stay so, and so do its weights."""
    model = Model(modern_bert(tmp_path, 620), config(dtype="bfloat16"))
    encodings = encoded(model, TEXTS)
    before = states(model, encodings)
    dtypes = {name: tensor.dtype for name, tensor in model.net.state_dict().items()}
    buffers = {name: tensor.dtype for name, tensor in model.net.named_buffers()}
    precise = states(model, encodings, precise=True)
    assert precise[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(before, states(model, encodings), strict=True))
    assert dtypes == {name: tensor.dtype for name, tensor in model.net.state_dict().items()}
    assert buffers == {name: tensor.dtype for name, tensor in model.net.named_buffers()}


def test_memory_that_is_short_at_the_start_makes_smaller_micro_batches(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tiny_model, config())
    whole = model._states

    def short(net: Any, inputs: Any, layout: Any) -> Any:
        if sum(layout.lengths) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(net, inputs, layout)

    monkeypatch.setattr(model, "_states", short)
    model.fit()
    assert model.limits().max_tokens == 256
    monkeypatch.setattr(model, "_states", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(torch.OutOfMemoryError):
        model.fit()


def test_costs_follow_what_is_measured() -> None:
    costs = Costs(seconds_per_token=0.01, launch_cost=100)
    assert costs.seconds(400, launches=2) == pytest.approx(6.0)
    after = costs.after(tokens=400, launches=2, seconds=12.0)
    assert after.seconds_per_token == pytest.approx(0.8 * 0.01 + 0.2 * 0.02)
    assert costs.after(tokens=0, launches=0, seconds=5.0) == costs, "a batch in which nothing ran says nothing"
    stalled = costs.after(tokens=400, launches=2, seconds=10_000.0)
    assert stalled.seconds_per_token == pytest.approx(0.016)
    for _ in range(20):
        stalled = stalled.relaxed()
    assert stalled.seconds_per_token < 0.003, "refusals alone lead back to where work is tried again"
