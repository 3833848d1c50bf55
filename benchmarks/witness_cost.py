"""How much longer the embedded engine decodes while it is witnessed.

Runs a tiny model with every expert on the device, with and without the witnesses, in pairs. The decode time
is the engine's own: from its event ``phase decode begin`` to ``end``. The whole run is timed from outside,
from before the process is started until its evidence is read.

    python benchmarks/witness_cost.py --pairs 15 --new-tokens 2000
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paired import Pairs, compiled_modules, interleave, print_machine, print_pairs, print_target

from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import TinyFormat, write_tiny_model
from pytest_colibri.container.usage import USAGE_FILE, read_usage
from pytest_colibri.host.live import probe_host
from pytest_colibri.host.matching import matching_accelerators
from pytest_colibri.planner.plan import Plan, PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.profiles.loader import find_profile
from pytest_colibri.subjects.program import reference_engine
from pytest_colibri.subjects.protocol import EngineRequest, Launch
from pytest_colibri.witness.dispatch import DispatchTracer
from pytest_colibri.witness.memory import MemoryGuard
from pytest_colibri.witness.run import watch

TARGET = 1.05
PROMPT = (3, 14, 159, 26, 53)
FORMATS: tuple[TinyFormat, ...] = ("int4-grouped", "f32")
# A guard that takes one look when the run begins, and none after it.
NOT_SAMPLING = MemoryGuard(interval_s=3600.0)


@dataclass(frozen=True)
class Witnesses:
    """Which witnesses watch a run."""

    tracer: bool
    sampler: bool

    def watch(self, launch: Launch) -> Timing:
        """Run the engine once under these witnesses."""
        began = time.perf_counter()
        run = watch(
            launch,
            tracer=DispatchTracer() if self.tracer else None,
            guard=MemoryGuard() if self.sampler else NOT_SAMPLING,
        )
        whole_s = time.perf_counter() - began
        if run.output.status != 0 or run.unwitnessed is not None:
            raise SystemExit(run.unwitnessed or "\n".join((*run.output.stdout[-1:], *run.output.stderr)))
        return Timing(_decode_s(run.output.stdout), whole_s)


WITNESSES: Mapping[str, Witnesses] = {
    "both": Witnesses(tracer=True, sampler=True),
    "tracer": Witnesses(tracer=True, sampler=False),
    "sampler": Witnesses(tracer=False, sampler=True),
    "none": Witnesses(tracer=False, sampler=False),
}


@dataclass(frozen=True)
class Timing:
    """One run, in seconds."""

    decode_s: float
    whole_s: float


def main() -> None:
    """Measure each format and print the figures."""
    options = _options()
    reach = DispatchTracer().reach()
    if not reach.able:
        raise SystemExit(reach.statement)
    with compiled_modules(), tempfile.TemporaryDirectory() as folder:
        for weights in options.format or FORMATS:
            launch = _launch(Path(folder) / weights, weights, options.profile, options.new_tokens)
            _measure(weights, launch, options.witness, options.pairs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=2000, help="tokens to generate; 2 to 4091")
    parser.add_argument("--profile", default="software-vulkan", help="profile of a Vulkan device")
    parser.add_argument("--format", choices=FORMATS, action="append", help="default: all")
    parser.add_argument(
        "--witness", choices=WITNESSES, default="both", help="'none' shows the noise of the method itself"
    )
    return parser.parse_args()


def _launch(model: Path, weights: TinyFormat, profile_name: str, new_tokens: int) -> Launch:
    """Write the model and plan its run with every expert on the device."""
    write_tiny_model(model, weights)
    profile = find_profile(profile_name)
    host = probe_host(frozenset({"vulkan"}))
    accelerators = matching_accelerators(profile, host)[:1]
    if not accelerators:
        raise SystemExit(f"no device here for the profile {profile_name}")
    print_machine(device=accelerators[0].identity.name)
    planned = plan(
        PlanRequest(
            geometry=read_geometry(model),
            host=host,
            backend="vulkan",
            accelerators=accelerators,
            prompt_width=len(PROMPT),
            usage=read_usage(model / USAGE_FILE),
            environment=profile.environment,
        )
    )
    return reference_engine().launch(_request(model, planned, new_tokens), planned, model)


def _request(model: Path, planned: Plan, new_tokens: int) -> EngineRequest:
    return EngineRequest(
        model=model,
        prompt=PROMPT,
        new_tokens=new_tokens,
        device=f"name:{planned.devices[0].accelerator.identity.name}",
        slots_per_layer=planned.slots_per_layer,
        vram_bytes=planned.vram_budget_bytes,
    )


def _measure(weights: str, launch: Launch, witness: str, pairs: int) -> None:
    without, under = interleave(
        lambda: WITNESSES["none"].watch(launch), lambda: WITNESSES[witness].watch(launch), pairs
    )
    decode = Pairs(tuple(run.decode_s for run in without), tuple(run.decode_s for run in under), "s")
    whole = Pairs(tuple(run.whole_s for run in without), tuple(run.whole_s for run in under), "s")
    name = f"under {witness}"
    print_pairs(f"decode phase, {weights}", decode, "unwitnessed", name)
    print_target("median ratio of the decode phase", median(decode.ratios), TARGET)
    print_pairs(f"whole run with attaching, {weights}", whole, "unwitnessed", name)


def _decode_s(lines: tuple[str, ...]) -> float:
    """Return the length of the decode phase by the engine's own clock."""
    events = map(json.loads, lines)
    begin, end = (
        event["at_us"] for event in events if event["event"] == "phase" and event["phase"] == "decode"
    )
    return float(end - begin) / 1e6


if __name__ == "__main__":
    main()
