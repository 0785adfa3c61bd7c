"""The worker's share of the machine's cores.

TorchServe tells a worker neither how many siblings it has nor how many cores are theirs, and torch takes every core:
two workers on two cores then run four threads and both get slower. So a worker counts its siblings, now and then again,
since the management API may scale them at any time.
"""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psutil
import torch

from handlers.cores import cores, spinning

INTERVAL = 5.0  # seconds between two counts
_WORKER = "model_service_worker.py"

T = TypeVar("T")


def workers() -> int:
    """TorchServe workers on this machine that share our frontend, this one included."""
    try:
        siblings = psutil.Process().parent()
        children = siblings.children() if siblings else []
        return max(1, sum(any(_WORKER in part for part in _command(child)) for child in children))
    except psutil.Error:
        return 1


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class Threads:
    """Keeps torch's intra-op threads at cores ÷ workers, or at the number asked for.

    Args:
        wanted: a fixed number of threads; None follows the workers.
    """

    def __init__(self, wanted: int | None) -> None:
        self.wanted = wanted
        self._next = 0.0
        self.count = 0
        self.follow()

    def follow(self) -> None:
        """Count the workers again if the last count is old, and set torch's threads."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL if self.wanted is None else math.inf
        count = self.wanted or max(1, cores() // workers())
        if count != self.count:
            torch.set_num_threads(count)
            self.count = count


def apart(work: Callable[[], T]) -> T:
    """Do something in a thread that ends with it, where another thread than this one is to compute later on.

    GNU OpenMP, which torch computes with, keeps a pool of threads for each thread that has ever computed. Once all of
    them are more than the cores, helpers go to sleep at the end of each loop instead of waiting for the next one: a
    decode step of SmolLM2 with 8 sequences on 2 cores then wakes its helper 300 times, and takes 1.15 times as long.

    But a helper that waits without a bound takes the core from whoever it waits for: beside another process that
    computes, the same step takes eight times as long. So the environment must bound it (`batchserve serve` does);
    where it says nothing, the work is done here, whose pool then lets all of them sleep at once.
    """
    if spinning(os.environ):
        return work()
    with ThreadPoolExecutor(1, "apart") as executor:
        return executor.submit(work).result()
