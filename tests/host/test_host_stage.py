"""A stage shows its machine to real programs: to tools' callers, to readers of files, and only to them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from pytest_colibri.errors import UsageError
from pytest_colibri.host import stage as stage_module
from pytest_colibri.host.amdgpu import parse_drm
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.stage import STAGE_VARIABLE, Stage
from pytest_colibri.profiles.loader import all_profiles, find_profile
from pytest_colibri.profiles.model import Profile, Recording, Tool

ROOT = Path(__file__).parents[2]
MEMINFO = "MemTotal: 250000000 kB\nMemAvailable: 250000000 kB\n"
GROUP = """\
==> memory.max <==
34359738368

==> memory.current <==
1000

==> memory.stat <==
inactive_file 600
"""
GPUS = (
    "0, NVIDIA A100-SXM4-80GB, [Insufficient Permissions], [Insufficient Permissions]\n"
    "1, Odd, Name, GPU-00000000-0000-4000-8000-000000000001, 00000000:02:00.0, 24576, 24000\n"
)
AMD = """\
WARNING: AMD GPU device(s) is/are in a low-power state
device,VRAM Total Memory (B),VRAM Total Used Memory (B),GTT Total Memory (B),Card Series,PCI Bus,GFX Version
card0,17163091968,692142080,1000,"Navi 21, XT",0000:03:00.0,gfx1030

"""

needs_posix = pytest.mark.skipif(os.name != "posix", reason="recorded tools are scripts")
pytestmark = needs_posix


def machine(**texts: str) -> Profile:
    """Return a machine with these recordings; ``_`` in a name stands for ``-``."""
    recordings = tuple(
        Recording(
            cast(Tool, name if name in ("vm_stat", "system_profiler") else name.replace("_", "-")),
            "constructed",
            text,
        )
        for name, text in texts.items()
    )
    return dataclasses.replace(find_profile("nvidia-cuda"), recordings=recordings)


def stage_of(folder: Path, **texts: str) -> Stage:
    return Stage(machine(**texts), folder)


def on(stage: Stage, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program on the stage; one without a folder is looked for in the PATH of the stage."""
    environment = dict(stage.environment({"PYTHONPATH": str(ROOT)}))
    program = shutil.which(argv[0], path=environment["PATH"]) or argv[0]
    return subprocess.run(
        stage.command((program, *argv[1:])), env=environment, capture_output=True, text=True, timeout=20
    )


def binding(stage: Stage) -> Stage:
    if not stage.is_complete:
        pytest.skip(stage.reach)
    return stage


def memory_seen_on(stage: Stage) -> dict[str, Any]:
    program = (
        "import json; from pytest_colibri.host.memory import probe_memory; memory = probe_memory()\n"
        "print(json.dumps([memory.available.bytes, memory.cgroup_available.bytes]))"
    )
    output = on(binding(stage), sys.executable, "-c", program)
    assert output.returncode == 0, output.stderr
    return json.loads(output.stdout)


@pytest.mark.parametrize(
    "profile",
    [
        profile
        for profile in all_profiles()
        if profile.name != "msys2" and any(r.tool == "meminfo" for r in profile.recordings)
    ],
    ids=lambda profile: profile.name,
)
def test_the_live_probe_on_a_stage_sees_what_emulation_sees(profile: Profile, tmp_path: Path) -> None:
    memory = emulate_host(profile).memory
    seen = memory_seen_on(Stage(profile, tmp_path))
    assert seen == [memory.available.bytes, memory.cgroup_available.bytes]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"cgroup_v2": GROUP}, 34359738368 - 400),
        ({"cgroup_v2": GROUP.replace("memory.", "/sys/fs/cgroup/pods/one/memory.")}, 34359738368 - 400),
        (
            {
                "cgroup_v1": GROUP.replace("memory.max", "memory.limit_in_bytes")
                .replace("memory.current", "memory.usage_in_bytes")
                .replace("inactive_file", "total_inactive_file")
            },
            34359738368 - 400,
        ),
        ({}, None),
    ],
    ids=["v2", "v2 nested", "v1", "none"],
)
def test_control_groups_are_those_of_the_recording(
    texts: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    assert memory_seen_on(stage_of(tmp_path, meminfo=MEMINFO, **texts)) == [250000000 * 1024, expected]


def test_both_versions_of_control_groups_at_once(tmp_path: Path) -> None:
    old = GROUP.replace("memory.max", "memory.limit_in_bytes").replace(
        "memory.current", "memory.usage_in_bytes"
    )
    old = old.replace("34359738368", "30000000000").replace("inactive_file", "total_inactive_file")
    stage = stage_of(tmp_path, meminfo=MEMINFO, cgroup_v1=old, cgroup_v2=GROUP)
    assert memory_seen_on(stage)[1] == 30000000000 - 400


@pytest.mark.parametrize("name", ["../memory.max", "/etc/memory.max", "a/../../memory.max", "a/..", "/"])
def test_a_group_outside_of_the_mount_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"'{re.escape(name)}' is no file below /sys/fs/cgroup"):
        assert stage_of(tmp_path / "stage", cgroup_v2=GROUP.replace("memory.max", name)).reach
    assert not list(tmp_path.rglob("memory.max"))


