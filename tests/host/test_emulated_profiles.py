"""Every shipped profile, emulated: its pool, its devices and their figures, as the reports have them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pytest_colibri.host.devices import physical_devices
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.matching import matching_accelerators
from pytest_colibri.profiles.loader import find_profile, profile_names
from pytest_colibri.profiles.model import Pool
from pytest_colibri.units import GB, KIB, MIB

GIB = 2**30


@dataclass(frozen=True)
class Device:
    name: str
    pool: Pool | None
    total_bytes: int | None
    free_bytes: int | None
    views: int = 1
    doubts: tuple[str, ...] = ()


def hidden(name: str, pool: Pool | None, views: int = 1) -> Device:
    return Device(name, pool, None, None, views)


def halo(gtt_bytes: int) -> Device:
    return Device("Radeon 8060S Graphics", "unified", gtt_bytes, gtt_bytes - 20 * MIB)


def rtx_3090(total_bytes: int = 24_576 * MIB, free_bytes: int = 24_252 * MIB) -> Device:
    return Device("NVIDIA GeForce RTX 3090", "discrete", total_bytes, free_bytes)


def llvmpipe(views: int = 1) -> Device:
    return Device("llvmpipe (LLVM 15.0.6, 256 bits)", "unified", 2 * GIB, 2 * GIB, views)


RX_580 = Device("AMD Radeon RX 580 Series (RADV POLARIS10)", "discrete", 8_321_499_136, 7_900_000_000)
M2_MAX = Device("Apple M2 Max", "unified", 48 * GIB, 48 * GIB)
RX_6950_XT = Device("AMD Radeon RX 6950 XT", "discrete", 17_163_091_968, 17_163_091_968 - GIB)
A6000 = Device("NVIDIA RTX A6000", "discrete", 49_140 * MIB, 48_600 * MIB)
PC_64 = 61_865_984 * KIB
PC_32 = 28_311_552 * KIB
ROCM_64 = 60_817_408 * KIB
MAC_64 = (1_912_160 + 798_212 + 21_840 + 12_608) * 16_384

# What the memory leaves, and the devices with the best first.
MACHINES: dict[str, tuple[int, tuple[Device, ...]]] = {
    "a100-mig": (1_056_000_000 * KIB, (hidden("NVIDIA A100-SXM4-80GB", None),)),
    "amd-rocm": (
        ROCM_64,
        (
            Device(
                "Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]",
                "discrete",
                17_163_091_968,
                17_163_091_968 - 692_142_080,
            ),
            hidden("Raphael", "unified"),
        ),
    ),
    "amd-vulkan": (PC_32, (RX_580,)),
    "apple-m2-max-64gb": (MAC_64, (Device("Apple M2 Max", "unified", 48 * GIB, 48 * GIB, views=2),)),
    "apple-m3-ultra-512gb": (449_999_994_880, (Device("Apple M3 Ultra", "unified", 384 * GIB, 384 * GIB),)),
    "apple-metal": (MAC_64, (M2_MAX,)),
    "apple-vulkan": (MAC_64, (M2_MAX,)),
    "arc-a770": (
        PC_64,
        (Device("Intel(R) Arc(tm) A770 Graphics (DG2)", "discrete", 17_079_205_888, 16_300_000_000),),
    ),
    "comma-in-name": (PC_64, (Device("Tesla, Inc. V100", "discrete", 32_510 * MIB, 32_000 * MIB),)),
    # The host has 256 GB available; 1.2 of the 2 GB that the group uses are reclaimable cache.
    "container-34gb": (34_359_738_368 - 800_000_000, ()),
    "cores-6-two-columns": (23_989_228 * KIB, ()),
    # Siblings that are offline are no cores.
    "cores-64-three-columns": (240_000_000 * KIB, ()),
    "cores-64-two-columns": (240_000_000 * KIB, ()),
    "cores-64-with-siblings": (240_000_000 * KIB, ()),
    "cpu": (23_989_228 * KIB, ()),
    "gb10-114gb": (111_523_437 * KIB, (hidden("NVIDIA GB10", "unified"),)),
    "gb10-124gb": (124 * GB, (hidden("NVIDIA GB10", "unified"),)),
    "gb10-126gb": (122_753_906 * KIB, (hidden("NVIDIA GB10", "unified"),)),
    # 9 million kB of it are free: the rest is page cache, and available.
    "gb10-page-cache": (108_000_000 * KIB, (hidden("NVIDIA GB10", "unified"),)),
    "gtx-1660-super-rtx-3090": (
        PC_64,
        (
            Device("NVIDIA GeForce RTX 3090", "discrete", 24_576 * MIB, 24_100 * MIB, views=2),
            Device("NVIDIA GeForce GTX 1660 SUPER", "discrete", 6144 * MIB, 5850 * MIB, views=2),
        ),
    ),
    "h200": (
        1_000_000_000 * KIB,
        (Device("NVIDIA H200", "discrete", 143_771 * MIB, 143_153 * MIB),),
    ),
    "host-256gb": (246_000_000 * KIB, ()),
    "host-3gb": (2_929_687 * KIB, ()),
    "intel-vulkan": (
        11_534_336 * KIB,
        (Device("Intel(R) Xe Graphics (TGL GT2)", "unified", 12_570_329_088, 9_000_000_000),),
    ),
    "jetson-agx-orin": (58_800_000 * KIB, (hidden("NVIDIA Jetson AGX Orin Developer Kit", "unified"),)),
    "jetson-thor": (117_187_500 * KIB, (hidden("NVIDIA Thor", "unified"),)),
    "mac-pro-intel": ((12_582_912 + 5_242_880 + 65_536 + 32_768) * 4096, ()),
    # Its first card is no card of AMD.
    "mi210-behind-display-chip": (
        240_000_000 * KIB,
        (Device("AMD Instinct MI210", "discrete", 68_702_699_520, 68_702_699_520 - 11 * MIB),),
    ),
    # 9,437,184 kB are free; Windows itself tells what is available.
    "msys2": (20_971_520 * KIB, ()),
    "nvidia-cuda": (PC_64, (rtx_3090(),)),
    "nvidia-unified": (118_566_368 * KIB, (hidden("NVIDIA GB10", "unified"),)),
    "nvidia-vulkan": (
        PC_64,
        (rtx_3090(free_bytes=25_166_872_576),),
    ),
    # The host has 692 GiB; 1 of the 3 GB that the group uses is reclaimable cache.
    "pod-150gib": (161_061_273_600 - 2 * GB, ()),
    # 60 % of the 50 GB in use are reclaimable cache.
    "pod-page-cache": (64 * GIB - 20 * GB, ()),
    "radeon-gtx-1650-five-entries": (
        PC_32,
        (
            Device("AMD Radeon RX 5600 XT (RADV NAVI10)", "discrete", 6_425_673_728, 6_000_000_000, views=2),
            Device("NVIDIA GeForce GTX 1650", "discrete", 4096 * MIB, 3800 * MIB),
            llvmpipe(views=2),
        ),
    ),
    "rtx-3090-three": (PC_64, (rtx_3090(),) * 3),
    # The window of 214 MiB is a part of the card's memory, and adds nothing.
    "rtx-3090-without-rebar": (PC_64, (rtx_3090(24_325 * MIB, 24_900_000_000),)),
    "rtx-4080-laptop-windows": (
        52_428_800 * KIB,
        (
            Device("NVIDIA GeForce RTX 4080 Laptop GPU", "discrete", 12_576_620_544, 11_800_000_000),
            Device("Intel(R) UHD Graphics", "unified", 34_145_107_968, 30_000_000_000),
        ),
    ),
    "rtx-5070-ti-radeon-igpu": (
        PC_32,
        (
            Device("NVIDIA GeForce RTX 5070 Ti", "discrete", 15_995 * MIB, 15_200 * MIB),
            Device("AMD Radeon(TM) Graphics", "unified", 16_180 * MIB, 15_000 * MIB),
        ),
    ),
    "rtx-5080-128gb": (
        127_000_000 * KIB,
        (Device("NVIDIA GeForce RTX 5080", "discrete", 16_303 * MIB, 15_800 * MIB),),
    ),
    "rtx-5090-free-over-total": (
        PC_64,
        (Device("NVIDIA GeForce RTX 5090", "discrete", 32_106 * MIB, None),),
    ),
    "rtx-5090-rtx-3080": (
        PC_64,
        (
            Device("NVIDIA GeForce RTX 5090", "discrete", 32_607 * MIB, 32_000 * MIB),
            Device("NVIDIA GeForce RTX 3080", "discrete", 10_240 * MIB, 9_900 * MIB),
        ),
    ),
    "rtx-a6000-four": (240_000_000 * KIB, (A6000,) * 4),
    "rtx-a6000-four-in-use": (
        240_000_000 * KIB,
        (Device("NVIDIA RTX A6000", "discrete", 49_140 * MIB, 2527 * MIB),) * 4,
    ),
    "rx-580-without-rebar": (PC_32, (RX_580,)),
    "rx-6950-xt-rocm": (ROCM_64, (RX_6950_XT,)),
    "rx-6950-xt-text-around-csv": (ROCM_64, (RX_6950_XT,)),
    "rx-9070-two-names": (
        ROCM_64,
        (
            Device(
                "AMD Radeon Graphics (RADV GFX1200)",
                "discrete",
                17_095_983_104,
                16_400_000_000,
                views=2,
                doubts=("its processor is given as gfx1200",),
            ),
        ),
    ),
    "ryzen-9950x3d-windows": (83_886_080 * KIB, ()),
    "software-vulkan": (24_245_912 * KIB, (llvmpipe(),)),
    # The driver offers more than amdgpu maps: the smaller counts.
    "steam-deck": (
        12_300_000 * KIB,
        (
            Device(
                "AMD Custom GPU 0405 (RADV VANGOGH)",
                "unified",
                8 * GIB,
                8 * GIB - 60 * MIB,
                views=2,
                doubts=("total 10.7 GB", "free 9.80 GB"),
            ),
        ),
    ),
    "strix-halo-carve-out-16gb": (107_000_000 * KIB, (halo(103_079_215_104),)),
    "strix-halo-carve-out-512mib": (127_000_000 * KIB, (halo(108 * GB),)),
    "strix-halo-carve-out-8gib": (118_000_000 * KIB, (halo(133_143_986_176),)),
    "strix-halo-windows": (62_180_557 * KIB, (hidden("AMD Radeon(TM) 8060S Graphics", "unified"),)),
    "two-sockets-1tb": (1_000_000_000 * KIB, ()),
    "wsl-rtx-4090": (
        31_200_000 * KIB,
        (
            Device("NVIDIA GeForce RTX 4090", "discrete", 24_142 * MIB, 23_028 * MIB, views=2),
            llvmpipe(),
        ),
    ),
}


def test_every_shipped_profile_has_its_machine_in_the_table() -> None:
    assert set(MACHINES) == set(profile_names())


@pytest.mark.parametrize("name", MACHINES)
def test_the_machine_has_the_memory_and_the_devices_of_its_case(name: str) -> None:
    limit_bytes, devices = MACHINES[name]
    host = emulate_host(find_profile(name))
    assert host.memory.limit.bytes == limit_bytes
    found = physical_devices(host.accelerators)
    assert [
        Device(
            name=device.views[0].identity.name,
            pool=device.views[0].pool,
            total_bytes=device.total.bytes,
            free_bytes=device.free.bytes,
            views=len(device.views),
        )
        for device in found
    ] == [Device(*list(vars(device).values())[:5]) for device in devices]
    for device, expected in zip(found, devices, strict=True):
        assert len(device.doubts) == len(expected.doubts)
        for doubt, words in zip(device.doubts, expected.doubts, strict=True):
            assert doubt.startswith(f"{expected.name}: {words}")


@pytest.mark.parametrize(
    ("name", "cores", "sockets"),
    [
        ("apple-m2-max-64gb", 8, 1),
        ("cores-6-two-columns", 6, 1),
        ("cores-64-three-columns", 64, 1),
        ("cores-64-two-columns", 64, 1),
        ("cores-64-with-siblings", 64, 1),
        ("mac-pro-intel", 16, 1),
        ("msys2", 8, 1),
        ("ryzen-9950x3d-windows", 16, 1),
        ("two-sockets-1tb", 64, 2),
    ],
)
def test_the_machine_has_the_cores_of_its_case(name: str, cores: int, sockets: int) -> None:
    processor = emulate_host(find_profile(name)).processor
    assert (processor.physical_cores, processor.sockets, processor.note) == (cores, sockets, None)


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("radeon-gtx-1650-five-entries", ["AMD Radeon RX 5600 XT (RADV NAVI10)", "NVIDIA GeForce GTX 1650"]),
        ("rtx-4080-laptop-windows", ["NVIDIA GeForce RTX 4080 Laptop GPU"]),
        ("rtx-5070-ti-radeon-igpu", ["NVIDIA GeForce RTX 5070 Ti"]),
        ("wsl-rtx-4090", ["NVIDIA GeForce RTX 4090"]),
    ],
)
def test_a_plan_gets_each_gpu_once_and_no_cpu_device(name: str, planned: list[str]) -> None:
    profile = find_profile(name)
    devices = matching_accelerators(profile, emulate_host(profile))
    assert [device.identity.name for device in devices] == planned


# 3 GB hold no runtime of a model: there, a refusal is what holds.
@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("host-3gb", 0, "*this speaks of plans only*"),
        ("gb10-114gb", 0, "*this speaks of plans only*"),
        ("radeon-gtx-1650-five-entries", 0, "*this speaks of plans only*"),
        ("a100-mig", 0, "*this speaks of plans only*"),
    ],
)
def test_the_emulated_suite_ends_with_the_right_status(
    pytester: pytest.Pytester, name: str, status: int, said: str
) -> None:
    result = pytester.runpytest_subprocess(f"--profile={name}", "--emulate")
    assert result.ret == status, result.stdout.str()
    result.stdout.fnmatch_lines([said])
