"""Measures times on the device and the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import median

import torch

_ROUNDS = 7
_LAUNCHES = 16  # launches of a round, unless they take longer than
_LONG = 0.02  # seconds
_WAKING = 0.5  # seconds
_CYCLES = 2e9  # per second, of a fast multiprocessor


def device_seconds(function: Callable[[], object]) -> float:
    """Return the seconds of a function on the device; the median of rounds.

    On CUDA, the device starts a round after all launches have been made, so the host's time for launching does not
    count.
    """
    if not torch.cuda.is_available():
        return host_seconds(function, 1)
    function()  # compiles, chooses kernels, allocates
    _wake()
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    launching = time.perf_counter() - started
    torch.cuda.synchronize()
    once = time.perf_counter() - started
    times = max(min(_LAUNCHES, int(_LONG / once)), 1)
    hold = getattr(torch.cuda, "_sleep", None)
    found: list[float] = []
    for _ in range(_ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if hold is not None:
            hold(int(_CYCLES * min(1.5 * times * launching + 5e-5, _LONG)))
        first.record()
        for _ in range(times):
            function()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return median(found) / times


@cache
def _wake() -> None:
    """Work until the device has raised its clocks, once per process."""
    x = torch.randn(4096, 4096, device="cuda")
    until = time.perf_counter() + _WAKING
    while time.perf_counter() < until:
        x.sin()
        torch.cuda.synchronize()


def host_seconds(function: Callable[[], object], rounds: int) -> float:
    """Return the seconds of a function that waits for the device itself; the median of rounds, after two."""
    found = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return median(found[2:])
