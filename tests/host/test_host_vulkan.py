from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.errors import UsageError
from pytest_colibri.host.model import Accelerator
from pytest_colibri.host.vulkan import parse_vulkan, probe_vulkan
from pytest_colibri.units import MIB

PROJECT = Path(__file__).parents[2]
RECORDING = PROJECT / "hardware_profiles" / "recordings" / "software-vulkan.vulkan.json"

linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="drivers are set up as on Linux")


def heap(size_bytes: int, *, local: bool = True, budget: int | None = None, usage: int | None = None):
    return {"size_bytes": size_bytes, "flags": int(local), "budget_bytes": budget, "usage_bytes": usage}


def device(index: int = 0, name: str = "A GPU", **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "name": name,
        "vendor_id": 0x1002,
        "device_id": 1,
        "type": "discrete",
        "api_version": "1.3.0",
        "driver": {"name": "radv", "info": "Mesa 24.0.0", "id": 3, "version": 1},
        "device_uuid": f"{index + 1:032x}",
        "driver_uuid": None,
        "pci": None,
        "heaps": [heap(8 * 2**30)],
        "memory_types": [{"heap": 0, "flags": 1}],
        "queue_families": [{"count": 1, "flags": 2}],
        "limits": {},
        **changes,
    }


def parse(*devices: dict[str, Any]) -> tuple[Accelerator, ...]:
    return parse_vulkan(json.dumps({"loader": "1.3.0", "devices": devices}))


def parse_one(**changes: Any) -> Accelerator:
    return parse(device(**changes))[0]


LLVMPIPE = {"name": "llvmpipe", "info": "Mesa 22.3.6 (LLVM 15.0.6)", "id": 13, "version": 1}


def test_recording_of_a_software_renderer_is_a_cpu_device_not_a_gpu():
    (found,) = parse_vulkan(RECORDING.read_text(encoding="utf-8"))
    assert found.type == "cpu"
    assert found.is_software
    assert found.pool == "unified"
    assert found.vendor == "mesa"
    assert "CPU device, not a GPU" in found.describe()
    assert found.total.bytes == found.free.bytes == 2 * 2**30
    assert "upper bound" in found.free.source


@pytest.mark.parametrize("said", ["virtual", "other", "integrated"])
def test_a_software_renderer_behind_another_type_is_still_a_cpu_device(said):
    found = parse_one(name="Virtio-GPU Venus (llvmpipe (LLVM 15.0.7, 256 bits))", type=said)
    assert found.is_software


def test_one_card_under_two_drivers_is_one_device_by_its_identity():
    amdvlk = {"name": "AMD open-source driver", "info": "2024.Q1", "id": 2, "version": 1}
    found = parse(
        device(0, "AMD Radeon RX 6600 (RADV NAVI23)", device_uuid="a" * 32, pci="0000:03:00.0"),
        device(1, "AMD Radeon RX 6600", driver=amdvlk, device_uuid="a" * 32, pci="0000:03:00.0"),
        device(2, "llvmpipe (LLVM 15.0.7, 256 bits)", type="cpu", driver=LLVMPIPE, device_uuid="b" * 32),
        device(3, "llvmpipe (LLVM 12.0.0, 256 bits)", type="cpu", driver=LLVMPIPE, device_uuid="b" * 32),
        device(4, "NVIDIA GeForce GTX 1650", vendor_id=0x10DE, device_uuid="c" * 32, pci="0000:01:00.0"),
    )
    assert len(found) == 5
    gpus = [one for one in found if not one.is_software]
    distinct = [
        one
        for place, one in enumerate(gpus)
        if not any(one.identity.same_device(earlier.identity) for earlier in gpus[:place])
    ]
    assert [one.identity.name for one in distinct] == [gpus[0].identity.name, "NVIDIA GeForce GTX 1650"]


def test_a_uuid_that_one_driver_gives_to_two_cards_identifies_neither():
    moltenvk = {"name": "MoltenVK", "info": "1.2.9", "id": 14, "version": 1}
    found = parse(
        device(0, "AMD Radeon Pro Vega II", driver=moltenvk, device_uuid="d" * 32),
        device(1, "AMD Radeon Pro Vega II", driver=moltenvk, device_uuid="d" * 32),
    )
    assert [one.identity.uuid for one in found] == [None, None]
    assert not found[0].identity.same_device(found[1].identity)


