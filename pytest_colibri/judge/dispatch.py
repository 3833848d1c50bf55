"""Did the device that an engine names do the work? Claims of the engine against counted dispatches.

A claim is judged in the window it is about (prefill, decode, score) and for each piece of the computation
that shaders can tell apart. How much work there must have been is not taken from the engine: it follows from
the routing of a run on the CPU and from the experts that the engine says it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_colibri.claims.engine import Statement, Telemetry
from pytest_colibri.claims.model import Claim
from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.subjects.protocol import ShaderFile
from pytest_colibri.witness.evidence import DeviceDispatch, DispatchEvidence, PhaseCounts, Reach


@dataclass(frozen=True)
class Sighting:
    """What the dispatch witness offers on one run: its evidence, or none and the reach that explains why."""

    reach: Reach
    evidence: DispatchEvidence | None

    def device(self, claim: Claim) -> DeviceDispatch | None:
        """Return what was seen of the claim's device, None when that device was given nothing."""
        if self.evidence is None or claim.device is None:
            return None
        wanted = claim.device
        return next((d for d in self.evidence.devices if d.device.same_device(wanted)), None)

    def elsewhere(self, claim: Claim) -> str:
        """Say in a clause what other devices did, empty when none did anything."""
        if self.evidence is None or claim.device is None:
            return ""
        others = [
            f"{sum(phase.executed for phase in other.phases)} dispatches went to {other.device.name}"
            for other in self.evidence.devices
            if not other.device.same_device(claim.device) and any(p.executed for p in other.phases)
        ]
        return "; ".join(others)


def judge_device(statement: Statement, wanted: Accelerator, sighting: Sighting) -> Verdict:
    """Judge whether the device that was asked for is the one that the engine opened."""
    claim = statement.claim("device")
    if claim is None:
        return _not_claimed("device", f"the engine names no device; asked for: {wanted.describe()}")
    if claim.device is None or not claim.device.same_device(wanted.identity):
        return _verdict(claim, "device", "broken", reason=f"asked for {wanted.describe()}")
    if sighting.evidence is None:
        return _unwitnessed(claim, "device", sighting.reach)
    seen = sighting.device(claim)
    if seen is None:
        reason = sighting.elsewhere(claim) or "the process opened no device at all"
        return _verdict(claim, "device", "broken", sighting, "not opened", reason)
    return _verdict(claim, "device", "held", sighting, f"opened {seen.device.name}")


def judge_expert_tier(
    statement: Statement,
    shaders: Iterable[ShaderFile],
    sighting: Sighting,
    batches_needed: Mapping[str, int],
) -> tuple[Verdict, ...]:
    """Judge for each phase whether the announced expert tier computed on its device.

    ``batches_needed`` maps a phase to the batches in which at least one resident expert was routed: the least
    number of dispatches of each piece that an honest tier makes.
    """
    title = "expert tier"
    claim = statement.claim("expert_tier")
    if claim is None:
        return (_not_claimed(title, "the engine announced no expert tier"),)
    if claim.retracted:
        reason = f"taken back at {claim.retracted.place}: {claim.retracted.reason}"
        return (_verdict(claim, title, "not_claimed", reason=reason),)
    if sighting.evidence is None:
        return tuple(_unwitnessed(claim, title, sighting.reach, phase) for phase in batches_needed)
    pieces = {shader.sha256: shader.piece for shader in shaders}
    return tuple(
        _judge_phase(claim, pieces, sighting, phase, needed) for phase, needed in batches_needed.items()
    )


def _judge_phase(
    claim: Claim, pieces: Mapping[str, str], sighting: Sighting, phase: str, needed: int
) -> Verdict:
    title = "expert tier"
    seen = _phase(sighting.device(claim), phase)
    if pieces and claim.pieces:
        by_piece: Counter[str] = Counter()
        for shader in seen.shaders:
            by_piece[pieces.get(shader.sha256, "unknown shader")] += shader.executed
        counts = {piece: by_piece[piece] for piece in claim.pieces}
    else:
        counts = {"any shader": seen.executed}
    witnessed = ", ".join(f"{piece} {count}" for piece, count in counts.items())
    if needed == 0:
        reason = "no expert of the tier was routed to in this phase, so there was nothing to see"
        return _verdict(claim, title, "unwitnessed", sighting, witnessed, reason, phase)
    short = [f"{piece} {count}" for piece, count in counts.items() if count < needed]
    if short:
        reason = f"{' and '.join(short)} of at least {needed} dispatches that resident experts were due"
        elsewhere = sighting.elsewhere(claim)
        reason += f"; {elsewhere}" if elsewhere else ""
        return _verdict(claim, title, "broken", sighting, witnessed, reason, phase)
    return _verdict(claim, title, "held", sighting, f"{witnessed} (at least {needed} each)", "", phase)


