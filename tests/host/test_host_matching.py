"""Profiles held against hosts: the shipped profiles, with machines described as the probes describe them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_colibri.errors import HostMismatch
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.matching import best_profile, matching_accelerators, mismatches
from pytest_colibri.host.model import Accelerator, DeviceIdentity, Host, Memory, Processor
from pytest_colibri.profiles.loader import find_profile, load_profile, profile_names
from pytest_colibri.profiles.model import DeviceType, Pool, Profile
from pytest_colibri.units import GB, Figure

UNKNOWN = Figure(None, "not probed")
PROFILES = tuple(find_profile(name) for name in profile_names())


def device(
    api: str,
    name: str,
    vendor: str,
    kind: DeviceType,
    pool: Pool | None,
    total_bytes: int | None = None,
    index: int = 0,
    driver: str = "radv Mesa 22.3.6",
) -> Accelerator:
    total = Figure(total_bytes, "test")
    return Accelerator(DeviceIdentity(api, index, name), vendor, kind, driver, pool, total, UNKNOWN)


def machine(*devices: Accelerator, notes: tuple[str, ...] = (), system: str = "linux") -> Host:
    memory = Memory(UNKNOWN, UNKNOWN, UNKNOWN)
    return Host("live", system, "x86_64", memory, Processor(2, 1, "test"), devices, notes)


LLVMPIPE = device(
    "vulkan", "llvmpipe (LLVM 15.0.6, 256 bits)", "mesa", "cpu", "unified", 2 * GB, driver="llvmpipe"
)
RADEON = device("vulkan", "AMD Radeon RX 580", "amd", "discrete", "discrete", 8 * GB)
APU = device("vulkan", "AMD Radeon(TM) Graphics", "amd", "integrated", "unified", 16 * GB, index=1)
UHD = device("vulkan", "Intel(R) UHD Graphics", "intel", "integrated", "unified", 12 * GB)
RADEON_ROCM = replace(RADEON, identity=DeviceIdentity("rocm", 0, "AMD Radeon RX 580"))
GEFORCE = device("cuda", "NVIDIA GeForce RTX 3090", "nvidia", "discrete", "discrete", 24 * GB)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_shipped_profile_fits_and_is_best_for_its_own_machine(profile: Profile) -> None:
    host = emulate_host(profile)
    assert mismatches(profile, host) == ()
    best, reason = best_profile(PROFILES, host)
    assert best == profile or not profile.auto
    assert profile.auto or f"{profile.name} (" not in reason
    assert bool(matching_accelerators(profile, host)) == (profile.backend != "cpu")


@pytest.mark.parametrize(
    ("machine_of", "best"),
    [
        ("gb10-114gb", "nvidia-unified"),
        ("strix-halo-carve-out-512mib", "amd-rocm"),
        ("steam-deck", "amd-vulkan"),
        ("rtx-5070-ti-radeon-igpu", "nvidia-vulkan"),
        ("host-3gb", "cpu"),
    ],
)
def test_a_single_machine_leaves_the_choice_to_the_general_profiles(machine_of: str, best: str) -> None:
    assert best_profile(PROFILES, emulate_host(find_profile(machine_of)))[0].name == best


def test_llvmpipe_is_no_intel_gpu() -> None:
    assert mismatches(find_profile("intel-vulkan"), machine(LLVMPIPE)) == (
        "the profile intel-vulkan needs a Vulkan device of vendor intel and type discrete or integrated;"
        " this host has llvmpipe (LLVM 15.0.6, 256 bits) (CPU device, not a GPU, vulkan, driver llvmpipe)",
    )


def test_a_missing_interface_is_explained_by_the_notes_on_it() -> None:
    host = machine(GEFORCE, notes=("Vulkan: no Vulkan loader: install it", "ROCm: rocm-smi is not installed"))
    assert mismatches(find_profile("software-vulkan"), host) == (
        "the profile software-vulkan needs a Vulkan device of vendor mesa and type cpu and unified memory;"
        " this host has no Vulkan device, only NVIDIA GeForce RTX 3090 (discrete GPU, cuda, driver radv Mesa"
        " 22.3.6) (Vulkan: no Vulkan loader: install it)",
    )


def test_every_unmet_need_is_said() -> None:
    system, architecture, accelerator = mismatches(find_profile("apple-metal"), machine())
    assert system == "the profile apple-metal needs the system darwin; this host runs linux"
    assert architecture == "the profile apple-metal needs the architecture arm64; this host has x86_64"
    assert accelerator.endswith("this host has no Metal device")


def test_a_device_under_another_interface_does_not_fit() -> None:
    assert mismatches(find_profile("amd-rocm"), machine(RADEON))
    assert not mismatches(find_profile("amd-rocm"), machine(RADEON_ROCM))


def test_a_device_with_the_other_pool_does_not_fit_and_an_unknown_pool_does() -> None:
    profile = find_profile("nvidia-cuda")
    assert mismatches(profile, machine(replace(GEFORCE, pool="unified")))
    assert not mismatches(profile, machine(replace(GEFORCE, pool=None)))


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ('name: ["*rx 58?"]', True),
        ('name: ["RX"]', False),
        ('name: ["nothing", "AMD*"]', True),
        ('driver: ["RADV *"]', True),
        ('driver: ["amdvlk*"]', False),
        ("vendor: [intel, amd]", True),
        ("vendor: [intel]\n    type: [discrete]", False),
    ],
)
def test_names_and_drivers_are_patterns_over_the_whole_text(tmp_path: Path, wanted: str, fits: bool) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(
        f"name: box\ntitle: A box\nbackend: vulkan\nmatch:\n  device:\n    {wanted}\npool: either\n"
        "tiers: [vram]\nrecordings:\n  - {tool: meminfo, provenance: constructed, text: x}\n"
    )
    assert (mismatches(load_profile(path), machine(RADEON)) == ()) is fits


def test_brackets_in_a_pattern_stand_for_themselves(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(
        "name: box\ntitle: A box\nbackend: rocm\nmatch:\n  device:\n    name: ['* [radeon rx 6900 xt]']\n"
        "pool: either\ntiers: [vram]\nrecordings:\n  - {tool: meminfo, provenance: constructed, text: x}\n"
    )
    navi = device("rocm", "Navi 21 [Radeon RX 6900 XT]", "amd", "discrete", "discrete")
    assert matching_accelerators(load_profile(path), machine(navi)) == (navi,)


def test_the_best_device_is_discrete_whatever_the_size_then_the_larger() -> None:
    unknown = device("vulkan", "Radeon unknown", "amd", "discrete", "discrete", None, index=2)
    larger = device("vulkan", "Radeon larger", "amd", "discrete", "discrete", 9 * GB, index=3)
    host = machine(APU, unknown, RADEON, LLVMPIPE, larger, UHD)
    assert matching_accelerators(find_profile("amd-vulkan"), host) == (larger, RADEON, unknown, APU)


@pytest.mark.parametrize(
    ("devices", "best", "because"),
    [
        ((), "cpu", "it needs no device"),
        ((LLVMPIPE,), "software-vulkan", "llvmpipe (LLVM 15.0.6, 256 bits) (CPU device, not a GPU"),
        ((LLVMPIPE, UHD), "intel-vulkan", "Intel(R) UHD Graphics (integrated GPU"),
        ((UHD, RADEON), "amd-vulkan", "AMD Radeon RX 580 (discrete GPU"),
        ((RADEON_ROCM, RADEON), "amd-vulkan", "AMD Radeon RX 580 (discrete GPU, vulkan"),
        ((RADEON_ROCM,), "amd-rocm", "AMD Radeon RX 580 (discrete GPU, rocm"),
        ((UHD, GEFORCE), "nvidia-cuda", "NVIDIA GeForce RTX 3090 (discrete GPU"),
    ],
)
def test_the_best_profile_is_chosen_with_its_reason(
    devices: tuple[Accelerator, ...], best: str, because: str
) -> None:
    profile, reason = best_profile(PROFILES, machine(*devices))
    assert profile.name == best
    assert reason.startswith(f"the profile {best} was chosen: {because}")
    passed_over = reason.partition("; passed over: ")[2]
    assert all(f"{other.name} (" in passed_over for other in PROFILES if other.auto and other.name != best)


def test_the_reason_tells_why_each_other_was_passed_over() -> None:
    _, reason = best_profile(PROFILES, machine(LLVMPIPE, RADEON, RADEON_ROCM), ("cpu", "vulkan"))
    assert "amd-rocm (fits, but the engine does not compute on ROCm)" in reason
    assert "software-vulkan (fits, but with llvmpipe (LLVM 15.0.6, 256 bits) (CPU device, not a GPU" in reason
    assert "cpu (fits, but with no device)" in reason
    assert "apple-metal (needs the system darwin)" in reason
    assert "intel-vulkan (needs a Vulkan device of vendor intel and type discrete or integrated)" in reason


def test_the_more_specific_of_two_profiles_wins_whatever_their_order(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(
        "name: box\ntitle: A box\nbackend: vulkan\nmatch:\n  system: [linux]\n  device:\n    vendor: [amd]\n"
        '    type: [discrete]\n    name: ["*RX 580*"]\npool: discrete\ntiers: [vram]\nrecordings:\n'
        "  - {tool: meminfo, provenance: constructed, text: x}\n"
    )
    box, general = load_profile(path), find_profile("amd-vulkan")
    for profiles in ((box, general), (general, box)):
        best, reason = best_profile(profiles, machine(RADEON))
        assert best == box
        assert reason.endswith("passed over: amd-vulkan (fits, but is no more specific)")


def test_where_no_profile_fits_every_reason_is_said() -> None:
    with pytest.raises(HostMismatch) as caught:
        best_profile([find_profile("amd-vulkan"), find_profile("apple-metal")], machine(LLVMPIPE))
    lines = str(caught.value).splitlines()
    assert lines[0] == "no profile fits this host"
    assert [line.split()[2] for line in lines[1:]] == [
        "amd-vulkan",
        "apple-metal",
        "apple-metal",
        "apple-metal",
    ]
