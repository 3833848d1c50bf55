from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import psutil
import pytest

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.live import ALL_APIS, probe_host
from pytest_colibri.host.tools import MAX_OUTPUT_BYTES, run_tool
from pytest_colibri.profiles.model import HostMatch, Profile, Recording, Tool

PROJECT = Path(__file__).parents[2]
RECORDINGS = PROJECT / "hardware_profiles" / "recordings"


def profile(*recordings: Recording, match: HostMatch | None = None) -> Profile:
    return Profile(
        name="a-machine",
        title="A machine",
        backend="vulkan",
        match=match or HostMatch(),
        pool=None,
        tiers=("ram", "disk"),
        environment={},
        recordings=recordings,
        path=Path("a-machine.yaml"),
    )


def recorded(tool: str, text: str) -> Recording:
    return Recording(tool, "recorded", text)  # type: ignore[arg-type]


def software_vulkan() -> list[Recording]:
    files = {"meminfo": "meminfo.txt", "lscpu": "lscpu.txt", "vulkan": "vulkan.json"}
    return [
        recorded(tool, (RECORDINGS / f"software-vulkan.{name}").read_text(encoding="utf-8"))
        for tool, name in files.items()
    ]


def test_the_shipped_recordings_of_lavapipe_give_a_whole_host():
    match = HostMatch(systems=("linux",), architectures=("x86_64",))
    host = emulate_host(profile(*software_vulkan(), match=match))
    assert (host.kind, host.system, host.architecture) == ("emulated", "linux", "x86_64")
    assert host.processor.physical_cores == 2
    assert host.memory.total.bytes == 24_683_652 * 1024
    assert host.memory.limit == host.memory.available
    assert [found.is_software for found in host.accelerators] == [True]
    assert host.notes == ("meminfo: recorded", "lscpu: recorded", "vulkan: recorded")


def test_recordings_name_no_host_and_no_user():
    for path in RECORDINGS.iterdir():
        text = path.read_text(encoding="utf-8")
        assert platform.node() not in text.split()
        assert "/home/" not in text
        assert "/root" not in text


def test_a_unified_machine_of_reports_has_its_pool_and_its_control_group():
    group = (
        "==> memory.max <==\n34359738368\n==> memory.current <==\n0\n==> memory.stat <==\ninactive_file 0\n"
    )
    host = emulate_host(
        profile(
            recorded("meminfo", "MemTotal: 260000000 kB\nMemAvailable: 250000000 kB\n"),
            recorded("cgroup-v2", group),
            recorded("nvidia-smi", "0, NVIDIA GB10, [N/A], [N/A]\n"),
        )
    )
    assert host.memory.limit.bytes == 34_359_738_368
    assert host.accelerators[0].pool == "unified"
    assert host.accelerators[0].free.bytes is None
    assert (host.system, host.processor.physical_cores) == ("unknown", 1)
    assert host.processor.note is not None


def test_both_cgroup_versions_of_a_hybrid_machine_bound_it():
    v1 = "==> memory.limit_in_bytes <==\n5000\n==> memory.usage_in_bytes <==\n1000\n"
    v2 = "==> memory.max <==\nmax\n==> memory.current <==\n0\n"
    host = emulate_host(profile(recorded("cgroup-v1", v1), recorded("cgroup-v2", v2)))
    assert host.memory.cgroup_available.bytes == 4000


def test_a_mac_is_emulated_from_its_tools():
    vm_stat = (
        "hw.memsize: 68719476736\nhw.physicalcpu: 12\nhw.perflevel0.physicalcpu: 8\nhw.packages: 1\n"
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free: 10.\nPages inactive: 20.\n"
        "Pages speculative: 3.\nPages purgeable: 4.\n"
    )
    gpu = {"sppci_model": "Apple M2 Max", "spdisplays_vendor": "sppci_vendor_Apple"}
    host = emulate_host(
        profile(
            recorded("vm_stat", vm_stat),
            recorded("system_profiler", json.dumps({"SPDisplaysDataType": [gpu]})),
        )
    )
    assert host.memory.available.bytes == 37 * 16384
    assert host.processor.physical_cores == 8
    assert host.accelerators[0].total.bytes == 48 * 2**30


def test_what_no_recording_shows_is_unknown():
    host = emulate_host(profile(recorded("lscpu", "0,0\n")))
    assert host.memory.limit.bytes is None
    assert host.accelerators == ()


