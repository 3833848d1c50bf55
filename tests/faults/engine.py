"""The embedded engine with one fault: ``python engine.py FAULT REQUEST.json``.

Each fault is a way in which a real engine has been, or could be, untrue about its GPU. A fault replaces one
part of the engine and leaves the rest as it is, so that the suite meets a program that mostly works.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pytest_colibri.engine import __main__ as program
from pytest_colibri.engine import session
from pytest_colibri.engine.device import DeviceCounts, ExpertRows, Residency
from pytest_colibri.engine.events import Events
from pytest_colibri.engine.vulkan import compute, device
from pytest_colibri.engine.vulkan.backend import VulkanExperts

Faults = dict[str, Callable[[], None]]
FAULTS: Faults = {}

honest_fill = VulkanExperts.fill
honest_run = VulkanExperts.run_experts
honest_counts = VulkanExperts.take_counts
honest_emit = Events.emit
honest_dispatch = compute.vk.vkCmdDispatch


def fault(install: Callable[[], None]) -> Callable[[], None]:
    FAULTS[install.__name__] = install
    return install


def compute_on_cpu(self: VulkanExperts, batch: Sequence[ExpertRows], rows: Any) -> list[Any]:
    return [self.kept[share.key].apply(rows[share.rows]) for share in batch]  # type: ignore[attr-defined]


def keep_a_copy_at_fill() -> None:
    """Let the CPU have what is said to lie on the device."""

    def fill(self: VulkanExperts, ranked: Any, budget_bytes: int, read: Any) -> Residency:
        self.kept = {key: read(key) for key, _ in ranked}  # type: ignore[attr-defined]
        return honest_fill(self, ranked, budget_bytes, read)

    VulkanExperts.fill = fill  # type: ignore[method-assign]


@fault
def announces_and_computes_on_cpu() -> None:
    keep_a_copy_at_fill()
    VulkanExperts.run_experts = compute_on_cpu  # type: ignore[method-assign]


@fault
def announces_before_reading_a_weight() -> None:
    """The tier is announced, the fill finds nothing it can serve, and no line says so."""
    VulkanExperts.fill = lambda *_: Residency((), 0)  # type: ignore[method-assign]
    without_event("retract")


@fault
def dispatches_once_then_falls_back() -> None:
    keep_a_copy_at_fill()
    runs = 0

    def run(self: VulkanExperts, batch: Sequence[ExpertRows], rows: Any) -> list[Any]:
        nonlocal runs
        runs += 1
        return honest_run(self, batch, rows) if runs <= 3 else compute_on_cpu(self, batch, rows)

    VulkanExperts.run_experts = run  # type: ignore[method-assign]


@fault
def retracts_honestly() -> None:
    session.rank_by_usage = lambda *_: []  # type: ignore[assignment]


@fault
def records_and_never_submits() -> None:
    keep_a_copy_at_fill()
    device.VulkanDevice.submit_commands = lambda self: compute.vk.vkEndCommandBuffer(  # type: ignore
        self._command_buffer
    )
    run_both()


@fault
def dispatches_no_workgroups() -> None:
    keep_a_copy_at_fill()
    compute.vk.vkCmdDispatch = lambda commands, *_: honest_dispatch(commands, 0, 0, 0)
    run_both()


@fault
def dispatches_another_shader() -> None:
    """Work is done on the device, but the piece ``down`` is computed on the CPU."""
    keep_a_copy_at_fill()
    compute.ExpertCompute._down = compute.ExpertCompute._gate_up  # type: ignore[method-assign]
    run_both()


def run_both() -> None:
    """Do on the device what the fault does, and take the numbers from the CPU."""

    def run(self: VulkanExperts, batch: Sequence[ExpertRows], rows: Any) -> list[Any]:
        honest_run(self, batch, rows)
        return compute_on_cpu(self, batch, rows)

    VulkanExperts.run_experts = run  # type: ignore[method-assign]


@fault
def counts_double() -> None:
    def take_counts(self: VulkanExperts) -> DeviceCounts:
        counts = honest_counts(self)
        return DeviceCounts({name: 2 * n for name, n in counts.dispatches.items()}, counts.submits)

    VulkanExperts.take_counts = take_counts  # type: ignore[method-assign]


@fault
def names_another_device() -> None:
    def change(fields: dict[str, Any]) -> dict[str, Any]:
        if "device" not in fields:
            return fields
        return {**fields, "device": {**fields["device"], "name": "GeForce RTX 4090", "uuid": "ab" * 16}}

    rewrite_events(lambda event, fields: (event, change(fields)))


@fault
def claims_more_bytes_than_it_holds() -> None:
    rewrite_events(
        lambda event, fields: (
            (event, {**fields, "bytes": 100 * fields["bytes"]})
            if fields.get("claim") == "resident"
            else (event, fields)
        )
    )


@fault
def computes_wrong_on_the_device() -> None:
    VulkanExperts.run_experts = lambda self, batch, rows: [  # type: ignore[method-assign]
        -output for output in honest_run(self, batch, rows)
    ]


@fault
def takes_more_memory_than_planned() -> None:
    """Touches 6 GB more before it answers."""
    honest_answer = session.Session.answer

    def answer(self: session.Session, model: Any) -> None:
        hoard = []
        for _ in range(120):
            hoard.append(np.ones(50 * 10**6, dtype=np.uint8))
            time.sleep(0.002)
        honest_answer(self, model)

    session.Session.answer = answer  # type: ignore[method-assign]


@fault
def crashes_in_decode() -> None:
    tokens = 0

    def emit(self: Events, event: str, **fields: object) -> None:
        nonlocal tokens
        tokens += event == "token"
        if tokens > 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        honest_emit(self, event, **fields)

    Events.emit = emit  # type: ignore[method-assign]


@fault
def says_nothing() -> None:
    rewrite_events(lambda *_: None)


@fault
def computes_one_expert_of_each_batch() -> None:
    """A partial fallback: each batch reaches the device, with one of its experts."""
    keep_a_copy_at_fill()

    def run(self: VulkanExperts, batch: Sequence[ExpertRows], rows: Any) -> list[Any]:
        return [*honest_run(self, batch[:1], rows), *compute_on_cpu(self, batch[1:], rows)]

    VulkanExperts.run_experts = run  # type: ignore[method-assign]


@fault
def holds_one_expert_of_those_planned() -> None:
    VulkanExperts.fill = (
        lambda self, ranked, budget_bytes, read: honest_fill(  # type: ignore[method-assign]
            self, ranked[:1], budget_bytes, read
        )
    )


@fault
def claims_residents_of_no_bytes() -> None:
    """The tier is empty on the device, and the bytes that it is said to hold are none."""
    keep_a_copy_at_fill()
    VulkanExperts.run_experts = compute_on_cpu  # type: ignore[method-assign]
    honest = VulkanExperts.fill

    def fill(self: VulkanExperts, ranked: Any, _: int, read: Any) -> Residency:
        honest(self, ranked, 0, read)
        return Residency(tuple(key for key, _ in ranked), 0)

    VulkanExperts.fill = fill  # type: ignore[method-assign]


@fault
def names_no_pieces_and_does_one() -> None:
    dispatches_another_shader()
    rewrite_events(lambda event, fields: (event, {**fields, "pieces": []}))


@fault
def writes_counters_that_cannot_be_read() -> None:
    rewrite_events(
        lambda event, fields: (event, {**fields, "submits": "many"} if event == "telemetry" else fields)
    )


@fault
def takes_its_device_back() -> None:
    def emit(self: Events, event: str, **fields: object) -> None:
        honest_emit(self, event, **fields)
        if event == "claim" and fields["claim"] == "device":
            honest_emit(self, "retract", claim="device", reason="lost")

    Events.emit = emit  # type: ignore[method-assign]


@fault
def announces_its_end_first() -> None:
    def emit(self: Events, event: str, **fields: object) -> None:
        if event != "end":
            honest_emit(self, event, **fields)
        if event == "start":
            honest_emit(self, "end")

    Events.emit = emit  # type: ignore[method-assign]


@fault
def writes_phases_past_the_witness() -> None:
    """Honest work, but its phase lines come out with other spacing."""

    def emit(self: Events, event: str, **fields: object) -> None:
        if event == "phase":
            os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")
        else:
            honest_emit(self, event, **fields)

    Events.emit = emit  # type: ignore[method-assign]


@fault
def moves_phases_through_another_file() -> None:
    """All work is done at the fill; phase lines that nobody reads make it look like decode."""
    keep_a_copy_at_fill()
    VulkanExperts.run_experts = compute_on_cpu  # type: ignore[method-assign]
    with_copy = VulkanExperts.fill

    def fill(self: VulkanExperts, ranked: Any, budget_bytes: int, read: Any) -> Residency:
        residency = with_copy(self, ranked, budget_bytes, read)
        hidden = Events(os.open(os.devnull, os.O_WRONLY))
        for phase in ("prefill", "decode"):
            honest_emit(hidden, "phase", phase=phase, state="begin")
            for key in residency.experts * 12:
                rows = np.ones((1, self.kept[key].gate.layout.inputs), np.float32)  # type: ignore[attr-defined]
                honest_run(self, [ExpertRows(key, np.zeros(1, np.int64), rows[:, 0])], rows)
            honest_emit(hidden, "phase", phase=phase, state="end")
        return residency

    VulkanExperts.fill = fill  # type: ignore[method-assign]
    without_event("telemetry")


@fault
def writes_into_the_model_folder() -> None:
    honest_answer = session.Session.answer

    def answer(self: session.Session, model: Any) -> None:
        (self._request.model / ".coli_usage").write_text("3 0 1\n")
        honest_answer(self, model)

    session.Session.answer = answer  # type: ignore[method-assign]


@fault
def allocates_beyond_the_device_budget() -> None:
    honest_create = compute.create_buffer

    def create(owner: Any, nbytes: int, wanted: Any) -> Any:
        return honest_create(owner, nbytes + 64 * 2**20, wanted)

    compute.create_buffer = create


@fault
def counts_positions_from_zero() -> None:
    rewrite_events(
        lambda event, fields: (
            (event, {**fields, "position": fields["position"] - 12}) if event == "token" else (event, fields)
        )
    )


@fault
def gives_no_counters() -> None:
    without_event("telemetry")


@fault
def refuses() -> None:
    def run(*_: object) -> None:
        raise session.UsageError("shader missing: gate_up_int4.spv")

    session.run = run  # type: ignore[assignment]


@fault
def is_clean() -> None:
    """The control: no fault at all."""


def without_event(unwanted: str) -> None:
    rewrite_events(lambda event, fields: None if event == unwanted else (event, fields))


def rewrite_events(change: Callable[[str, dict[str, Any]], tuple[str, dict[str, Any]] | None]) -> None:
    def emit(self: Events, event: str, **fields: object) -> None:
        changed = change(event, fields)
        if changed is not None:
            honest_emit(self, changed[0], **changed[1])

    Events.emit = emit  # type: ignore[method-assign]


if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(program.main(sys.argv[2:]))
