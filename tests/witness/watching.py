"""What the tests of the witnesses share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_colibri.subjects.protocol import Launch
from pytest_colibri.witness.evidence import DeviceDispatch, WatchedRun

PROGRAMS = Path(__file__).with_name("programs")


def launch(*argv: str, timeout_s: float = 60.0, **environment: str) -> Launch:
    return Launch(argv, {**os.environ, **environment}, PROGRAMS, timeout_s)


def python(program: str, *arguments: str, timeout_s: float = 60.0) -> Launch:
    return launch(sys.executable, "-c", program, *arguments, timeout_s=timeout_s)


def only_device(run: WatchedRun) -> DeviceDispatch:
    assert run.dispatch is not None, run.unwitnessed
    assert run.dispatch.notes == ()
    (device,) = run.dispatch.devices
    return device


def executed_by_phase(run: WatchedRun) -> dict[str, dict[str, tuple[int, int]]]:
    """Give (recorded, executed) by phase and shader of the only device."""
    return {
        phase.phase: {shader.sha256: (shader.recorded, shader.executed) for shader in phase.shaders}
        for phase in only_device(run).phases
    }
