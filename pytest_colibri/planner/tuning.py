"""Variables that make an engine faster on one kind of machine, each with its reason; no quality is traded.

Every rule returns (value, reason), or None where it has nothing to say. A name that starts with ``_`` is a
hint for the person who starts the engine, and is never exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_colibri.planner.plan import Bottleneck
from pytest_colibri.profiles.model import Backend

LEAST_HIT_RATE_FOR_DRAFTS = 0.90

Setting = tuple[str, str]


@dataclass(frozen=True)
class Situation:
    """What the rules look at; ``gpus`` counts the devices that the plan gives work to."""

    backend: Backend
    gpus: int
    sockets: int
    bottleneck: Bottleneck
    hit_rate: float
    cold_bytes: int
    user: Mapping[str, str]


def tune(situation: Situation) -> Mapping[str, Setting]:
    """Map each variable to (value, reason)."""
    settings = {
        "DRAFT": draft(situation),
        "COLI_CUDA_PIPE": cuda_pipe(situation),
        "PIPE": pipe(situation),
        "COLI_NUMA": numa(situation),
        "_numactl": numactl_hint(situation),
        "COLI_NO_OMP_TUNE": no_omp_tune(situation),
        "PIN_GB": pin_all(situation),
    }
    return {name: setting for name, setting in settings.items() if setting is not None}


def draft(situation: Situation) -> Setting | None:
    """Switch speculation off where it costs more than it brings, unless the user asked for it on CUDA."""
    if situation.user.get("COLI_CUDA_MTP") == "1":
        return None
    if situation.bottleneck == "compute":
        return "0", "compute-bound: the extra experts of a draft cost more than the tokens they save"
    if situation.bottleneck == "disk" and situation.hit_rate < LEAST_HIT_RATE_FOR_DRAFTS:
        return "0", f"disk-bound at a hit rate of {situation.hit_rate}: drafts multiply the reads"
    return None


def cuda_pipe(situation: Situation) -> Setting | None:
    """Choose the pipeline of the CUDA and HIP backend by the number of devices."""
    if situation.backend not in ("cuda", "rocm") or not situation.gpus:
        return None
    return ("1", "one GPU") if situation.gpus == 1 else ("2", f"{situation.gpus} GPUs")


def pipe(situation: Situation) -> Setting | None:
    """Overlap reads with computing where the CPU does both."""
    if situation.gpus or situation.bottleneck != "disk":
        return None
    return "1", "CPU only and disk-bound: reads overlap with computing"


def numa(situation: Situation) -> Setting | None:
    """Spread pages over the memory of all sockets."""
    return ("1", f"{situation.sockets} sockets") if situation.sockets > 1 else None


def numactl_hint(situation: Situation) -> Setting | None:
    """Suggest interleaving to the person, where the CPU reads all weights."""
    if situation.gpus or situation.sockets < 2:
        return None
    return "numactl --interleave=all", f"CPU only on {situation.sockets} sockets"


def no_omp_tune(situation: Situation) -> Setting | None:
    """Keep idle threads from spinning while a device works: they take the memory bandwidth of the experts."""
    if situation.backend not in ("metal", "vulkan") or not situation.gpus:
        return None
    return "1", "spinning threads take memory bandwidth from the experts"


def pin_all(situation: Situation) -> Setting | None:
    """Pin every expert where all of them fit into the RAM and no GPU takes any."""
    if situation.gpus or situation.cold_bytes > 0:
        return None
    return "all", "every expert fits into the RAM"
