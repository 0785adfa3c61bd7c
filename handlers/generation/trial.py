"""Tries a grammar in a process of its own before the worker compiles it.

A schema is a program that a client sends. llguidance bounds what it may cost, but not everything: some schemas take it
half a minute, a chain of references overflows its stack and ends the process. So it happens where nothing else does,
within limits of time and memory, and only what went well is compiled again beside the engine. The time is the
processor's: that the machine is busy says nothing of a schema.

This file is both sides: imported, the worker's handle; run as a script, that process, which needs llguidance alone.
"""

import itertools
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 1.0  # of processor time for one grammar
WAIT_SECONDS = 10.0  # for its answer, whatever the machine does beside
START_SECONDS = 60.0  # for the tokenizer
MEMORY = 256 << 20  # bytes beyond the tokenizer's
STACK = 1 << 20  # bytes; the worker's threads have more
LONGEST = 300  # characters of an error
_RAISED = 3  # exit status: llguidance has raised
# how the process ends by what a grammar does; any other end has other causes
_BY_GRAMMAR = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, _RAISED)


class Unsettled(RuntimeError):
    """A grammar could not be tried, for no fault of its own that is known."""


@dataclass(frozen=True)
class Verdict:
    """What a trial has found.

    Args:
        error: what is wrong with a grammar; None where nothing is.
        seconds: processor time that it took.
    """

    error: str | None
    seconds: float


class Trial:
    """The process, started when it is needed first, and again after it had to be ended.

    Args:
        site: the directory that llguidance lies in.
        tokenizer: the JSON of a `tokenizers.Tokenizer`.
        vocabulary: how many tokens there are.
        ends: tokens that end a text.
        limits: llguidance's LLParserLimits.
    """

    def __init__(
        self, site: Path, tokenizer: str, vocabulary: int, ends: Sequence[int], limits: Mapping[str, int]
    ) -> None:
        self._told = json.dumps([str(site), tokenizer, vocabulary, list(ends), dict(limits)]).encode() + b"\n"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, source: str) -> Verdict:
        """Try a grammar. Not for two threads at once.

        Raises:
            Unsettled: nothing can be said of it now.
        """
        used = self._process is not None
        found = self._attempt(source)
        if found is None and used:  # it may have suffered from what came before
            found = self._attempt(source)
        return found or Verdict("it takes too long or too much memory", SECONDS)

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _attempt(self, source: str) -> Verdict | None:
        """What is found in the process; None where the grammar ended it."""
        process = self._process or self._start()
        answer = self._ask(process, json.dumps(source).encode() + b"\n", WAIT_SECONDS)
        with suppress(ValueError):
            error, seconds = json.loads(answer)
            return Verdict(error, seconds)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        ended = process.poll()
        self.stop()
        if ended not in _BY_GRAMMAR:
            raise Unsettled("the process that tries grammars was ended, or has no time")
        return None

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it may quote what a client sent
        )
        if self._ask(self._process, self._told, START_SECONDS) != b"ready\n":
            self.stop()
            raise Unsettled("the process that tries grammars does not start")
        return self._process

    @staticmethod
    def _ask(process: "subprocess.Popen[bytes]", line: bytes, seconds: float) -> bytes:
        """The answer to a line, if it begins within some seconds."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
        there = select.select([process.stdout], [], [], seconds)[0]
        return process.stdout.readline() if there else b""


def _serve() -> None:
    site, tokenizer, vocabulary, ends, limits = json.loads(sys.stdin.readline())
    sys.path.insert(0, site)
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    known = LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=ends)
    bounds = LLParserLimits(**limits, verbose_errors=False)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(int(WAIT_SECONDS) + 5)  # should the worker be gone
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process
        started = time.process_time()
        found: list[Any] = []

        def attempt(source: str = json.loads(line), found: list[Any] = found) -> None:
            matcher = LLMatcher(known, source, log_level=0, limits=bounds)
            if not matcher.is_error():
                matcher.compute_bitmask()
            found.append(_said(matcher.get_error()))

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        if not found:
            os._exit(_RAISED)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([found[0], time.process_time() - started]), flush=True)
        signal.alarm(0)


def _said(error: str) -> str | None:
    """An error in a line, without the place in the rules, which are none of the client's, and the rules themselves."""
    lines = itertools.takewhile(lambda line: not re.match(r" *\d+ \|", line), error.splitlines())
    said = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(" ".join(lines).split()))
    return said[:LONGEST] or None


if __name__ == "__main__":
    _serve()