def test_a_uuid_at_two_pci_addresses_is_dropped_for_the_addresses():
    found = parse(
        device(0, device_uuid="e" * 32, pci="0000:01:00.0"),
        device(1, device_uuid="e" * 32, pci="0000:02:00.0"),
    )
    assert not found[0].identity.same_device(found[1].identity)


def test_types_tell_a_card_from_a_chip_whatever_their_sizes():
    card, chip = parse(
        device(0, "NVIDIA GeForce RTX 5070 Ti", vendor_id=0x10DE, heaps=[heap(15_995 * MIB)]),
        device(1, "AMD Radeon(TM) Graphics", type="integrated", heaps=[heap(16_180 * MIB)]),
    )
    assert (card.type, card.pool, card.vendor) == ("discrete", "discrete", "nvidia")
    assert (chip.type, chip.pool, chip.vendor) == ("integrated", "unified", "amd")


def test_free_memory_beyond_the_total_is_refused_with_both_figures():
    found = parse_one(
        name="NVIDIA GeForce RTX 5090", heaps=[heap(32_106 * MIB, budget=55_372 * MIB, usage=0)]
    )
    assert found.total.bytes == 32_106 * MIB
    assert found.free.bytes is None
    assert "58.1 GB" in found.free.source
    assert "33.7 GB" in found.free.source


def test_free_memory_is_the_budget_less_the_use_of_this_process():
    found = parse_one(heaps=[heap(8_000_000_000, budget=7_000_000_000, usage=500_000_000)])
    assert found.free.bytes == 6_500_000_000


def test_a_card_without_the_budget_extension_has_unknown_free_memory():
    found = parse_one()
    assert found.free.bytes is None
    assert "VK_EXT_memory_budget" in found.free.source


def test_without_resizable_bar_the_visible_window_is_not_added_to_the_card():
    found = parse_one(
        name="AMD Radeon RX 580 Series",
        heaps=[
            heap(8_321_499_136, budget=8_000_000_000, usage=0),
            heap(4_133_625_856, local=False, budget=4_000_000_000, usage=0),
            heap(268_435_456, budget=260_000_000, usage=0),
        ],
        memory_types=[
            {"heap": 0, "flags": 0x1},
            {"heap": 1, "flags": 0x6},
            {"heap": 2, "flags": 0x7},
            {"heap": 1, "flags": 0xE},
        ],
    )
    assert (found.total.bytes, found.free.bytes) == (8_321_499_136, 8_000_000_000)
    direct = {kind.heap for kind in found.memory_types if kind.device_local and kind.host_visible}
    assert [found.heaps[index].size_bytes for index in direct] == [268_435_456]


def test_compute_is_told_by_its_own_queue_flag():
    found = parse_one(queue_families=[{"count": 1, "flags": 0xD}, {"count": 4, "flags": 0x6}])
    assert [family.compute for family in found.queue_families] == [False, True]


@pytest.mark.parametrize(("kind", "pool"), [("virtual", None), ("other", None), ("integrated", "unified")])
def test_the_pool_of_a_device_that_does_not_tell_is_unknown(kind, pool):
    assert parse_one(type=kind).pool == pool


def test_a_vendor_without_a_name_is_its_number():
    assert parse_one(vendor_id=0x1AE0).vendor == "0x1ae0"


def test_a_device_without_device_local_heap_has_unknown_memory():
    found = parse_one(heaps=[heap(2**30, local=False)])
    assert (found.total.bytes, found.free.bytes) == (None, None)