def test_cards_of_amdgpu_are_found_where_the_driver_shows_them(tmp_path: Path) -> None:
    profile = find_profile("steam-deck")
    text = next(recording.text for recording in profile.recordings if recording.tool == "amd-sysfs")
    program = "from pytest_colibri.host.amdgpu import *; print(parse_drm(read_drm()))"
    output = on(binding(Stage(profile, tmp_path)), sys.executable, "-c", program)
    assert (output.stdout, output.stderr) == (f"{parse_drm(text)}\n", "")


def test_devices_of_this_machine_are_hidden(tmp_path: Path) -> None:
    stage = binding(stage_of(tmp_path, meminfo=MEMINFO))
    assert on(stage, sys.executable, "-c", "import os; print(os.listdir('/sys/class'))").stdout == "[]\n"


def test_a_recorded_file_that_this_machine_lacks_is_redirected(tmp_path: Path) -> None:
    if Path("/proc/device-tree").exists():
        pytest.skip("this machine has a device tree, which can be bound over")
    stage = stage_of(tmp_path, device_tree="NVIDIA Jetson AGX Orin\nnvidia,p3701\nnvidia,tegra234\n")
    assert not stage.is_complete
    assert "/proc/device-tree are redirected for planners in Python only" in stage.reach
    document = json.loads(Path(stage.environment({})[STAGE_VARIABLE]).read_text())
    folder = Path(document["files"]["/proc/device-tree"])
    assert (folder / "model").read_text() == "NVIDIA Jetson AGX Orin\0"
    assert (folder / "compatible").read_text() == "nvidia,p3701\0nvidia,tegra234\0"


def test_only_the_program_sees_the_recorded_files(tmp_path: Path) -> None:
    real = Path("/proc/meminfo")
    stage = binding(stage_of(tmp_path, meminfo="MemTotal: 4711 kB\n"))
    assert (
        on(stage, sys.executable, "-c", "print(open('/proc/meminfo').read())").stdout
        == "MemTotal: 4711 kB\n\n"
    )
    assert "MemTotal: 4711 kB" not in real.read_text()


def test_a_program_keeps_its_exit_status_and_its_signals(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, meminfo=MEMINFO)
    assert on(stage, sys.executable, "-c", "raise SystemExit(5)").returncode == 5
    ends = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert on(stage, sys.executable, "-c", ends).returncode == -15


def test_logical_processors_are_those_of_the_recording(tmp_path: Path) -> None:
    stage = binding(stage_of(tmp_path, lscpu="# CPU,Core,Socket\n0,0,0\n1,0,0\n2,1,0\n3,-,-\n"))
    assert (
        on(stage, sys.executable, "-c", "print(open('/sys/devices/system/cpu/online').read())").stdout
        == "0-2\n\n"
    )


