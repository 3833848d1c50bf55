"""Did the device that an engine names do the work? Claims of the engine against counted dispatches.

A claim is judged in the window it is about (prefill, decode, score) and for each piece of the computation
that shaders can tell apart. How much work there must have been is not taken from the engine: it follows from
the routing of a run on the CPU and from the experts that the engine says it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pytest_colibri.claims.engine import Statement, Telemetry
from pytest_colibri.claims.model import Claim, Place
from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.planner.plan import Plan
from pytest_colibri.subjects.protocol import PIECES, ShaderFile
from pytest_colibri.witness.evidence import DeviceDispatch, DispatchEvidence, PhaseCounts, Reach


@dataclass(frozen=True)
class Due:
    """What resident experts were due in one phase, by the reference routing: ``batches`` that route to any of
    them, and ``experts``, each counted once in every batch that routes to it."""

    batches: int
    experts: int


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
            f"{_executed(other)} dispatches went to {other.device.name}"
            for other in self.evidence.devices
            if not other.device.same_device(claim.device) and _executed(other)
        ]
        return "; ".join(others)

    def doubt(self, statement: Statement) -> str:
        """Say why counts may be incomplete or in the wrong phase, empty when there is no such doubt."""
        if self.evidence is None:
            return ""
        if not self.evidence.complete:
            return f"the witness lost counts: {'; '.join(self.evidence.notes)}"
        if self.evidence.phases_seen != statement.phases:
            return (
                "the phase lines of the engine were not seen inside its process as they came out of it, so "
                "that counts cannot be given to a phase (docs/engine-protocol.md says how to write them)"
            )
        return ""


def judge_device(statement: Statement, wanted: Accelerator, sighting: Sighting) -> Verdict:
    """Judge whether the device that was asked for is the one that the engine opened."""
    claim = statement.claim("device")
    if claim is None:
        return _not_claimed("device", f"the engine names no device; asked for: {wanted.describe()}")
    obstacle = _obstacle(claim, "device", wanted, sighting)
    if obstacle is not None:
        return obstacle
    seen = sighting.device(claim)
    if seen is None:
        reason = sighting.elsewhere(claim) or "the process opened no device at all"
        return _verdict(claim, "device", "broken", sighting, "not opened", reason)
    return _verdict(claim, "device", "held", sighting, f"opened {seen.device.name}")


def judge_expert_tier(
    statement: Statement,
    wanted: Accelerator,
    shaders: Iterable[ShaderFile],
    sighting: Sighting,
    due: Mapping[str, Due],
) -> tuple[Verdict, ...]:
    """Judge for each phase whether the announced expert tier computed on its device.

    Each piece must be dispatched once for every expert that was due; for every batch where the engine says
    that it groups the experts of a batch. All pieces are asked for unless the claim names some.
    """
    title = "expert tier"
    claim = statement.claim("expert_tier")
    if claim is None:
        return (_not_claimed(title, "the engine announced no expert tier"),)
    obstacle = _obstacle(claim, title, wanted, sighting)
    if obstacle is not None:
        return tuple(replace(obstacle, phase=phase) for phase in due) if _is_blind(obstacle) else (obstacle,)
    piece_of = {shader.sha256: shader.piece for shader in shaders}
    doubt = sighting.doubt(statement)
    return tuple(_judge_phase(claim, piece_of, sighting, phase, due[phase], doubt) for phase in due)


def _is_blind(verdict: Verdict) -> bool:
    return verdict.state == "unwitnessed"


def _judge_phase(
    claim: Claim, piece_of: Mapping[str, str], sighting: Sighting, phase: str, due: Due, doubt: str
) -> Verdict:
    title = "expert tier"
    device = sighting.device(claim)
    needed = due.batches if claim.grouped else due.experts
    counts = _by_piece(claim, piece_of, [_phase(device, phase)])
    witnessed = ", ".join(f"{piece} {count}" for piece, count in counts.items())
    if needed == 0:
        reason = "no expert of the tier was routed to in this phase, so there was nothing to see"
        return _verdict(claim, title, "unwitnessed", sighting, witnessed, reason, phase)
    short = _below(counts, needed)
    whole_run = _by_piece(claim, piece_of, device.phases if device else [])
    if doubt and (not short or not _below(whole_run, needed) or "lost" in doubt):
        return _verdict(claim, title, "unwitnessed", sighting, witnessed, doubt, phase)
    if short:
        reason = f"{' and '.join(short)} of at least {needed} dispatches that resident experts were due"
        elsewhere = sighting.elsewhere(claim)
        reason += f"; {elsewhere}" if elsewhere else ""
        return _verdict(claim, title, "broken", sighting, witnessed, reason, phase)
    return _verdict(
        claim,
        title,
        "held",
        sighting,
        f"{witnessed} (at least {needed}{' each' if len(counts) > 1 else ''})",
        "",
        phase,
    )


def _by_piece(claim: Claim, piece_of: Mapping[str, str], phases: Iterable[PhaseCounts]) -> dict[str, int]:
    """Return the executed dispatches of each piece; of all shaders together where they mean nothing to us."""
    shaders = [shader for phase in phases for shader in phase.shaders]
    if not piece_of:
        return {"any shader": sum(shader.executed for shader in shaders)}
    sums: Counter[str] = Counter()
    for shader in shaders:
        sums[piece_of.get(shader.sha256, "unknown shader")] += shader.executed
    return {piece: sums[piece] for piece in claim.pieces or PIECES}


def _below(counts: Mapping[str, int], needed: int) -> list[str]:
    return [f"{piece} {count}" for piece, count in counts.items() if count < needed]


def judge_residency(
    statement: Statement, wanted: Accelerator, expert_bytes: Mapping[tuple[int, int], int], sighting: Sighting
) -> Verdict:
    """Judge whether the device allocated at least the bytes of the experts that are said to be resident.

    ``expert_bytes`` maps (layer, expert) to its bytes in the container. Memory that is not local to the
    device does not count.
    """
    title = "resident experts"
    claim = statement.claim("resident")
    if claim is None:
        return _not_claimed(title, "the engine names no resident expert")
    obstacle = _obstacle(claim, title, wanted, sighting)
    if obstacle is not None:
        return obstacle
    strangers = [expert for expert in claim.experts if expert not in expert_bytes]
    if strangers:
        reason = f"the model has no expert {strangers[0][1]} in layer {strangers[0][0]}"
        return _verdict(claim, title, "broken", sighting, "", reason)
    needed = max(claim.counts.get("bytes", 0), sum(expert_bytes[expert] for expert in set(claim.experts)))
    seen = sighting.device(claim)
    local = {memory.index for memory in wanted.memory_types if memory.device_local}
    peak = (
        sum(count for index, count in seen.peak_bytes.items() if index in local or not local) if seen else 0
    )
    witnessed = f"{peak} B allocated on the device at the peak"
    if peak < needed:
        reason = f"the experts that are said to be resident take {needed} B, and only {peak} B were allocated"
        return _verdict(claim, title, "broken", sighting, witnessed, reason)
    return _verdict(claim, title, "held", sighting, witnessed)


def judge_placement(statement: Statement, planned: Iterable[tuple[int, int]]) -> Verdict:
    """Judge whether the engine holds the experts that the plan puts on the device."""
    title = "planned experts"
    wanted = set(planned)
    claim = statement.claim("resident")
    if claim is None or claim.retracted:
        return _not_claimed(title, "the engine names no resident expert")
    missing = wanted - set(claim.experts)
    witnessed = f"{len(wanted) - len(missing)} of {len(wanted)} planned experts named"
    if missing:
        reason = "the engine holds fewer experts than were planned, and does not say why"
        return replace(_verdict(claim, title, "broken", None, witnessed, reason), witness="plan")
    return replace(_verdict(claim, title, "held", None, witnessed), witness="plan")


def judge_device_memory(plan: Plan, sighting: Sighting) -> Verdict:
    """Judge the most that was allocated on the planned device against its plan and its reserve."""
    title = "device memory"
    share = plan.devices[0]
    allowed = share.taken_bytes + share.reserve_bytes
    claim = Claim("device", "plan", f"at most {allowed} B", Place("plan", 0), share.accelerator.identity)
    if sighting.evidence is None:
        return replace(_unwitnessed(claim, title, sighting.reach), place="plan")
    seen = sighting.device(claim)
    peak = sum(seen.peak_bytes.values()) if seen else 0
    state: State = "held" if peak <= allowed else "broken"
    reason = "" if peak <= allowed else f"{peak - allowed} B more than the budget and the reserve"
    verdict = _verdict(claim, title, state, sighting, f"{peak} B allocated at the peak", reason)
    return replace(verdict, place="plan")


def _obstacle(claim: Claim, title: str, wanted: Accelerator, sighting: Sighting) -> Verdict | None:
    """Return the verdict of a claim that needs no look at counts, None for any other."""
    if claim.retracted:
        reason = f"taken back at {claim.retracted.place}: {claim.retracted.reason}"
        return _verdict(claim, title, "not_claimed", reason=reason)
    if claim.device is None or not claim.device.same_device(wanted.identity):
        return _verdict(claim, title, "broken", reason=f"asked for {wanted.describe()}")
    if claim.tier not in (None, "vram"):
        return _verdict(claim, title, "broken", reason=f"the tier {claim.tier} is not on a device")
    return None if sighting.evidence is not None else _unwitnessed(claim, title, sighting.reach)


def _executed(device: DeviceDispatch) -> int:
    return sum(phase.executed for phase in device.phases)


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
    if claim is None or claim.retracted:
        return (_not_claimed(title, "the engine names no device"),)
    doubt = sighting.doubt(statement)
    counted = [t for t in statement.telemetry if _has_work(t, _phase(sighting.device(claim), t.phase))]
    verdicts = [_judge_counter(claim, telemetry, names, sighting, doubt) for telemetry in counted]
    given = {telemetry.phase for telemetry in statement.telemetry}
    device = sighting.device(claim)
    silent = [p.phase for p in device.phases if p.executed and p.phase not in given] if device else []
    missing = [_not_claimed(title, "the engine gives no counters for this phase", phase) for phase in silent]
    return (*verdicts, *missing)


def _has_work(telemetry: Telemetry, seen: PhaseCounts) -> bool:
    return bool(telemetry.submits or any(telemetry.dispatches.values()) or seen.submits)


def _judge_counter(
    device: Claim, telemetry: Telemetry, names: Mapping[str, str], sighting: Sighting, doubt: str
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
    if doubt:
        return _verdict(claim, title, "unwitnessed", sighting, witnessed, doubt, phase)
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
