"""What the benchmarks share: paired, interleaved measurements, and the lines that print them."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from statistics import median
from typing import TypeVar

Measured = TypeVar("Measured")

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Pairs:
    """The same figure measured under two conditions, pair by pair, in ``unit``."""

    base: tuple[float, ...]
    other: tuple[float, ...]
    unit: str

    @property
    def ratios(self) -> tuple[float, ...]:
        """Other to base, within each pair."""
        return tuple(other / base for base, other in zip(self.base, self.other, strict=True))

    @property
    def differences(self) -> tuple[float, ...]:
        """Other less base, within each pair, in ``unit``."""
        return tuple(other - base for base, other in zip(self.base, self.other, strict=True))

    @property
    def ratio_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median ratio by the sign test, which assumes no distribution of the noise.

        None where there are fewer than six pairs.
        """
        count = len(self.ratios)
        below, chance = 0, 0.0
        while (chance := chance + comb(count, below) / 2**count) <= 0.025:
            below += 1
        ordered = sorted(self.ratios)
        return (ordered[below - 1], ordered[count - below]) if below else None

    @property
    def noise(self) -> tuple[float, ...]:
        """How far two successive base figures lie apart, as the larger to the smaller."""
        return tuple(max(pair) / min(pair) for pair in pairwise(self.base))


def interleave(
    base: Callable[[], Measured], other: Callable[[], Measured], pairs: int
) -> tuple[list[Measured], list[Measured]]:
    """Measure both conditions in turn; who goes first alternates, so that drift favours neither.

    One unrecorded measurement of each comes before, which fills the caches.
    """
    base(), other()
    results: tuple[list[Measured], list[Measured]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            results[which].append((base, other)[which]())
    return results


@contextmanager
def compiled_modules() -> Iterator[None]:
    """Let every program that is started keep its compiled modules, as an installed package has them."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        yield


def seconds_of(argv: Sequence[str], **options: object) -> float:
    """Run a program to its end and return how long that took; a failing program is an error."""
    began = time.perf_counter()
    run_program(argv, **options)
    return time.perf_counter() - began


def run_program(argv: Sequence[str], **options: object) -> str:
    """Run a program to its end and return its standard output; a failing program is an error."""
    done = subprocess.run(  # type: ignore[call-overload]
        argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def print_heading(title: str) -> None:
    """Print a title, and the head of the table of figures."""
    print(f"\n{title}\n  {'':<42}{'min':>10}{'median':>10}{'max':>10}")


def print_figures(name: str, figures: Sequence[float], unit: str = "") -> None:
    """Print one line of the table: least, median and largest."""
    if figures:
        least, middle, largest = (
            f"{figure:10.3f}" for figure in (min(figures), median(figures), max(figures))
        )
        print(f"  {name:<42}{least}{middle}{largest} {unit}")


def print_pairs(title: str, pairs: Pairs, base: str, other: str) -> None:
    """Print both conditions, the ratio and the difference within the pairs, and how noisy the base was."""
    print_heading(f"{title} ({len(pairs.base)} pairs)")
    print_figures(base, pairs.base, pairs.unit)
    print_figures(other, pairs.other, pairs.unit)
    print_figures("ratio within a pair", pairs.ratios)
    if pairs.ratio_interval is not None:
        least, largest = (f"{ratio:10.3f}" for ratio in pairs.ratio_interval)
        print(f"  {'its median lies within (95 %)':<42}{least}{'':<10}{largest}")
    print_figures("difference within a pair", pairs.differences, pairs.unit)
    print_figures(f"noise: successive '{base}', larger / smaller", pairs.noise)
    print(f"  pair by pair: {' '.join(f'{ratio:.3f}' for ratio in pairs.ratios)}")


def print_target(what: str, figure: float, at_most: float, unit: str = "") -> None:
    """Print whether a median meets its target."""
    verdict = "met" if figure <= at_most else "MISSED"
    print(f"  target {verdict}: {what} {figure:.3f}{unit}, at most {at_most:g}{unit}")


def print_machine(**facts: object) -> None:
    """Print what the figures were measured on."""
    machine = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        **facts,
    }
    print("; ".join(f"{name} {value}" for name, value in machine.items()))
