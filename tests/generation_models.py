"""Tiny decoder-only models with random weights, written to disk as a hub would deliver them."""

from pathlib import Path
from typing import Any

from tests.models import CHARACTERS, WORDS, write_json

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|user|>{{ message['role'] }}: {{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path, *, template: str | None = TEMPLATE) -> int:
    """Write a byte-level BPE tokenizer with a few words; returns the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS), " " + " ".join(WORDS), CHARACTERS], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    if template is not None:
        config["chat_template"] = template
    write_json(directory / "tokenizer_config.json", config)
    return int(tokenizer.get_vocab_size())


def tiny_llama(
    directory: Path,
    *,
    template: str | None = TEMPLATE,
    family: str = "Llama",
    positions: int = 512,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a 2-layer decoder of width 32 to `directory` (made if need be) and return it.

    Args:
        directory: where the model goes.
        template: the chat template; None for none.
        family: the prefix of transformers' classes: Llama, Qwen2, Mistral …
        positions: the longest context.
        seed: another seed, other weights.
        changes: of the configuration.
    """
    import torch
    import transformers

    vocabulary = write_tokenizer(directory, template=template)
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions,
        "initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if family == "GPT2":  # it has no key heads of its own, and other names for the rest
        names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
        shape = {"vocab_size": vocabulary, "n_positions": positions, **{new: shape[old] for new, old in names.items()}}
        shape |= {"initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**{**shape, **changes})
    model = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    getattr(transformers, model)(config).eval().save_pretrained(directory)
    return directory
