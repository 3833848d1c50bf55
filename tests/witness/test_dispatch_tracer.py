"""Counts of the dispatch witness against real Vulkan programs whose dispatches are known."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Shader
from watching import executed_by_phase, launch, only_device, python

from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.witness import counters, dispatch
from pytest_colibri.witness.counters import PROTOCOL_MARKERS, PhaseMarkers, one_identity_per_device
from pytest_colibri.witness.dispatch import DispatchTracer
from pytest_colibri.witness.evidence import WatchedRun
from pytest_colibri.witness.memory import MemoryGuard
from pytest_colibri.witness.run import watch

RunScenario = Callable[..., WatchedRun]
MIB = 2**20


def test_counts_belong_to_the_phase_of_their_submit(
    run_scenario: RunScenario, shaders: tuple[Shader, Shader]
) -> None:
    run = run_scenario("phases")
    first, second = shaders[0].sha256, shaders[1].sha256
    assert executed_by_phase(run) == {
        "prefill": {first: (2, 2), second: (1, 1)},
        "decode": {first: (5, 5), second: (3, 3)},
        "outside": {first: (1, 1)},
    }
    assert [(p.phase, p.submits, p.executed) for p in only_device(run).phases] == [
        ("prefill", 2, 3),
        ("decode", 2, 8),
        ("outside", 1, 1),
    ]
    assert run.dispatch is not None
    assert run.dispatch.complete
    assert run.dispatch.phases_seen == (
        ("prefill", "begin"),
        ("prefill", "end"),
        ("decode", "begin"),
        ("decode", "end"),
    )


@pytest.mark.parametrize(
    ("scenario", "first", "second", "submits"),
    [
        ("two_shaders_in_one_buffer", (2, 2), (3, 3), 1),
        ("recorded_only", (4, 0), None, 0),
        ("zero_workgroups", (4, 0), None, 1),
        ("resubmitted", (2, 6), None, 3),
        ("recorded_anew", (9, 2), (1, 1), 2),
        ("secondary_buffers", (3, 6), None, 1),
        ("function_pointers", (4, 8), None, 2),
        ("submit2", (2, 4), None, 2),
        ("indirect", (2, 2), None, 1),
        ("dispatch_base", (2, 1), None, 1),
        ("two_threads", (500, 500), (500, 500), 100),
        ("second_instance", (4, 12), None, 6),
        ("executes_itself", (4, 12), None, 6),
        ("child_process", (4, 12), None, 6),
        ("forked", (4, 12), None, 6),
    ],
)
def test_dispatches_are_counted_once_and_only_when_they_are_executed(
    run_scenario: RunScenario,
    shaders: tuple[Shader, Shader],
    scenario: str,
    first: tuple[int, int],
    second: tuple[int, int] | None,
    submits: int,
) -> None:
    run = run_scenario(scenario)
    assert run.output.status == 0, run.output.stderr
    expected = {shaders[0].sha256: first}
    if second is not None:
        expected[shaders[1].sha256] = second
    assert executed_by_phase(run) == {"outside": expected}
    assert sum(phase.submits for phase in only_device(run).phases) == submits


@pytest.mark.parametrize(
    ("scenario", "status"), [("killed", -signal.SIGKILL), ("left_by_exit", 7), ("resubmitted", 0)]
)
def test_counts_and_exit_status_survive_every_way_to_end(
    run_scenario: RunScenario, shaders: tuple[Shader, Shader], scenario: str, status: int
) -> None:
    run = run_scenario(scenario)
    assert (run.output.status, run.output.ended) == (status, "itself")
    assert executed_by_phase(run) == {"outside": {shaders[0].sha256: (2, 6)}}


def test_counts_survive_the_timeout(run_scenario: RunScenario, shaders: tuple[Shader, Shader]) -> None:
    run = run_scenario("endless", timeout_s=3.0)
    assert run.output.ended == "timeout"
    assert run.output.stdout == ("ready",)
    assert executed_by_phase(run) == {"outside": {shaders[0].sha256: (2, 6)}}


def test_an_engine_behind_a_script_is_followed(
    run_scenario: RunScenario, shaders: tuple[Shader, Shader]
) -> None:
    run = run_scenario("resubmitted", wrapper=("/bin/sh", "-c", '"$@"; echo status $?; exit 5', "sh"))
    assert (run.output.status, run.output.stdout) == (5, ("status 0",))
    assert executed_by_phase(run) == {"outside": {shaders[0].sha256: (2, 6)}}


def test_a_recording_of_all_calls_gives_the_same_counts(run_scenario: RunScenario, tmp_path: Path) -> None:
    convert = shutil.which("gfxrecon-convert")
    if convert is None:
        pytest.skip("gfxreconstruct is not installed: its layer is the second opinion on these counts")
    run = run_scenario(
        "phases",
        VK_INSTANCE_LAYERS="VK_LAYER_LUNARG_gfxreconstruct",
        GFXRECON_CAPTURE_FILE=str(tmp_path / "calls.gfxr"),
        GFXRECON_LOG_LEVEL="error",
    )
    (recording,) = tmp_path.glob("*.gfxr")
    subprocess.run([convert, recording], check=True, timeout=60, capture_output=True)
    (converted,) = tmp_path.glob("*.jsonl")
    calls = Counter(re.findall(r'"name":\s*"(vk\w+)"', converted.read_text()))
    phases = only_device(run).phases
    assert (
        calls["vkCmdDispatch"] == sum(shader.recorded for phase in phases for shader in phase.shaders) == 12
    )
    assert calls["vkQueueSubmit"] == sum(phase.submits for phase in phases) == 5


@pytest.mark.parametrize(
    ("scenario", "by_phase", "seen"),
    [
        ("markers_to_other_files", {"outside": (6, 6)}, ()),
        ("markers_of_a_child_with_another_output", {"outside": (8, 8)}, ()),
        ("markers_that_no_one_sees", {"outside": (4, 4)}, ()),
        ("markers_of_the_parent", {"outside": (2, 6)}, ()),
        ("markers_through_another_descriptor", {"decode": (2, 2)}, (("decode", "begin"), ("decode", "end"))),
        ("the_same_marker_often", {"decode": (2, 6)}, (("decode", "begin"),) * 5000),
    ],
)
def test_only_markers_that_reach_standard_output_open_a_phase(
    run_scenario: RunScenario,
    shaders: tuple[Shader, Shader],
    scenario: str,
    by_phase: dict[str, tuple[int, int]],
    seen: tuple[tuple[str, str], ...],
) -> None:
    run = run_scenario(scenario)
    assert run.output.status == 0, run.output.stderr
    first = shaders[0].sha256
    counted = {phase: counts[first] for phase, counts in executed_by_phase(run).items()}
    assert counted == by_phase
    assert run.dispatch is not None
    assert run.dispatch.phases_seen == seen


def test_more_phases_than_there_is_room_for_are_said_to_be_lost(run_scenario: RunScenario) -> None:
    run = run_scenario("too_many_phases")
    assert run.dispatch is not None
    assert not run.dispatch.complete
    assert any("more phase markers" in note for note in run.dispatch.notes)
    (phase,) = run.dispatch.devices[0].phases
    assert (phase.phase, [s.executed for s in phase.shaders]) == ("outside", [6])


def test_a_child_that_is_not_followed_leaves_the_counts_incomplete(
    run_scenario: RunScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = dispatch.Trace._load_agent

    def load_once(trace: dispatch.Trace, session: object) -> None:
        if trace._images:
            raise RuntimeError("refused")
        load(trace, session)

    monkeypatch.setattr(dispatch.Trace, "_load_agent", load_once)
    run = run_scenario("child_process")
    # A forked child can abort when frida leaves it, about once in twenty times; its parent then sees it fail.
    assert run.output.ended == "itself"
    assert run.output.status in (0, 1), run.output.stderr
    assert run.dispatch is not None
    assert not run.dispatch.complete
    assert [note for note in run.dispatch.notes if note.endswith("was not followed: refused")]
    (phase,) = run.dispatch.devices[0].phases
    assert [s.executed for s in phase.shaders] == [6]


@pytest.mark.parametrize(
    ("scenario", "executed"),
    [("two_api_versions", 4), ("two_processes_of_two_api_versions", 8), ("a_group_of_devices", 6)],
)
def test_a_device_that_shows_itself_twice_is_one(
    run_scenario: RunScenario, scenario: str, executed: int
) -> None:
    run = run_scenario(scenario)
    assert run.output.status == 0, run.output.stderr
    device = only_device(run)
    assert sum(phase.executed for phase in device.phases) == executed
    assert (device.device.index, device.device.uuid) == (0, only_device(run_scenario("phases")).device.uuid)


def test_instances_of_one_process_share_the_peak_of_their_device(run_scenario: RunScenario) -> None:
    device = only_device(run_scenario("two_api_versions"))
    assert device.peak_bytes == {0: 2 * MIB}


FIRST, SECOND = (DeviceIdentity("vulkan", index, "card", str(index) * 32) for index in (0, 1))


@pytest.mark.parametrize(
    ("seen", "fullest"),
    [
        ([replace(FIRST, index=-1), FIRST], [FIRST, FIRST]),
        ([replace(FIRST, uuid=None), FIRST, SECOND], [FIRST, FIRST, SECOND]),
        ([replace(FIRST, uuid=None, index=-1), FIRST], [FIRST, FIRST]),
        ([replace(FIRST, uuid=None, index=-1), FIRST, SECOND], None),
        ([replace(FIRST, name="other", uuid=None), FIRST], None),
        ([replace(FIRST, pci="0000:01:00.0"), FIRST], [replace(FIRST, pci="0000:01:00.0")] * 2),
        ([replace(FIRST, uuid=None, index=-1, pci="a"), replace(FIRST, uuid=None, pci="b")], None),
    ],
)
def test_identities_are_joined_only_where_one_device_fits(
    seen: list[DeviceIdentity], fullest: list[DeviceIdentity] | None
) -> None:
    joined = one_identity_per_device(seen)
    assert [joined[identity] for identity in seen] == (fullest or seen)


def test_allocations_are_summed_by_memory_type_with_their_peak(run_scenario: RunScenario) -> None:
    device = only_device(run_scenario("allocations"))
    assert device.allocated_bytes == {0: 3 * MIB + MIB // 2}
    assert device.peak_bytes == {0: 3 * MIB}


def test_a_destroyed_device_holds_no_memory(run_scenario: RunScenario) -> None:
    device = only_device(run_scenario("devices_one_after_the_other"))
    assert device.allocated_bytes == {0: 5 * MIB}
    assert device.peak_bytes == {0: 3 * MIB}


def test_the_device_is_identified_as_its_driver_presents_it(run_scenario: RunScenario) -> None:
    device = only_device(run_scenario("phases"))
    program = (
        "import vulkan as vk; from gpu import Gpu; gpu = Gpu();"
        "seen = vk.vkGetPhysicalDeviceProperties(gpu.physical);"
        "print(seen.deviceName, seen.deviceType, sep='\\n')"
    )
    run = watch(python(program), tracer=None, guard=MemoryGuard())
    name, kind = run.output.stdout
    assert (device.device.api, device.device.index, device.device.name) == ("vulkan", 0, name)
    assert device.type == {"0": "other", "1": "integrated", "2": "discrete", "3": "virtual", "4": "cpu"}[kind]
    assert device.device.uuid is None or len(device.device.uuid) == 32


@pytest.mark.parametrize("program", ["print('no vulkan')", "import vulkan; print('loads it only')"])
def test_a_program_that_dispatches_nothing_gives_evidence_of_nothing(
    tracer: DispatchTracer, program: str
) -> None:
    run = watch(python(program), tracer=tracer, guard=MemoryGuard())
    assert run.output.status == 0
    assert run.unwitnessed is None
    assert run.dispatch is not None
    assert (run.dispatch.devices, run.dispatch.notes) == ((), ())


def test_the_program_keeps_its_arguments_environment_and_signals(tracer: DispatchTracer) -> None:
    program = (
        "import os, signal, sys; print(sys.argv[1:], sorted(os.environ.items()), sys.stdin.read(), "
        "[n for n in (signal.SIGPIPE, signal.SIGINT) if signal.getsignal(n) is signal.SIG_IGN])"
    )
    arguments = ("with space", "ünï", "$HOME `x`", "")
    spec = python(program, *arguments)
    direct = subprocess.run(
        spec.argv,
        env=spec.environment,
        cwd=spec.directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for chosen in (None, tracer):
        told = watch(spec, tracer=chosen, guard=MemoryGuard()).output.stdout
        assert told == tuple(direct.stdout.splitlines())


@pytest.mark.usefixtures("tracer")
def test_other_engines_have_other_markers(shaders: tuple[Shader, Shader]) -> None:
    program = (
        "import sys; from gpu import Gpu; gpu = Gpu(sys.argv[1]);\n"
        "def work():\n    b = gpu.buffer(); gpu.record(b, gpu.pipelines[0], 2); gpu.submit(b); gpu.finish()\n"
        "work(); print('[go] fast', flush=True); work()"
    )
    markers = PhaseMarkers(prefixes=("[stop]", "[go]"), read=lambda text: (text.split()[1], "begin"))
    run = watch(python(program, str(shaders[0].path)), tracer=DispatchTracer(markers), guard=MemoryGuard())
    assert executed_by_phase(run) == {
        "outside": {shaders[0].sha256: (2, 2)},
        "fast": {shaders[0].sha256: (2, 2)},
    }


@pytest.mark.parametrize(
    ("marker", "read"),
    [
        ('{"event":"phase","phase":"decode","state":"begin"}\n', ("decode", "begin")),
        (
            '{"event":"phase","at_us":17,"state":"begin","phase":"fill"}\n{"event":"token"}\n',
            ("fill", "begin"),
        ),
        ('{"event":"phase","phase":"decode","state":"end"}\n', ("decode", "end")),
        ('{"event":"phase","phase":"decode"', None),
        ('{"event":"phase",[]', None),
    ],
)
def test_phase_lines_of_the_engine_protocol(marker: str, read: tuple[str, str] | None) -> None:
    assert PROTOCOL_MARKERS.read(marker) == read


def test_without_frida_the_reach_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "frida", None)
    dispatch._obstacle.cache_clear()
    reach = DispatchTracer().reach()
    dispatch._obstacle.cache_clear()
    assert not reach.able
    assert reach.statement == "frida is not installed: pip install 'pytest-colibri[trace]'"


def test_a_run_whose_tracer_does_not_attach_goes_on_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tracer: DispatchTracer
) -> None:
    monkeypatch.setattr(dispatch, "ATTACH_TIMEOUT_S", 0.0)
    run = watch(python("print('done')"), tracer=tracer, guard=MemoryGuard())
    assert (run.output.status, run.output.stdout) == (0, ("done",))
    assert run.dispatch is None
    assert run.unwitnessed == "the tracer did not attach within 0 s"


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() == 0, reason="root may trace every program of Linux"
)
def test_a_program_that_may_not_be_traced_runs_without_the_tracer(
    tracer: DispatchTracer, tmp_path: Path
) -> None:
    unreadable = tmp_path / "echo"
    shutil.copy(shutil.which("echo") or "", unreadable)
    unreadable.chmod(0o111)
    run = watch(launch(str(unreadable), "done"), tracer=tracer, guard=MemoryGuard())
    assert (run.output.status, run.output.stdout) == (0, ("done",))
    assert run.dispatch is None
    assert run.unwitnessed is not None
    assert run.unwitnessed.startswith("the tracer cannot enter the process: ")


def test_a_process_that_is_gone_cannot_be_followed(tracer: DispatchTracer) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with tracer.follow(process.pid) as trace:
        pass
    assert trace.evidence() is None
    assert trace.failure is not None
    assert trace.failure.startswith("the tracer cannot attach to the process: ")


def test_both_sides_agree_on_the_layout(tracer: DispatchTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SIZE_BYTES", counters.SIZE_BYTES + 8)
    run = watch(launch(sys.executable, "-c", ""), tracer=tracer, guard=MemoryGuard())
    assert run.dispatch is None
    assert run.unwitnessed is not None
    assert "different layouts" in run.unwitnessed