def test_control_characters_of_a_name_do_not_reach_a_terminal():
    assert parse_one(name="\x1b[2JGPU\n" + "x" * 1000).identity.name.isprintable()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"type": "gpu"}, "discrete"),
        ({"vendor_id": "0x1002"}, "vendor_id"),
        ({"vendor_id": True}, "vendor_id"),
        ({"index": -1}, "index"),
        ({"device_uuid": "GPU-1"}, "device_uuid"),
        ({"pci": "03:00.0"}, "pci"),
        ({"heaps": [heap(2**65)]}, r"heaps\[0\].size_bytes"),
        ({"heaps": [heap(1)] * 65}, "at most 64"),
        ({"heaps": {}}, "heaps"),
        ({"memory_types": [{"heap": 1, "flags": 1}]}, "heap 1 does not exist"),
        ({"driver": None}, "driver"),
        ({"name": 5}, "name"),
    ],
)
def test_a_wrong_value_is_named(changes, named):
    with pytest.raises(UsageError, match=named):
        parse(device(**changes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"devices": 1}',
        "[" * 100_000,
        '{"devices": [[]]}',
        "9" * 10_000,
        " " * (5 * MIB),
    ],
    ids=["empty", "null", "list", "object", "number", "deep", "nested", "huge number", "long"],
)
def test_what_is_no_recording_is_refused(text):
    with pytest.raises(UsageError, match="vulkan"):
        parse_vulkan(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(sorted(device())), value=JSON_VALUES)
def test_any_value_in_place_of_another_is_read_or_refused(key, value):
    try:
        (found,) = parse({**device(), key: value})
    except UsageError:
        return
    assert found.identity.name.isprintable()


@pytest.fixture
def live_devices() -> tuple[Accelerator, ...]:
    devices, notes = probe_vulkan()
    if not devices:
        pytest.skip(f"no Vulkan device here: {notes}")
    return devices


def vulkaninfo(*arguments: str) -> str:
    if shutil.which("vulkaninfo") is None:
        pytest.skip("vulkaninfo (vulkan-tools) is not installed")
    output = subprocess.run(["vulkaninfo", *arguments], capture_output=True, text=True, timeout=60)
    return output.stdout


def test_live_devices_agree_with_vulkaninfo(live_devices):
    summary = vulkaninfo("--summary")

    def values(key: str) -> list[str]:
        return re.findall(rf"^\s+{key}\s+= (.*)$", summary, re.MULTILINE)

    assert values("deviceName") == [found.identity.name for found in live_devices]
    kinds = {
        "cpu": "CPU",
        "discrete": "DISCRETE_GPU",
        "integrated": "INTEGRATED_GPU",
        "virtual": "VIRTUAL_GPU",
    }
    assert values("deviceType") == [f"PHYSICAL_DEVICE_TYPE_{kinds[found.type]}" for found in live_devices]
    drivers = [
        f"{name} {info}" for name, info in zip(values("driverName"), values("driverInfo"), strict=True)
    ]
    assert drivers == [found.driver for found in live_devices]
    # vulkaninfo is the source of UUIDs only where they tell devices apart.
    uuids = Counter(uuid.replace("-", "") for uuid in values("deviceUUID"))
    assert {found.identity.uuid for found in live_devices} >= {uuid for uuid in uuids if uuids[uuid] == 1}


def test_live_memory_agrees_with_vulkaninfo(live_devices):
    text = vulkaninfo()
    sizes = [int(size) for size in re.findall(r"memoryHeaps\[\d+\]:\s+size\s+= (\d+)", text)]
    types = [int(flags, 16) for flags in re.findall(r"propertyFlags = (0x[0-9a-f]+): count", text)]
    heaps = [heap for found in live_devices for heap in found.heaps]
    kinds = [kind for found in live_devices for kind in found.memory_types]
    assert [heap.size_bytes for heap in heaps] == sizes
    assert [kind.device_local for kind in kinds] == [bool(flags & 1) for flags in types]
    assert [kind.host_visible for kind in kinds] == [bool(flags & 2) for flags in types]


