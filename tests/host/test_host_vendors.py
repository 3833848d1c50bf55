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
from pytest_colibri.host.amd import parse_rocm_smi, probe_amd
from pytest_colibri.host.apple import parse_system_profiler, probe_apple
from pytest_colibri.host.nvidia import parse_nvidia_smi, probe_nvidia
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
    if devices and devices[0].free.source == "NVML":
        pytest.skip("this machine has NVML")
    assert [found.identity.name for found in devices] == names
    assert (note is None and notes == ()) or (note is not None and note in notes[0])


NVML_REPORT = """
from pytest_colibri.host.nvidia import probe_nvidia
devices, notes = probe_nvidia()
print(notes)
for device in devices:
    print([device.identity.pci, device.identity.uuid, device.pool, device.total.bytes, device.free.bytes])
    print(device.describe())
"""


@linux_only
def test_nvml_tells_shared_hidden_and_known_memory_apart(compile_library):
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
    ]


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
    for parser in (parse_nvidia_smi, parse_rocm_smi):
        with suppress(UsageError):
            parser(text)
    with suppress(UsageError):
        parse_rocm_smi(f"device,{text}\ncard0,{text}\n")
    with suppress(UsageError):
        parse_system_profiler(text, Figure(None, "unknown"))
