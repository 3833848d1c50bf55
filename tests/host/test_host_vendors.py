from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.errors import UsageError
from pytest_colibri.host.amd import probe_amd
from pytest_colibri.host.amdgpu import parse_drm, read_drm
from pytest_colibri.host.apple import parse_system_profiler, probe_apple
from pytest_colibri.host.hipinfo import parse_hipinfo
from pytest_colibri.host.jetson import parse_device_tree
from pytest_colibri.host.nvidia import parse_nvidia_smi, probe_nvidia
from pytest_colibri.host.rocm_smi import parse_rocm_smi
from pytest_colibri.units import MIB, Figure

PROJECT = Path(__file__).parents[2]

linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="libraries are set up as on Linux")


def test_nvidia_memory_is_in_mib():
    (found,) = parse_nvidia_smi("0, NVIDIA H200, 143771, 143153\n")
    assert (found.total.bytes, found.free.bytes) == (143_771 * MIB, 143_153 * MIB)
    assert (found.pool, found.type, found.vendor) == ("discrete", "discrete", "nvidia")
    assert (found.identity.uuid, found.identity.pci) == (None, None)


def test_nvidia_identity_is_the_one_that_vulkan_and_the_kernel_write():
    identity = "GPU-5E0F6A12-AAAA-BBBB-CCCC-0123456789AB, 00000000:0A:00.0"
    (found,) = parse_nvidia_smi(f"1, NVIDIA GeForce RTX 3090, {identity}, 24576, 24000\n")
    assert found.identity.name == "NVIDIA GeForce RTX 3090"
    assert found.identity.uuid == "5e0f6a12aaaabbbbcccc0123456789ab"
    assert found.identity.pci == "0000:0a:00.0"
    assert found.identity.index == 1


@pytest.mark.parametrize("identity", ["", "GPU-5e0f6a12-aaaa-bbbb-cccc-0123456789ab, 00000000:01:00.0, "])
def test_a_name_may_hold_commas(identity):
    (found,) = parse_nvidia_smi(f"0, NVIDIA Graphics Device, rev. A, 2, {identity}1000, 900\n")
    assert found.identity.name == "NVIDIA Graphics Device, rev. A, 2"
    assert found.total.bytes == 1000 * MIB


def test_memory_that_does_not_apply_is_a_shared_pool_of_unknown_size():
    (found,) = parse_nvidia_smi("0, NVIDIA GB10, [N/A], [N/A]\n")
    assert (found.pool, found.type) == ("unified", "integrated")
    assert (found.total.bytes, found.free.bytes) == (None, None)
    assert "[N/A]" in found.total.source


def test_memory_that_may_not_be_seen_is_unknown_and_no_pool():
    (found,) = parse_nvidia_smi(
        "0, NVIDIA A100-SXM4-80GB, [Insufficient Permissions], [Insufficient Permissions]\n"
    )
    assert found.pool is None
    assert (found.total.bytes, found.free.bytes) == (None, None)
    assert "[Insufficient Permissions]" in found.total.source


@pytest.mark.parametrize(
    ("line", "name", "pool"),
    [
        ("0, Orin (nvgpu), [N/A], [N/A], [N/A], [N/A]", "Orin (nvgpu)", "unified"),
        ("0, NVIDIA Thor, [Not Supported], [Not Supported]", "NVIDIA Thor", "unified"),
        ("0, NVIDIA H200, [Unknown Error], [Unknown Error]", "NVIDIA H200", None),
    ],
)
def test_words_in_place_of_figures_are_no_error(line, name, pool):
    (found,) = parse_nvidia_smi(f"{line}\n")
    assert (found.identity.name, found.pool, found.total.bytes) == (name, pool, None)


TEGRA = "NVIDIA Jetson AGX Orin Developer Kit\nnvidia,p3737-0000+p3701-0005\nnvidia,tegra234\n"


def test_a_jetson_without_nvidia_smi_is_known_by_its_device_tree():
    (found,) = parse_device_tree(TEGRA)
    assert found.identity.name == "NVIDIA Jetson AGX Orin Developer Kit"
    assert (found.pool, found.total.bytes) == ("unified", None)
    assert parse_device_tree("Raspberry Pi 5 Model B Rev 1.0\nraspberrypi,5-model-b\n") == ()
    assert parse_device_tree("") == ()


