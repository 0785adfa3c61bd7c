"""One request's way: its sequences' texts as they grow, and its answer, whole or as a stream."""

import time
from collections.abc import Sequence
from typing import Any

from handlers.errors import RequestError, TooLarge
from handlers.generation.call_reader import CallReader
from handlers.generation.calls import Call, Format
from handlers.generation.detokenizer import Detokenizer, StopStrings
from handlers.generation.engine import Constraint, Finish, Output, Token
from handlers.generation.requests import Generation
from handlers.generation.responses import Logprob, Piece, Usage, Writer


class Choice:
    """One sequence's text.

    Args:
        tokenizer: transformers' tokenizer.
        context: the prompt that the text continues; empty for a chat's answer, which begins a text of its own.
        generation: what was asked.
        end: token ids that end a text.
        calls: how the model writes calls of functions, where it may write some.
        constraint: what the text must follow, if anything.

    Attributes:
        tokens: generated so far.
        finish: why it has ended; None while it goes on.
        first, last: when its first and its latest tokens came, `time.monotonic`; 0 before.
    """

    def __init__(
        self,
        tokenizer: Any,
        context: Sequence[int],
        generation: Generation,
        end: frozenset[int],
        calls: Format | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, context)
        self._stops = StopStrings(generation.stop)
        self._least = generation.sampling.min_tokens
        self._end = end
        self._decoded = 0  # characters, those that are held back included
        self._text: list[str] = []
        self._logprobs: list[Logprob] | None = None if generation.sampling.logprobs is None else []
        self._reader = None if calls is None else CallReader(calls)
        self._calls: list[Call] = []
        # special ones among them are no text to the tokenizer
        tokens = {} if calls is None else calls.tokens(tokenizer.added_tokens_encoder)
        self._marks = {token: text for text, token in tokens.items()}
        self.constraint = constraint
        self.tokens = 0
        self.finish: Finish | None = None
        self.first = self.last = 0.0

    def add(self, tokens: Sequence[Token], finish: Finish | None) -> None:
        """Take what the engine brought; nothing counts behind a stop string."""
        if tokens and self.finish is None:
            self.last = time.monotonic()
            self.first = self.first or self.last
        for token in tokens:
            if self.finish is not None:
                return
            self.tokens += 1
            self._count(token)
            if token.id in self._end:
                continue  # an end is no text, whether or not it ends this one
            if token.id in self._marks:
                self._show(self._detokenizer.rest() + self._marks[token.id])
            else:
                self._show(self._detokenizer.add(token.id))
        if finish is not None and self.finish is None:
            self._show(self._detokenizer.rest())
            if self._reader is not None and self.finish is None:
                self._keep(*self._reader.rest())
            if self.finish is None:
                self._text.append(self._stops.rest())
                self.finish = finish

    def take(self, index: int) -> Piece | None:
        """What is new, as a piece; None where nothing is."""
        text, self._text = "".join(self._text), []
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = []
        calls, self._calls = self._calls, []
        if not text and not logprobs and not calls and self.finish is None:
            return None
        called = self.finish == "stop" and self._reader is not None and self._reader.complete and not self._stops.found
        return Piece(index, text, logprobs, "tool_calls" if called else self.finish, calls)

    def _show(self, text: str) -> None:
        if not text:
            return
        self._decoded += len(text)
        self._keep(*((text, []) if self._reader is None else self._reader.add(text)))

    def _keep(self, text: str, calls: list[Call]) -> None:
        """Take text, in which stop strings count, and calls, in which they do not: a call would be cut."""
        self._text.append(self._stops.add(text, watch=self.tokens > self._least))
        if self._stops.found:
            self.finish = "stop"
        else:
            self._calls += calls

    def _count(self, token: Token) -> None:
        if self._logprobs is None or token.logprob is None:
            return
        top = tuple((self._alone(id), logprob) for id, logprob in token.top)
        self._logprobs.append(Logprob(self._alone(token.id), token.logprob, top, self._decoded))

    def _alone(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text


class Exchange:
    """One request between its admission and its last byte.

    Args:
        generation: what was asked.
        choices: a text per sequence, in the answer's order.
        writer: makes bytes of them.
        prompt_tokens: of all prompts, each counted once.
        max_bytes: most bytes of a whole answer.
        started: when the request came, `time.monotonic`.

    Attributes:
        first: when its first token came, None before.
    """

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        writer: Writer,
        prompt_tokens: int,
        max_bytes: int,
        started: float,
    ) -> None:
        self.generation = generation
        self.writer = writer
        self.prompt_tokens = prompt_tokens
        self.error: RequestError | None = None
        self.started = started
        self.first: float | None = None
        self._choices = list(choices)
        self._told: set[int] = set()  # choices whose end the stream has told
        self._begun = self._ended = False
        self._max_bytes = max_bytes

    @property
    def stream(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.generation.stream

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or all(choice.finish is not None for choice in self._choices)

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(choice.tokens for choice in self._choices)

    def paces(self) -> list[float]:
        """Seconds for each token after the first, of each choice that got some."""
        return [
            (choice.last - choice.first) / (choice.tokens - 1)
            for choice in self._choices
            if choice.tokens > 1 and choice.last > choice.first
        ]

    def add(self, index: int, output: Output) -> None:
        """Take what the engine brought for the choice at `index`."""
        if self.first is None and output.tokens:
            self.first = time.monotonic()
        self._choices[index].add(output.tokens, output.finish)
        if output.error is not None:
            constraint = self._choices[index].constraint
            self.error = (constraint and constraint.failure) or output.error

    def finished(self, index: int) -> bool:
        """Whether the choice at `index` needs no more tokens."""
        return self._choices[index].finish is not None

    def events(self) -> bytes:
        """A stream's new events; its end once it is done, and nothing after it."""
        if self._ended:
            return b""
        self._ended = self.done
        if self.error is not None:
            return self.writer.failure(self.error)
        out = []
        for index, choice in enumerate(self._choices):
            piece = choice.take(index) if index not in self._told else None
            if piece is None:
                continue
            if not self._begun:
                out += [self.writer.first(i) for i in range(len(self._choices))]
                self._begun = True
            out.append(self.writer.piece(piece))
            if piece.finish is not None:
                self._told.add(index)
        if self.done:
            out.append(self.writer.last(self._usage()))
        return b"".join(out)

    def body(self) -> bytes:
        """The whole answer of a request that is done.

        Raises:
            RequestError: why there is none.
        """
        if self.error is not None:
            raise self.error
        pieces = [choice.take(index) or Piece(index) for index, choice in enumerate(self._choices)]
        body = self.writer.whole(pieces, self._usage())
        if len(body) > self._max_bytes:
            raise TooLarge(
                f"The answer has {len(body)} bytes; at most {self._max_bytes} can be sent whole: use stream.",
                code="answer_too_large",
            )
        return body

    def _usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.tokens)
