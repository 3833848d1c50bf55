"""What every planner under test looks like to this project: a request in, a plan or a refusal out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pytest_colibri.host.stage import Stage
from pytest_colibri.planner.plan import KvType, Policy
from pytest_colibri.profiles.model import Backend


@dataclass(frozen=True)
class PlannerRequest:
    """What is to be planned. None means "choose"; the planner finds out by itself what the machine has.

    ``ram_bytes`` and ``vram_bytes`` bound the budgets, ``gpu_indices`` names devices as the vendor's tool
    counts them, ``context`` and ``prompt_width`` count tokens, ``kv_type`` is how the KV cache is stored.
    ``environment`` holds the user's own variables; the planner finds them in its environment too.
    """

    model: Path
    backend: Backend
    ram_bytes: int | None = None
    vram_bytes: int | None = None
    context: int = 4096
    kv_slots: int = 1
    kv_type: KvType | None = None
    prompt_width: int | None = None
    gpu_indices: tuple[int, ...] | None = None
    physical_cores: int | None = None
    policy: Policy | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannerAnswer:
    """Exactly one of four: a plan, a refusal, a request that cannot be put to this planner, or a failure.

    ``plan`` is JSON of version 2 and ``environment`` what it gives to an engine. ``hot_experts`` are the
    (layer, expert) pairs that it puts on devices, in rank order, None where it does not name them.
    ``refused`` is the reason that the planner gives for making no plan. ``unsupported`` names what it has no
    input for: such an answer says nothing about the planner. ``failed`` tells of a hang, garbage or a crash.
    ``stderr`` is the end of what it wrote for people.
    """

    plan: Mapping[str, object] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    hot_experts: tuple[tuple[int, int], ...] | None = None
    refused: str | None = None
    unsupported: str | None = None
    failed: str | None = None
    stderr: str = ""


class PlannerSubject(Protocol):
    """A planner that can be put under test."""

    @property
    def name(self) -> str:
        """How reports call it: ``reference``, ``colibri``, or the program."""

    @property
    def origin(self) -> str:
        """Where it comes from, so that others can judge the same: a version, a command, or a commit."""

    def ask(self, request: PlannerRequest, stage: Stage | None = None) -> PlannerAnswer:
        """Return what the planner answers for the machine of the stage, without one for this machine.

        Raises Unavailable where the planner cannot be shown that machine.
        """