HIPINFO = """
--------------------------------------------------------------------------------
device#                           0
Name:                             AMD Radeon RX 7900 XTX
pciBusID:                         3
pciDeviceID:                      0
pciDomainID:                      0
isIntegrated:                     0
gcnArchName:                      gfx1100
peers:
non-peers:                        device#0

memInfo.total:                    23.98 GB
memInfo.free:                     23.84 GB (99%)
--------------------------------------------------------------------------------
device#                           1
Name:                             AMD Radeon(TM) 8050S Graphics
isIntegrated:                     {}
gcnArchName:                      {}
memInfo.total:                    24.26 GB
memInfo.free:                     24.10 GB (99%)
"""


@pytest.mark.parametrize(("integrated", "gfx"), [(1, "gfx9999"), (0, "gfx1151")])
def test_hipinfo_tells_the_memory_of_a_card_and_only_the_name_of_an_apu(integrated, gfx):
    card, apu = parse_hipinfo(HIPINFO.format(integrated, gfx))
    assert (card.identity.name, card.identity.pci) == ("AMD Radeon RX 7900 XTX", "0000:03:00.0")
    assert (card.processor, card.pool) == ("gfx1100", "discrete")
    assert (card.total.bytes, card.free.bytes) == (25_748_328_940, 25_598_005_084)
    assert (apu.identity.index, apu.identity.name) == (1, "AMD Radeon(TM) 8050S Graphics")
    assert (apu.pool, apu.total.bytes, apu.free.bytes) == ("unified", None, None)


def test_hipinfo_without_figures_is_unknown_and_without_devices_refused():
    (card,) = parse_hipinfo("device# 0\nName: AMD Radeon RX 7600\ngcnArchName: gfx1102\n")
    assert (card.total.bytes, card.identity.pci) == (None, None)
    with pytest.raises(UsageError, match="hipinfo"):
        parse_hipinfo("hipErrorNoDevice\n")


def test_the_files_of_amdgpu_are_read_as_a_recording_shows_them(tmp_path):
    card = tmp_path / "card1" / "device"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x1002\n")
    (card / "device").write_text("0x67df\n")
    (card / "uevent").write_text("PCI_SLOT_NAME=0000:01:00.0\n")
    (card / "mem_info_vram_total").write_text("8589934592\n")
    (found,) = parse_drm(read_drm(tmp_path))
    assert (found.identity.pci, found.total.bytes, found.free.bytes) == ("0000:01:00.0", 8 * 2**30, None)
    assert read_drm(tmp_path / "none") == ""


def test_amdgpu_text_without_cards_is_refused_and_an_unknown_chip_has_an_unknown_pool():
    with pytest.raises(UsageError, match="amd-sysfs"):
        parse_drm("no cards\n")
    (found,) = parse_drm("==> card0/device/vendor <==\n0x1002\n==> card0/device/device <==\n0x9999\n")
    assert (found.type, found.pool, found.identity.pci) == ("other", None, None)


def test_a_free_figure_that_is_hidden_is_unknown_beside_a_known_total():
    (found,) = parse_nvidia_smi("0, NVIDIA H200, 143771, [N/A]\n")
    assert (found.total.bytes, found.free.bytes) == (143_771 * MIB, None)


def test_more_free_memory_than_there_is_is_refused():
    (found,) = parse_nvidia_smi("0, NVIDIA GeForce RTX 5090, 32106, 55372\n")
    assert found.total.bytes == 32_106 * MIB
    assert found.free.bytes is None
    assert "refused" in found.free.source


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the driver\n",
        "index, name, memory.total, memory.free\n",
        "0, A, 5\n",
        "0, , 5, 5\n",
        "0, A, 5 MiB, 5 MiB\n",
        "x, A, 5, 5\n",
    ],
)
def test_nvidia_text_of_another_shape_is_refused(text):
    with pytest.raises(UsageError, match="nvidia-smi"):
        parse_nvidia_smi(text)


def test_without_devices_there_are_none():
    assert parse_nvidia_smi("") == ()


def test_without_nvidia_driver_there_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    devices, notes = probe_nvidia()
    if devices:
        pytest.skip("this machine has an NVIDIA driver")
    assert "no NVIDIA driver" in notes[0]


@linux_only
@pytest.mark.parametrize(
    ("script", "names", "note"),
    [
        ("echo '0, NVIDIA GB10, [N/A], [N/A]'", ["NVIDIA GB10"], None),
        ("echo 'NVIDIA-SMI has failed'; exit 9", [], "status 9: NVIDIA-SMI has failed"),
        ("echo 'No devices were found'", [], "No devices were found"),
    ],
)
def test_nvidia_smi_is_asked_where_nvml_cannot_be_loaded(monkeypatch, tmp_path, script, names, note):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    devices, notes = probe_nvidia()
    if devices and "NVML" in devices[0].free.source:
        pytest.skip("this machine has NVML")
    assert [found.identity.name for found in devices] == names
    assert (note is None and notes == ()) or (note is not None and note in notes[0])