def judge_residency(statement: Statement, sighting: Sighting) -> Verdict:
    """Judge whether the device allocated at least the bytes that are said to be resident."""
    title = "resident experts"
    claim = statement.claim("resident")
    if claim is None:
        return _not_claimed(title, "the engine names no resident expert")
    if claim.retracted:
        return _verdict(claim, title, "not_claimed", reason=claim.retracted.reason)
    if sighting.evidence is None:
        return _unwitnessed(claim, title, sighting.reach)
    seen = sighting.device(claim)
    peak = sum(seen.peak_bytes.values()) if seen else 0
    witnessed = f"{peak} B allocated on the device at the peak"
    if peak < claim.counts.get("bytes", 0):
        return _verdict(claim, title, "broken", sighting, witnessed, "less than is said to be resident")
    return _verdict(claim, title, "held", sighting, witnessed)


def judge_counters(
    statement: Statement, shaders: Iterable[ShaderFile], sighting: Sighting
) -> tuple[Verdict, ...]:
    """Judge for each phase with any work on the device whether the engine's own counters are true.

    Without the engine's shaders the dispatches are compared as one sum. Work in a phase for which the engine
    gives no counters is not claimed.
    """
    title = "own counters"
    names = {shader.sha256: shader.name for shader in shaders}
    claim = statement.claim("device")
    if claim is None:
        return (_not_claimed(title, "the engine names no device"),)
    counted = [t for t in statement.telemetry if _has_work(t, _phase(sighting.device(claim), t.phase))]
    verdicts = [_judge_counter(claim, telemetry, names, sighting) for telemetry in counted]
    given = {telemetry.phase for telemetry in statement.telemetry}
    device = sighting.device(claim)
    silent = [p.phase for p in device.phases if p.executed and p.phase not in given] if device else []
    missing = [_not_claimed(title, "the engine gives no counters for this phase", phase) for phase in silent]
    return (*verdicts, *missing)


def _has_work(telemetry: Telemetry, seen: PhaseCounts) -> bool:
    return bool(telemetry.submits or any(telemetry.dispatches.values()) or seen.submits)


def _judge_counter(
    device: Claim, telemetry: Telemetry, names: Mapping[str, str], sighting: Sighting
) -> Verdict:
    title, phase = "own counters", telemetry.phase
    own = _by_name(telemetry.dispatches.items(), named=bool(names))
    said = _count_in_words(own, telemetry.submits)
    claim = Claim("device", device.subject, said, telemetry.place, device.device)
    if sighting.evidence is None:
        return _unwitnessed(claim, title, sighting.reach, phase)
    seen = _phase(sighting.device(device), phase)
    counts = ((names.get(s.sha256, f"shader {s.sha256[:12]}"), s.executed) for s in seen.shaders)
    counted = _by_name(counts, named=bool(names))
    witnessed = _count_in_words(counted, seen.submits)
    if (own, telemetry.submits) != (counted, seen.submits):
        reason = f"the engine says {said}; the witness counted {witnessed}"
        return _verdict(claim, title, "broken", sighting, witnessed, reason, phase)
    return _verdict(claim, title, "held", sighting, witnessed, "", phase)


def _by_name(counts: Iterable[tuple[str, int]], *, named: bool) -> Counter[str]:
    """Add counts up by shader name, or all in one where the names mean nothing; zero counts are left out."""
    sums: Counter[str] = Counter()
    for name, count in counts:
        sums[name if named else "dispatches"] += count
    return +sums


def _count_in_words(dispatches: Mapping[str, int], submits: int) -> str:
    parts = [f"{name} {count}" for name, count in sorted(dispatches.items())]
    return ", ".join([*parts, f"{submits} submits"])


def _phase(device: DeviceDispatch | None, phase: str) -> PhaseCounts:
    nothing = PhaseCounts(phase, (), 0)
    return next((p for p in device.phases if p.phase == phase), nothing) if device else nothing


def _not_claimed(title: str, reason: str, phase: str | None = None) -> Verdict:
    return Verdict("not_claimed", title, "", "", "", "", phase, reason)


def _unwitnessed(claim: Claim, title: str, reach: Reach, phase: str | None = None) -> Verdict:
    return Verdict(
        "unwitnessed",
        title,
        str(claim.place),
        claim.advertised,
        "",
        reach.witness,
        phase,
        reach.statement,
    )


def _verdict(
    claim: Claim,
    title: str,
    state: State,
    sighting: Sighting | None = None,
    witnessed: str = "",
    reason: str = "",
    phase: str | None = None,
) -> Verdict:
    witness = sighting.reach.witness if sighting else ""
    return Verdict(state, title, str(claim.place), claim.advertised, witnessed, witness, phase, reason)
