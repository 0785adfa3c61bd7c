"""Messages and texts → token ids, refused early where they cannot fit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from handlers.errors import RequestError
from handlers.generation import rules
from handlers.generation.calls import Format, NoCalls, find_format
from handlers.generation.messages import Message, characters
from handlers.generation.requests import Generation, Prompt

CHARACTERS_PER_TOKEN = 64  # more than any text has; what is longer is not tokenised at all


class Prompts:
    """A model's tokenizer, chat template and ends of text.

    Args:
        directory: the model's files.
        max_model_len: most tokens of a prompt and its answer together.
        trust_remote_code: whether code in the directory may run.

    Attributes:
        tokenizer: transformers' own.
        end: token ids that end a text.
        calls: how the model writes calls of functions; None where it writes none, or in a way that is not known.
    """

    def __init__(self, directory: Path, max_model_len: int, *, trust_remote_code: bool = False) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
        self.max_model_len = max_model_len
        self.end = _end(directory, self.tokenizer, trust_remote_code)
        self.calls, self._no_calls = self._find_calls()

    def encode(self, generation: Generation) -> list[tuple[int, ...]]:
        """The token ids of each prompt.

        Raises:
            RequestError: there is no chat template, it refuses the messages, or a prompt leaves no room for an answer.
        """
        if generation.shape == "chat":
            prompts: Sequence[Prompt] = (self._chat(generation),)
            names = [generation.field]
        else:
            prompts = generation.prompts
            several = len(prompts) > 1
            names = [f"{generation.field}[{i}]" if several else generation.field for i in range(len(prompts))]
        chat = generation.shape == "chat"
        encoded = [self._ids(prompt, name, chat) for prompt, name in zip(prompts, names, strict=True)]
        for ids, name in zip(encoded, names, strict=True):
            self._check(len(ids), generation.max_tokens, name)
        return encoded

    def room(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """Most tokens of the answer."""
        return self.max_model_len - len(prompt) if max_tokens is None else max_tokens

    def rules(self, generation: Generation) -> str | None:
        """What each answer must follow, see the module `rules`; None where it may be any text."""
        if generation.schema is not None:
            return rules.json_answer(generation.schema)
        if self.calls is None or not generation.toolbox.callable:
            return None
        tokens = self.calls.tokens(self.tokenizer.added_tokens_encoder)
        return rules.calls(self.calls, generation.toolbox, tokens, self.end)

    def _find_calls(self) -> tuple[Format | None, str]:
        """How calls are written, or why there are none."""
        try:
            ends = [self.tokenizer.decode([token]) for token in self.end]
            return find_format(self._render, ends) if self.tokenizer.chat_template is not None else None, ""
        except NoCalls as error:
            return None, str(error)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], answer: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=answer,
        )
        return text

    def _chat(self, generation: Generation) -> str:
        messages = generation.messages
        tools = [tool.definition() for tool in generation.toolbox.tools]
        if self.tokenizer.chat_template is None:
            raise RequestError(
                "The model has no chat template; use v1/completions.", code="no_chat_template", param="messages"
            )
        if self.calls is None and (tools or any("tool_calls" in message for message in messages)):
            param = "tools" if tools else "messages"
            raise RequestError(
                f"{param} with calls cannot be served: {self._no_calls}.", code="unsupported_parameter", param=param
            )
        # before the template, which takes time too
        self._check_characters(characters(messages), "messages")
        self._check_characters(sum(len(json.dumps(tool)) for tool in tools), "tools")
        try:
            text = self._render(messages, tools, True)
        except Exception:  # noqa: BLE001 - what a template raises is its own; its filters raise what Python does
            # What a template says is about the order of roles; it may quote, so it is not passed on
            raise RequestError(
                "The model's chat template refuses these messages; often the roles must alternate, or a system message "
                "is not allowed.",
                code="template_refused",
                param="messages",
            ) from None
        if not text:
            raise RequestError(
                "The chat template makes no text of these messages.", code="empty_prompt", param="messages"
            )
        return text

    def _ids(self, prompt: Prompt, name: str, chat: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        self._check_characters(len(prompt), name)
        # a template writes the special tokens itself
        ids = tuple(self.tokenizer(prompt, add_special_tokens=not chat, truncation=False)["input_ids"])
        if not ids:
            raise RequestError(f"{name} has no tokens.", code="empty_prompt", param=name)
        return ids

    def _check_characters(self, characters: int, name: str) -> None:
        if characters > CHARACTERS_PER_TOKEN * self.max_model_len:
            raise RequestError(
                f"{name} has {characters} characters; the model's context of {self.max_model_len} tokens never holds "
                "so many.",
                code="context_length_exceeded",
                param=name,
            )

    def _check(self, tokens: int, max_tokens: int | None, name: str) -> None:
        if tokens + (max_tokens or 1) > self.max_model_len:
            asked = f" and max_tokens {max_tokens}" if max_tokens is not None else ", so that no answer fits"
            raise RequestError(
                f"{name} has {tokens} tokens{asked}; the model's context is {self.max_model_len} tokens.",
                code="context_length_exceeded",
                param=name,
            )


def _end(directory: Path, tokenizer: Any, trust_remote_code: bool) -> frozenset[int]:
    """Tokens that end a text: generation_config.json's, else config.json's, and the tokenizer's own."""
    found: list[Any] = []
    if (directory / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id)
    if not found or found[0] is None:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
        found.append(getattr(config.get_text_config(), "eos_token_id", None))
    found.append(tokenizer.eos_token_id)
    flat = [token for item in found for token in (item if isinstance(item, list | tuple) else [item])]
    return frozenset(token for token in flat if isinstance(token, int) and token >= 0)