NVML_REPORT = """
from pytest_colibri.host.hipinfo import parse_hipinfo
from pytest_colibri.host.jetson import parse_device_tree
from pytest_colibri.host.nvidia import probe_nvidia
devices, notes = probe_nvidia()
print(notes)
for device in devices:
    print([device.identity.pci, device.identity.uuid, device.pool, device.total.bytes, device.free.bytes])
    print(device.describe())
"""


@linux_only
def test_nvml_tells_shared_hidden_known_and_sliced_memory_apart(compile_library):
    """No NVIDIA card is needed: the real binding asks a library of ours that answers as the driver does."""
    library = compile_library("fake_nvml.c", "libnvidia-ml.so.1")
    output = subprocess.run(
        [sys.executable, "-c", NVML_REPORT],
        cwd=PROJECT,
        env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    uuid = "00000{}111122223333444455556666"
    assert output.stdout.splitlines() == [
        "()",
        str(["0000:01:00.0", uuid.format("000"), "unified", None, None]),
        "NVIDIA GB10 (integrated GPU, cuda, driver nvidia 580.95.05)",
        str(["0000:02:00.0", uuid.format("001"), None, None, None]),
        "NVIDIA A100-SXM4-80GB (other GPU, cuda, driver nvidia 580.95.05)",
        str(["0000:03:00.0", uuid.format("002"), "discrete", 150_754_820_096, 150_000_000_000]),
        "NVIDIA H200 (discrete GPU, cuda, driver nvidia 580.95.05)",
        str(["0000:04:00.0", uuid.format("003"), None, None, None]),
        "NVIDIA H100 (other GPU, cuda, driver nvidia 580.95.05)",
    ]


@linux_only
def test_what_nvidia_smi_says_otherwise_than_nvml_is_reported_and_the_smaller_used(compile_library, tmp_path):
    library = compile_library("fake_nvml.c", "libnvidia-ml.so.1")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '2, NVIDIA H200, 00000000:03:00.0, 143771, 100000'\n")
    tool.chmod(0o755)
    output = subprocess.run(
        [sys.executable, "-c", NVML_REPORT],
        cwd=PROJECT,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(library.parent),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    note, *devices = output.stdout.splitlines()
    assert "CUDA: NVIDIA H200: free 150.0 GB (NVML) and 104.9 GB (nvidia-smi memory.free) differ" in note
    uuid = "00000002111122223333444455556666"
    assert devices[4] == str(["0000:03:00.0", uuid, "discrete", 143_771 * MIB, 100_000 * MIB])


def rocm(*rows: str, header: str = "") -> str:
    columns = (
        header
        or "device,VRAM Total Memory (B),VRAM Total Used Memory (B),GTT Total Memory (B),"
        "GTT Total Used Memory (B),PCI Bus,Card Series,GFX Version"
    )
    return "\n".join(
        ["WARNING: AMD GPU device(s) is/are in a low-power state.", "", columns, *rows, "", "bye"]
    )


def test_an_amd_card_is_its_vram_less_what_is_used():
    (found,) = parse_rocm_smi(
        rocm("card0,17163091968,1073741824,33000000000,0,0000:0C:00.0,AMD Radeon RX 6950 XT,gfx1030")
    )
    assert (found.type, found.pool) == ("discrete", "discrete")
    assert (found.total.bytes, found.free.bytes) == (17_163_091_968, 16_089_350_144)
    assert found.identity.pci == "0000:0c:00.0"


def test_an_amd_card_is_found_by_an_old_tool_that_shows_no_processor():
    header = "device,VRAM Total Memory (B),VRAM Total Used Memory (B),Card series,Card model"
    (found,) = parse_rocm_smi(rocm("card0,17163091968,0,Radeon RX 6950 XT,0x0e3a", header=header))
    assert (found.pool, found.free.bytes) == ("discrete", 17_163_091_968)


@pytest.mark.parametrize(("vram", "gtt"), [(16_636_528_640, 103_079_215_104), (536_870_912, 108_000_000_000)])
def test_the_pool_of_an_integrated_chip_is_gtt_not_its_carve_out(vram, gtt):
    (found,) = parse_rocm_smi(
        rocm(f"card0,{vram},1000,{gtt},2000,0000:c5:00.0,Radeon 8060S Graphics,gfx1151")
    )
    assert (found.type, found.pool) == ("integrated", "unified")
    assert (found.total.bytes, found.free.bytes) == (gtt, gtt - 2000)


@pytest.mark.parametrize(
    ("name", "gfx", "pool"),
    [
        ("AMD Instinct MI300A", "gfx942", "unified"),
        ("AMD Instinct MI300X", "gfx942", "discrete"),
        ("N/A", "gfx9999", None),
        ("AMD Radeon Graphics", "gfx1030", "discrete"),
    ],
)
def test_the_processor_tells_the_pool_and_the_name_where_it_cannot(name, gfx, pool):
    (found,) = parse_rocm_smi(rocm(f"card0,1000,0,2000,0,N/A,{name},{gfx}"))
    assert found.pool == pool


def test_amd_figures_that_are_not_given_are_unknown():
    (found,) = parse_rocm_smi(rocm("card0,N/A,N/A,N/A,N/A,N/A,Radeon RX 7900 XTX,gfx1100"))
    assert (found.total.bytes, found.free.bytes, found.identity.pci) == (None, None, None)


def test_more_used_amd_memory_than_there_is_is_refused():
    (found,) = parse_rocm_smi(rocm("card0,1000,2000,0,0,N/A,Radeon RX 7900 XTX,gfx1100"))
    assert found.free.bytes is None
    assert "refused" in found.free.source


@pytest.mark.parametrize("text", ["", "ERROR: No AMD GPUs\n", "card0,1,2\n"])
def test_amd_text_without_table_is_refused(text):
    with pytest.raises(UsageError, match="rocm-smi"):
        parse_rocm_smi(text)


def test_without_rocm_there_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    devices, (note,) = probe_amd()
    assert devices == ()
    assert "rocm-smi is not installed" in note


def displays(*entries: dict[str, str]) -> str:
    return json.dumps({"SPDisplaysDataType": entries})


APPLE = {"sppci_model": "Apple M2 Max", "spdisplays_vendor": "sppci_vendor_Apple", "sppci_cores": "38"}


@pytest.mark.parametrize(("ram_gib", "share_gib"), [(16, 16 * 2 / 3), (64, 48)])
def test_the_gpu_of_an_apple_chip_gets_a_part_of_the_ram_as_an_estimate(ram_gib, share_gib):
    (found,) = parse_system_profiler(displays(APPLE), Figure(ram_gib * 2**30, "hw.memsize"))
    assert (found.identity.name, found.vendor, found.pool) == ("Apple M2 Max", "apple", "unified")
    assert found.total.bytes == int(share_gib * 2**30)
    assert found.total.source.startswith("estimate")
    assert "upper bound" in found.free.source


def test_the_part_of_an_unknown_ram_is_unknown():
    (found,) = parse_system_profiler(displays(APPLE), Figure(None, "no recording"))
    assert (found.total.bytes, found.free.bytes) == (None, None)


def test_a_card_of_another_vendor_in_a_mac_has_unknown_memory():
    radeon = {"sppci_model": "AMD Radeon Pro 5500M", "spdisplays_vendor": "sppci_vendor_amd"}
    (found,) = parse_system_profiler(displays(radeon), Figure(16 * 2**30, "hw.memsize"))
    assert (found.vendor, found.pool, found.total.bytes) == ("amd", None, None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", displays({}), '{"SPDisplaysDataType": 5}', "[" * 100_000, displays(*[APPLE] * 17)],
)
def test_apple_text_of_another_shape_is_refused(text):
    with pytest.raises(UsageError, match="system_profiler"):
        parse_system_profiler(text, Figure(None, "unknown"))


@pytest.mark.skipif(platform.system() == "Darwin", reason="this machine has Metal")
def test_metal_is_only_on_macos():
    assert probe_apple(Figure(None, "unknown")) == ((), ("Metal: only macOS has it",))


@given(st.text(max_size=200))
def test_no_text_makes_a_vendor_parser_fail_otherwise_than_by_a_usage_error(text):
    parse_device_tree(f"{text}\nnvidia,tegra\n")
    with suppress(UsageError):
        parse_hipinfo(f"device# 0\nmemInfo.total: {text}\n")
    for parser in (parse_nvidia_smi, parse_rocm_smi, parse_drm, parse_hipinfo):
        with suppress(UsageError):
            parser(text)
    with suppress(UsageError):
        parse_rocm_smi(f"device,{text}\ncard0,{text}\n")
    with suppress(UsageError):
        parse_system_profiler(text, Figure(None, "unknown"))
