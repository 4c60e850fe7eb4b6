"""What figures depend on besides the code."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return what the figures depend on besides the code.

    CPU seconds are not the same on a busy machine: the cost of one copy into fresh memory says by how much.
    """
    model = "unknown"
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "num_cpus": os.cpu_count(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
        "copy_cpu_seconds_per_gb": round(_copy_cpu_seconds(), 2),
    }


def _copy_cpu_seconds() -> float:
    """Return the CPU time of copying 1 GB into pages that were never touched."""
    source = bytes(64_000_000)
    began = time.process_time()
    for _ in range(4):
        bytearray(source)
    return (time.process_time() - began) / (4 * len(source) / 1e9)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