@pytest.mark.parametrize(
    ("texts", "command", "answer"),
    [
        (
            {"nvidia_smi": GPUS},
            "nvidia-smi --query-gpu=index,name,memory.total,memory.free --format=csv,noheader,nounits",
            "0, NVIDIA A100-SXM4-80GB, [Insufficient Permissions], [Insufficient Permissions]\n"
            "1, Odd, Name, 24576, 24000\n",
        ),
        (
            {"nvidia_smi": GPUS.splitlines()[1]},
            "nvidia-smi --format=csv --query-gpu=pci.bus_id,memory.free",
            "pci.bus_id, memory.free [MiB]\n00000000:02:00.0, 24000 MiB\n",
        ),
        (
            {"nvidia_smi": "0, GB10, [N/A], [N/A]"},
            "nvidia-smi --query-gpu=memory.total --format=csv,noheader",
            "[N/A]\n",
        ),
        (
            {"rocm_smi": AMD},
            "rocm-smi --showmeminfo vram --showproductname --csv",
            "WARNING: AMD GPU device(s) is/are in a low-power state\n"
            "device,VRAM Total Memory (B),VRAM Total Used Memory (B),Card Series,GFX Version\n"
            'card0,17163091968,692142080,"Navi 21, XT",gfx1030\n\n',
        ),
        (
            {"rocm_smi": AMD[AMD.index("device,") :]},
            "rocm-smi --showmeminfo gtt --showbus --csv",
            "device,GTT Total Memory (B),PCI Bus\ncard0,1000,0000:03:00.0\n\n",
        ),
        ({"lscpu": "# CPU,Core,Socket\n0,0,1\n1,-,-\n"}, "lscpu -p=socket", "# Socket\n1\n-\n"),
        ({"lscpu": "0,3\n"}, "lscpu --parse=Core,Socket", "# Core,Socket\n0,3\n"),
        ({"lscpu": "7,0,3\n"}, "lscpu -p=cpu,core", "# CPU,Core\n7,0\n"),
        ({"vm_stat": "hw.memsize: 64\nMach Virtual Memory Statistics: 1\n"}, "sysctl -n hw.memsize", "64\n"),
        (
            {"vm_stat": "hw.memsize: 64\nMach Virtual Memory Statistics: 1\n"},
            "sysctl hw.memsize",
            "hw.memsize: 64\n",
        ),
        (
            {"vm_stat": "hw.memsize: 64\nMach Virtual Memory Statistics: 1\n"},
            "vm_stat",
            "Mach Virtual Memory Statistics: 1\n",
        ),
        (
            {"system_profiler": '{"SPDisplaysDataType": [1], "SPHardwareDataType": [2]}'},
            "system_profiler SPDisplaysDataType -json",
            '{\n "SPDisplaysDataType": [\n  1\n ]\n}\n',
        ),
        ({"hipinfo": "device# 0\nName: AMD Radeon\n"}, "hipInfo", "device# 0\nName: AMD Radeon\n"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.count("\n") == 0 else "",
)
def test_a_tool_answers_what_is_asked(
    texts: dict[str, str], command: str, answer: str, tmp_path: Path
) -> None:
    output = on(stage_of(tmp_path, **texts), *command.split())
    assert (output.stdout, output.stderr, output.returncode) == (answer, "", 0)


@pytest.mark.parametrize(
    ("texts", "command", "sentence"),
    [
        ({"nvidia_smi": GPUS}, "nvidia-smi", "only --query-gpu"),
        ({"nvidia_smi": GPUS}, "nvidia-smi -L", "-L is not recorded"),
        (
            {"nvidia_smi": GPUS},
            "nvidia-smi --query-gpu=uuid --format=csv",
            "the column 'uuid' is not recorded",
        ),
        ({"rocm_smi": AMD}, "rocm-smi --showmeminfo vis_vram --csv", "nothing is recorded for VIS_VRAM"),
        ({"rocm_smi": AMD}, "rocm-smi --showbus", "output without --csv is not recorded"),
        ({"rocm_smi": AMD}, "rocm-smi --showuniqueid --csv", "--showuniqueid is not recorded"),
        ({"rocm_smi": "ERROR: no driver\n"}, "rocm-smi --showbus --csv", "nothing is recorded for --showbus"),
        ({"lscpu": "0,0\n"}, "lscpu -p=cpu", "the column 'cpu' is not recorded"),
        ({"lscpu": "0,0\n"}, "lscpu", "only lscpu -p=COLUMNS"),
        ({"vm_stat": "hw.memsize: 64\n"}, "sysctl hw.ncpu", "'hw.ncpu' is not recorded"),
        ({"vm_stat": "hw.memsize: 64\n"}, "vm_stat", "it has no vm_stat"),
        ({"system_profiler": "{"}, "system_profiler SPX -json", "the recording cannot be read"),
        ({"system_profiler": "{}"}, "system_profiler SPX -json", "'SPX' is not recorded"),
        ({"hipinfo": "device# 0\n"}, "hipInfo -h", "only hipInfo without arguments"),
    ],
)
def test_a_tool_says_what_was_not_recorded(
    texts: dict[str, str], command: str, sentence: str, tmp_path: Path
) -> None:
    output = on(stage_of(tmp_path, **texts), *command.split())
    assert output.stdout == ""
    assert sentence in output.stderr
    assert output.returncode == 2


def test_a_tool_without_recording_is_not_found_even_if_it_is_installed(tmp_path: Path) -> None:
    installed = shutil.which("lscpu")
    if installed is None:
        pytest.skip("lscpu is not installed here")
    stage = stage_of(tmp_path, meminfo=MEMINFO)
    call = "import subprocess, sys; subprocess.run([sys.argv[1], '-p=core,socket'])"
    by_name = on(stage, sys.executable, "-c", call, "lscpu")
    assert "FileNotFoundError" in by_name.stderr
    by_path = on(binding(stage), sys.executable, "-c", call, installed)
    assert "PermissionError" in by_path.stderr


def test_a_tool_called_by_its_path_is_replayed_too(tmp_path: Path) -> None:
    installed = shutil.which("lscpu")
    if installed is None:
        pytest.skip("lscpu is not installed here")
    stage = binding(stage_of(tmp_path, lscpu="0,0\n1,0\n9,1\n"))
    assert on(stage, installed, "-p=core").stdout == "# Core\n0\n1\n9\n"


def test_a_child_in_python_is_found(tmp_path: Path) -> None:
    assert on(stage_of(tmp_path, meminfo=MEMINFO), "python3", "-c", "print(6 * 7)").stdout == "42\n"


def test_reach_names_what_is_replayed_and_what_is_not(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, nvidia_smi=GPUS, meminfo=MEMINFO)
    assert stage.reach.startswith("PATH holds nvidia-smi, as recorded; ")
    assert stage.reach.endswith("libraries (NVML, HIP, Vulkan) are those of this machine")


def test_without_namespaces_the_files_are_listed_for_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "_obstacle", lambda _: "refused by the system")
    stage = stage_of(tmp_path, meminfo=MEMINFO)
    assert not stage.is_complete
    assert stage.command(("planner", "x")) == ("planner", "x")
    assert "redirected for planners in Python only (refused by the system)" in stage.reach
    document = json.loads(Path(stage.environment({})[STAGE_VARIABLE]).read_text())
    assert Path(document["files"]["/proc/meminfo"]).read_text() == MEMINFO


def test_a_binding_that_is_impossible_is_an_obstacle(tmp_path: Path) -> None:
    stage = binding(stage_of(tmp_path, meminfo=MEMINFO))
    Path(tmp_path / "files" / "meminfo").unlink()
    output = on(stage, sys.executable, "-c", "print(1)")
    assert (output.stdout, output.returncode) == ("", 126)
    assert output.stderr.startswith("stage: nothing can be bound over /proc/meminfo: ")


def test_a_windows_machine_is_shown_to_programs_that_follow_the_description_only(tmp_path: Path) -> None:
    stage = Stage(find_profile("msys2"), tmp_path)
    assert not stage.is_complete
    assert "Windows answers planners in Python only" in stage.reach
    description = json.loads((tmp_path / "stage.json").read_text(encoding="utf-8"))
    assert (description["system"], description["processors"]) == ("win32", 16)
    assert description["windows"] == {
        "total_bytes": 33_464_844 * 1024,
        "available_bytes": 20_971_520 * 1024,
        "cores": 8,
    }


def test_a_profile_without_recordings_has_no_stage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no recordings to replay"):
        Stage(machine(), tmp_path)
