"""Rules → which tokens may come next, by llguidance, where that is installed."""

import importlib.metadata
import importlib.util
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from handlers.errors import RequestError
from handlers.generation.engine import Constraint
from handlers.generation.trial import Trial

logger = logging.getLogger(__name__)

PACKAGE = "llguidance"
KEPT = 32  # compiled grammars
# llguidance's own, lower than its defaults: a tenth of a second for a mask, tens of megabytes for a grammar
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 20_000,
}
# What masks may cost, all sequences of a grammar together: so much at first, and so much for each token.
GRACE_SECONDS, TOKEN_SECONDS = 0.5, 0.005


def version() -> str | None:
    """The package's version; None where it is not installed."""
    return importlib.metadata.version(PACKAGE) if importlib.util.find_spec(PACKAGE) is not None else None


class Grammars:
    """Compiles rules for one tokenizer.

    Args:
        tokenizer: transformers' tokenizer, which must be a fast one.
        vocabulary: how many tokens the model knows.
        ends: tokens that end a text.

    Raises:
        ValueError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Iterable[int]) -> None:
        import llguidance

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("it is no fast tokenizer")
        last = sorted(ends)
        if not last:
            raise ValueError("it has no end of text")
        text, size = backend.to_str(), max(vocabulary, len(tokenizer))
        # holds up all threads for a second: this is for the time of loading
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=size, eos_token=last)
        self._limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        site = Path(str(llguidance.__file__)).parent.parent
        self._trial = Trial(site, text, size, last, LIMITS)
        self._known: OrderedDict[str, Grammar | str] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, rules: str) -> "Grammar":
        """Compile rules, those of a request tried before; waits for other compilations.

        Raises:
            RequestError: without `param`; they are wrong, or too much.
        """
        with self._lock:
            found = self._known.get(rules)
            if found is None:
                found = self._known[rules] = self._compile(rules)
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(rules)
        if isinstance(found, str):
            raise RequestError(f"The schema cannot be followed: {found}.", code="invalid_schema")
        return found

    def stop(self) -> None:
        """End the process that tries grammars."""
        with self._lock:
            self._trial.stop()

    def _compile(self, rules: str) -> "Grammar | str":
        import llguidance

        error = self._trial.run(rules)
        if error is not None:
            return error.rstrip(".")
        matcher = llguidance.LLMatcher(self._tokenizer, rules, log_level=0, limits=self._limits)
        matcher.compute_bitmask()  # the first one builds what the next ones use
        return str(matcher.get_error()) or Grammar(matcher)


class Grammar:
    """Compiled rules.

    Args:
        matcher: at the beginning of a text.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()
        self._left = GRACE_SECONDS

    def constraint(self) -> Constraint:
        """What may come next in one sequence."""
        with self._lock:
            return _Matching(self, self._matcher.deep_copy())

    @property
    def exhausted(self) -> bool:
        """Whether its masks have cost too much; used by the engine's thread alone, as `spend` is."""
        return self._left < 0

    def spend(self, seconds: float) -> None:
        """Count what a token has cost."""
        self._left = min(self._left + TOKEN_SECONDS, GRACE_SECONDS) - seconds


class _Matching(Constraint):
    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        self._grammar, self._matcher = grammar, matcher

    def allowed(self) -> bytes | None:
        """See Constraint.allowed."""
        if self._grammar.exhausted:
            self.fail("What the answer must follow is too complex: finding its next token takes too long.")
            return None
        start = time.thread_time()
        bits: bytes = self._matcher.compute_bitmask()
        self._grammar.spend(time.thread_time() - start)
        return None if self._failed() else bits

    def add(self, token: int) -> None:
        """See Constraint.add."""
        self._matcher.consume_token(token)
        self._failed()

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self.fail("What the answer must follow is too complex at this place of it.")
        return self.failure is not None
