"""Tiny decoder-only models with random weights, written to disk as a hub would deliver them; and transformers alone."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from tests.models import CHARACTERS, WORDS, write_json

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|user|>{{ message['role'] }}: {{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Calls of functions as Hermes and Qwen write them …
HERMES = (
    "{% if tools %}<|user|>tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</s>{% endif %}"
    "{% for message in messages %}<|user|>{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
# … and as Llama 3 does
LLAMA = (
    "{% if tools %}<|user|>tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</s>{% endif %}"
    "{% for message in messages %}<|user|>{{ message.role }}: "
    "{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def write_tokenizer(directory: Path, *, template: str | None = TEMPLATE, marks: Sequence[str] = ()) -> int:
    """Write a byte-level BPE tokenizer with a few words, and `marks` as tokens; returns the vocabulary's size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS), " " + " ".join(WORDS), CHARACTERS], trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
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
    marks: Sequence[str] = (),
    family: str = "Llama",
    positions: int = 512,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a 2-layer decoder of width 32 to `directory` (made if need be) and return it.

    Args:
        directory: where the model goes.
        template: the chat template; None for none.
        marks: texts that are tokens of their own, not special ones.
        family: the prefix of transformers' classes: Llama, Qwen2, Mistral …
        positions: the longest context.
        seed: another seed, other weights.
        changes: of the configuration.
    """
    import transformers

    vocabulary = write_tokenizer(directory, template=template, marks=marks)
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


class Oracle:
    """transformers' `generate`, greedy, one request alone.

    Args:
        directory: the model's files.
        dtype: to load it in.
    """

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def ids(self, prompt: str | list[int], max_tokens: int, **options: Any) -> list[int]:
        """The tokens that follow a prompt, the end of text included."""
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        given = torch.tensor([ids])
        out = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=max_tokens, do_sample=False, **options
        )
        return out[0, len(ids) :].tolist()

    def text(self, prompt: str | list[int], max_tokens: int, **options: Any) -> str:
        """The text that follows a prompt."""
        return self.tokenizer.decode(self.ids(prompt, max_tokens, **options), skip_special_tokens=True)

    def logprobs(self, prompt: list[int], max_tokens: int) -> tuple[list[int], torch.Tensor]:
        """The tokens that follow a prompt, and the log-probabilities (tokens, vocabulary) that they were chosen by."""
        given = torch.tensor([prompt])
        out = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=max_tokens, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float().log_softmax(-1)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A chat's prompt."""
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


class OpenAIPenalties(LogitsProcessor):
    """OpenAI's formula of the presence and frequency penalties, for `generate`.

    Args:
        prompt_tokens: what came before the answer, which the penalties do not count.
        presence, frequency: the penalties.
    """

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._begin, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores of the next token, each token's count taken off."""
        counts = torch.zeros_like(scores).scatter_add_(
            1, input_ids[:, self._begin :], torch.ones_like(input_ids[:, self._begin :], dtype=scores.dtype)
        )
        return scores - self._presence * (counts > 0) - self._frequency * counts


def prompts(count: int, seed: int) -> list[tuple[str, int]]:
    """Prompts with the tokens to generate, of mixed lengths."""
    chosen = random.Random(seed)
    words = ["the", "cat", "dog", "house", "plays", "guitar", "über", "漢字", "x", "12", "🦙", "--", "red"]
    return [
        (" ".join(chosen.choices(words, k=chosen.choice([1, 2, 5, 12, 22]))), chosen.choice([1, 3, 12, 30, 48]))
        for _ in range(count)
    ]
