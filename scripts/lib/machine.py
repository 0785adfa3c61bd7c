"""The machine that a measurement ran on, as far as it explains the figures."""

import datetime
import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from handlers.cores import cores

# The instruction sets that decide how fast a transformer runs on a CPU.
RELEVANT_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
# More of the machine's cores than this busy before we start: others will show in the figures.
BUSY_SHARE = 0.25
PACKAGES = ("torch", "transformers", "sentence-transformers", "torchserve")


@dataclass(frozen=True)
class Machine:
    """Processor, memory, versions and date.

    Attributes:
        cores: cores that this process may use, as the workers count them.
        flags: those of `RELEVANT_FLAGS` that the processor has.
        memory_gb: of the whole machine, in 10⁹ bytes.
        load_before: the machine's one-minute load average when it was described.
        versions: of Python and the packages that matter.
        date: UTC, ISO 8601.
    """

    processor: str
    cores: int
    flags: tuple[str, ...]
    memory_gb: float
    load_before: float
    versions: dict[str, str]
    date: str

    @property
    def computes_bfloat16(self) -> bool:
        """Whether the processor multiplies bfloat16 itself; emulated, it is slower than float32."""
        return bool(BF16_FLAGS & set(self.flags))

    def notes(self, dtypes: Collection[str]) -> list[str]:
        """What a reader of figures in these dtypes must know of it."""
        notes = []
        if self.load_before > BUSY_SHARE * self.cores:
            notes.append(f"the machine was busy before the run (load {self.load_before:g} on {self.cores} cores)")
        if "bfloat16" in dtypes and not self.computes_bfloat16:
            notes.append(
                "this processor has no bfloat16 arithmetic: it is emulated, and slower than float32 on both sides"
            )
        return notes


def describe() -> Machine:
    """Describe this machine, now."""
    processor, flags = _processor()
    return Machine(
        processor=processor,
        cores=cores(),
        flags=tuple(flag for flag in RELEVANT_FLAGS if flag in flags),
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        load_before=round(os.getloadavg()[0], 2),
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _processor() -> tuple[str, frozenset[str]]:
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
    return name, flags


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
