"""Claims: checkable statements of a planner or an engine, with the place where each was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_colibri.host.model import DeviceIdentity

ClaimKind = Literal["device", "ram_tier", "expert_tier", "resident"]


@dataclass(frozen=True)
class Place:
    """Where something was said: a stream of the engine and the line in it, from 1."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Retraction:
    """A later line that takes a claim back, with its reason."""

    reason: str
    place: Place


@dataclass(frozen=True)
class Claim:
    """One statement that evidence can confirm or refute.

    ``advertised`` is the statement in a few words, as reports print it. ``experts`` are the (layer, expert)
    pairs that a tier is said to hold, ``pieces`` the parts of the computation that it is said to do
    (``gate_up``, ``down``), ``grouped`` whether one dispatch may serve several experts of a batch, ``counts``
    figures by name (bytes, slots per layer).
    """

    kind: ClaimKind
    subject: str
    advertised: str
    place: Place
    device: DeviceIdentity | None = None
    tier: str | None = None
    pieces: tuple[str, ...] = ()
    grouped: bool = False
    experts: tuple[tuple[int, int], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    retracted: Retraction | None = None