def test_files_in_the_working_directory_do_not_reach_the_probe(live_devices, tmp_path, monkeypatch):
    for module in ("json", "vulkan", "pytest_colibri"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    assert probe_vulkan() == (live_devices, ())


@linux_only
def test_no_driver_is_a_note_that_says_what_to_install(monkeypatch):
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(variable, "/nonexistent")
    devices, (note,) = probe_vulkan()
    assert devices == ()
    assert "no Vulkan driver" in note
    assert "mesa-vulkan-drivers" in note


@linux_only
def test_a_loader_that_cannot_be_loaded_is_a_note_that_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "libvulkan.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    devices, (note,) = probe_vulkan()
    assert devices == ()
    assert "no Vulkan loader" in note
    assert "libvulkan1 mesa-vulkan-drivers" in note


WITHOUT_LOADER = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$2"
rm "$2"/libvulkan.so*
echo ready
exec "$3" -c 'from pytest_colibri.host.vulkan import probe_vulkan; print(probe_vulkan())'
"""


@linux_only
def test_a_machine_without_loader_is_told_what_to_install(tmp_path):
    """The loader's file is taken away in a mount namespace of our own."""
    loader = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    found = re.search(r"libvulkan\.so\.1 .*=> (.*)/libvulkan\.so\.1", loader)
    if found is None or shutil.which("unshare") is None:
        pytest.skip("no Vulkan loader to take away, or no unshare")
    output = subprocess.run(
        ["unshare", "-m", "sh", "-c", WITHOUT_LOADER, "sh", tmp_path, found[1], sys.executable],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=60,
    )
    if not output.stdout.startswith("ready"):
        pytest.skip(f"no mount namespace can be set up here: {output.stderr.strip()}")
    assert "no Vulkan loader" in output.stdout
    assert "apt install libvulkan1" in output.stdout


@pytest.fixture
def faulty_driver(compile_library, tmp_path, monkeypatch) -> Path:
    """Make the only driver one that misbehaves; return the file with the ids of its processes."""
    library = compile_library("fake_driver.c", "libfaulty_driver.so")
    manifest = tmp_path / "faulty_icd.json"
    driver = {"library_path": str(library), "api_version": "1.3.0"}
    manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}))
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(variable, str(manifest))
    pids = tmp_path / "pids"
    monkeypatch.setenv("DRIVER_PIDS", str(pids))
    return pids


@linux_only
@pytest.mark.usefixtures("faulty_driver")
def test_a_driver_that_crashes_ends_the_probe_only(monkeypatch):
    monkeypatch.setenv("DRIVER_FAULT", "crash")
    devices, (note,) = probe_vulkan()
    assert devices == ()
    assert "SIGABRT" in note
    assert "driver crashed" in note


@linux_only
@pytest.mark.usefixtures("faulty_driver")
def test_a_driver_that_exits_is_told(monkeypatch):
    monkeypatch.setenv("DRIVER_FAULT", "exit")
    devices, (note,) = probe_vulkan()
    assert devices == ()
    assert "status 3" in note


@linux_only
def test_a_driver_that_hangs_is_stopped_with_all_that_it_started(faulty_driver, monkeypatch):
    monkeypatch.setenv("DRIVER_FAULT", "hang")
    devices, (note,) = probe_vulkan(timeout_s=2)
    assert devices == ()
    assert "did not answer within 2 s" in note
    pids = [int(pid) for pid in faulty_driver.read_text().split()]
    assert len(pids) == 2
    gone_by = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < gone_by:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@linux_only
@pytest.mark.usefixtures("faulty_driver")
def test_a_driver_that_talks_on_standard_output_does_not_spoil_the_answer(monkeypatch):
    monkeypatch.setenv("DRIVER_FAULT", "talk")
    devices, (note,) = probe_vulkan()
    assert devices == ()
    assert "no Vulkan driver" in note


@linux_only
@pytest.mark.usefixtures("faulty_driver")
def test_a_broken_driver_beside_a_good_one_is_passed_over(monkeypatch):
    lavapipe = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"), None)
    if lavapipe is None:
        pytest.skip("Mesa's lavapipe is not installed")
    monkeypatch.setenv("DRIVER_FAULT", "talk")
    faulty = os.environ["VK_DRIVER_FILES"]
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(variable, f"{faulty}:{lavapipe}")
    assert [found.identity.name.split()[0] for found in probe_vulkan()[0]] == ["llvmpipe"]
