"""Rules → which tokens may come next, by llguidance, where that is installed."""

import hashlib
import importlib.metadata
import importlib.util
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from handlers.errors import Overloaded, RequestError
from handlers.generation.engine import Constraint
from handlers.generation.trial import Trial, Unsettled, Verdict

logger = logging.getLogger(__name__)

PACKAGE = "llguidance"
KEPT = 4096  # verdicts on rules
QUICK_SECONDS = 0.1  # what compiles in less need not wait for those that are tried
# llguidance's own, lower than its defaults: a tenth of a second for a mask, tens of megabytes for a grammar
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 20_000,
}
# What masks may cost, all sequences of a request together: so much at first, and so much for each token.
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
        # verdicts alone: copies of a matcher share the states of its lexer, whose number is limited, so a matcher that
        # is kept would be spent some day, and one client's text would take from another's
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self._trying = threading.Lock()

    def quick(self, rules: str) -> bool:
        """Whether `compile` has its answer at once: they have been tried and are wrong, or compile soon."""
        found = self._known(_key(rules))
        return found is not None and (found.error is not None or found.seconds < QUICK_SECONDS)

    def compile(self, rules: str) -> "Grammar":
        """Compile rules for a request, once they have been tried; waits for other trials.

        Raises:
            RequestError: without `param`; they are wrong, or too much.
            Overloaded: they could not be tried.
        """
        import llguidance

        error = self._verdict(rules).error
        if error is None:
            matcher = llguidance.LLMatcher(self._tokenizer, rules, log_level=0, limits=self._limits)
            matcher.compute_bitmask()  # the first one builds what the next ones use
            if not matcher.is_error():
                return Grammar(matcher)
            error = "it is too complex"
        raise RequestError(f"The schema cannot be followed: {error.rstrip('.')}.", code="invalid_schema")

    def stop(self) -> None:
        """End the process that tries grammars."""
        with self._trying:
            self._trial.stop()

    def _verdict(self, rules: str) -> Verdict:
        key = _key(rules)
        found = self._known(key)
        if found is None:
            try:
                with self._trying:
                    found = self._trial.run(rules)
            except Unsettled as error:
                logger.warning("A schema could not be tried: %s", error)
                raise Overloaded("The schema could not be tried now; try again.") from None
            with self._lock:
                self._verdicts[key] = found
                if len(self._verdicts) > KEPT:
                    self._verdicts.popitem(last=False)
        return found

    def _known(self, key: bytes) -> Verdict | None:
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)


def _key(rules: str) -> bytes:
    return hashlib.sha256(rules.encode()).digest()


class Grammar:
    """Rules compiled for one request, whose sequences share their states and what their masks may cost.

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
