"""What an engine says through the protocol of ``docs/engine-protocol.md``: claims, retractions, counters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from pytest_colibri.claims.model import Claim, ClaimKind, Place, Retraction
from pytest_colibri.host.model import DeviceIdentity

COUNTS = ("bytes", "slots_per_layer", "budget_experts")


@dataclass(frozen=True)
class TierCount:
    """Experts that one tier served in a phase, and their bytes, as the engine counts them."""

    hits: int
    bytes: int


@dataclass(frozen=True)
class Telemetry:
    """The engine's own counters of one phase. ``dispatches`` maps a shader's file name to a count."""

    phase: str
    tiers: Mapping[str, TierCount]
    dispatches: Mapping[str, int]
    submits: int
    place: Place


@dataclass(frozen=True)
class Statement:
    """Everything that an engine said in one run.

    ``tokens`` are the generated ids in order, the first of them at ``first_position``, ``scores`` the best
    token at each position (None without that event), ``refused`` the reason of a refusal. ``phases`` are the
    (phase, state) lines in order.
    ``complete`` says that the last event was the end of the run. ``unparsed`` are lines that are no event of
    the protocol: kept, never guessed at. ``malformed`` are the places of events that are wrong.
    """

    subject: str
    claims: tuple[Claim, ...]
    telemetry: tuple[Telemetry, ...]
    tokens: tuple[int, ...]
    first_position: int | None
    scores: tuple[int, ...] | None
    tokens_place: Place | None
    refused: str | None
    phases: tuple[tuple[str, str], ...]
    complete: bool
    unparsed: tuple[str, ...]
    malformed: tuple[Place, ...]

    def claim(self, kind: ClaimKind) -> Claim | None:
        """Return the last claim of a kind, None when there is none."""
        return next((claim for claim in reversed(self.claims) if claim.kind == kind), None)


class _Malformed(Exception):
    """A line that is no event of the protocol, or not a right one."""


def read_statement(lines: Iterable[str], subject: str) -> Statement:
    """Read the standard output of an engine; never fails, whatever the lines are."""
    reader = _Reader(subject)
    for place, line in _places(lines):
        event = _event(line)
        if event is None:
            reader.unparsed.append(line)
            continue
        try:
            reader.take(event, place)
        except (_Malformed, KeyError):
            reader.unparsed.append(line)
            reader.malformed.append(place)
    return reader.statement()


class _Reader:
    """Gathers a :class:`Statement` event by event."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.claims: list[Claim] = []
        self.telemetry: list[Telemetry] = []
        self.tokens: list[int] = []
        self.first_position: int | None = None
        self.scores: tuple[int, ...] | None = None
        self.tokens_place: Place | None = None
        self.refused: str | None = None
        self.phases: list[tuple[str, str]] = []
        self.complete = False
        self.unparsed: list[str] = []
        self.malformed: list[Place] = []

    def take(self, event: Mapping[str, object], place: Place) -> None:
        self.complete = event["event"] == "end"
        match event["event"]:
            case "claim":
                self.claims.append(_claim(event, self.subject, place))
            case "retract":
                self._retract(event, place)
            case "telemetry":
                self.telemetry.append(_telemetry(event, place))
            case "token":
                self._take_token(_integer(event, "id"), _integer(event, "position"))
                self.tokens_place = self.tokens_place or place
            case "scores":
                self.scores = tuple(_integers(event["ids"]))
                self.tokens_place = place
            case "refused":
                self.refused = str(event["reason"])
            case "phase":
                self.phases.append((str(event["phase"]), str(event["state"])))

    def _take_token(self, token: int, position: int) -> None:
        if self.first_position is None:
            self.first_position = position
        if position != self.first_position + len(self.tokens):
            raise _Malformed
        self.tokens.append(token)

    def _retract(self, event: Mapping[str, object], place: Place) -> None:
        kind = str(event["claim"])
        if not any(claim.kind == kind for claim in self.claims):
            raise _Malformed
        retraction = Retraction(str(event.get("reason", "no reason is given")), place)
        self.claims = [
            replace(claim, retracted=retraction) if claim.kind == kind else claim for claim in self.claims
        ]

    def statement(self) -> Statement:
        return Statement(
            self.subject,
            tuple(self.claims),
            tuple(self.telemetry),
            tuple(self.tokens),
            self.first_position,
            self.scores,
            self.tokens_place,
            self.refused,
            tuple(self.phases),
            self.complete,
            tuple(self.unparsed),
            tuple(self.malformed),
        )


def _places(lines: Iterable[str]) -> Iterator[tuple[Place, str]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Place("stdout", number), line


def _event(line: str) -> dict[str, object] | None:
    """Return the event of a line, None when it is not one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _claim(event: Mapping[str, object], subject: str, place: Place) -> Claim:
    kind = next((kind for kind in get_args(ClaimKind) if kind == event["claim"]), None)
    if kind is None:
        raise _Malformed
    device = _device(event["device"]) if "device" in event else None
    claim = Claim(
        kind,
        subject,
        advertised="",
        place=place,
        device=device,
        tier=str(event["tier"]) if "tier" in event else None,
        pieces=tuple(str(piece) for piece in _list(event.get("pieces", []))),
        grouped=event.get("grouped") is True,
        experts=tuple(_pair(pair) for pair in _list(event.get("experts", []))),
        counts={
            key: _integer(event, key)
            for key in ("bytes", "slots_per_layer", "budget_experts")
            if key in event
        },
    )
    return replace(claim, advertised=_in_words(claim))


def _in_words(claim: Claim) -> str:
    where = f" on {claim.device.name.partition(' (')[0]}" if claim.device else ""
    counts = claim.counts
    match claim.kind:
        case "device":
            return f"opened {claim.device.name}" if claim.device else "opened a device"
        case "expert_tier":
            pieces = " + ".join(claim.pieces) or "all"
            return f"{pieces}{where}"
        case "resident":
            return f"{len(claim.experts)} experts, {counts.get('bytes', 0)} B resident{where}"
        case _:
            return f"{counts.get('slots_per_layer', 0)} slots per layer, {counts.get('bytes', 0)} B"


def _telemetry(event: Mapping[str, object], place: Place) -> Telemetry:
    tiers, dispatches = _mapping(event["tiers"]), _mapping(event["dispatches"])
    return Telemetry(
        str(event["phase"]),
        {
            name: TierCount(_integer(_mapping(count), "hits"), _integer(_mapping(count), "bytes"))
            for name, count in tiers.items()
        },
        {name: _integer(dispatches, name) for name in dispatches},
        _integer(event, "submits"),
        place,
    )


def _device(value: object) -> DeviceIdentity:
    fields = _mapping(value)
    uuid, pci = fields.get("uuid"), fields.get("pci")
    return DeviceIdentity(
        str(fields["api"]),
        _integer(fields, "index"),
        str(fields["name"]),
        None if uuid is None else str(uuid).lower().replace("-", ""),
        None if pci is None else str(pci).lower(),
    )


def _pair(value: object) -> tuple[int, int]:
    numbers = _integers(value)
    if len(numbers) != 2:
        raise _Malformed
    return numbers[0], numbers[1]


def _integers(value: object) -> list[int]:
    numbers = _list(value)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise _Malformed
    return [number for number in numbers if isinstance(number, int)]


def _integer(fields: Mapping[str, object], key: str) -> int:
    return _integers([fields[key]])[0]


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise _Malformed
    return value


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _Malformed
    return value
