"""The witnesses by driver counters that this system has."""

from __future__ import annotations

import sys

from pytest_colibri.witness.fdinfo import FdinfoWitness
from pytest_colibri.witness.ioreg import IoregWitness
from pytest_colibri.witness.nvml import NvmlWitness
from pytest_colibri.witness.sampling import CounterWitness


def driver_witnesses() -> tuple[CounterWitness, ...]:
    """Return those that can work on this system; each tells its reach on this machine."""
    if sys.platform == "linux":
        return (FdinfoWitness(), NvmlWitness())
    if sys.platform == "darwin":
        return (IoregWitness(),)
    return (NvmlWitness(),)