def test_a_profile_without_recordings_cannot_be_emulated():
    with pytest.raises(UsageError, match=r"a-machine.yaml.*no recordings"):
        emulate_host(profile())


def test_two_recordings_of_one_tool_are_refused():
    with pytest.raises(UsageError, match="two recordings"):
        emulate_host(profile(recorded("lscpu", "0,0\n"), recorded("lscpu", "0,0\n")))


def test_a_broken_recording_names_profile_and_tool():
    with pytest.raises(UsageError, match=r"a-machine.yaml: recording of vulkan"):
        emulate_host(profile(recorded("vulkan", "{")))


NONSENSE = {
    "meminfo": "hello", "cgroup-v1": "hello", "cgroup-v2": "==> memory.max <==\nmuch\n", "vm_stat": "hello",
    "cim": "hello", "lscpu": "hello", "nvidia-smi": "hello", "device-tree": "hello", "rocm-smi": "device,x\n",
    "amd-sysfs": "hello", "hipinfo": "hello", "vulkan": "[]", "system_profiler": "{}",
}  # fmt: skip


def test_nonsense_is_refused_for_every_tool_and_said_together():
    assert set(NONSENSE) == set(get_args(Tool))
    recordings = [
        Recording(tool, "recorded", text, place=f"box.yaml:{line}:11")
        for line, (tool, text) in enumerate(NONSENSE.items())
    ]
    with pytest.raises(UsageError) as caught:
        emulate_host(profile(*recordings, recorded("meminfo", "MemTotal: 1 kB\n")))
    assert "two recordings" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        emulate_host(profile(*recordings))
    for line, place, tool in zip(str(caught.value).splitlines(), recordings, NONSENSE, strict=True):
        assert line.startswith(f"{place.place}: recording of {tool[:6]}")


def test_a_machine_without_a_limit_is_no_nonsense():
    unlimited = recorded("cgroup-v2", "==> memory.max <==\nmax\n\n==> memory.current <==\n1\n")
    assert emulate_host(profile(unlimited)).memory.limit.bytes is None


def test_a_reported_recording_carries_its_link():
    reported = Recording("lscpu", "reported", "0,0\n", "https://example.org/issues/1")
    assert emulate_host(profile(reported)).notes == ("lscpu: reported, https://example.org/issues/1",)


def test_this_machine_is_probed_for_the_asked_interfaces_only():
    host = probe_host(frozenset({"cuda"}))
    assert host.kind == "live"
    assert host.system == platform.system().lower()
    assert {found.identity.api for found in host.accelerators} <= {"cuda"}
    assert not any(note.startswith(("Vulkan", "ROCm", "Metal")) for note in host.notes)


def test_every_interface_gives_devices_or_a_note():
    host = probe_host(ALL_APIS)
    shown = {found.identity.api for found in host.accelerators}
    noted = {note.split(":")[0].lower() for note in host.notes}
    assert shown | noted == ALL_APIS


@pytest.mark.parametrize("apis", [frozenset(), frozenset({"cpu"})])
def test_a_cpu_run_probes_no_device(apis):
    host = probe_host(apis)
    assert (host.accelerators, host.notes) == ((), ())
    assert host.memory.limit.bytes


def test_probes_load_no_heavy_library_until_they_run():
    program = (
        "import sys, pytest_colibri.host.live, pytest_colibri.host.emulated\n"
        "print(sorted({'numpy', 'vulkan', 'pynvml', 'psutil', 'jsonschema'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=30
    )
    assert output.stdout == "[]\n"


def test_output_of_a_tool_is_bounded():
    output = run_tool([sys.executable, "-c", f"print('x' * {2 * MAX_OUTPUT_BYTES})"])
    assert (output.status, len(output.text)) == (0, MAX_OUTPUT_BYTES)


def test_a_tool_that_is_not_installed_is_named():
    with pytest.raises(Unavailable, match="no-such-tool is not installed"):
        run_tool(["no-such-tool"])


INTERRUPTED = """
import sys
from pytest_colibri.host.tools import run_tool
run_tool([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=50)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_an_interrupted_wait_leaves_no_process_behind():
    parent = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=PROJECT,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background job
    )
    with parent:
        process = psutil.Process(parent.pid)
        # The threads that read its output start once the tool runs.
        while process.num_threads() == 1:
            time.sleep(0.02)
        tools = process.children()
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=10) != 0
    gone, alive = psutil.wait_procs(tools, timeout=5)
    assert (len(gone), alive) == (1, [])
