"""One card is one device, however many interfaces, drivers and tools show it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from pytest_colibri.host.amdgpu import parse_drm
from pytest_colibri.host.devices import combine, physical_devices
from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.host.nvidia import parse_nvidia_smi
from pytest_colibri.host.rocm_smi import parse_rocm_smi
from pytest_colibri.host.vulkan import parse_vulkan
from pytest_colibri.profiles.model import DeviceType, Pool
from pytest_colibri.units import MIB, Figure

UUIDS = ("0" * 31 + "1", "0" * 31 + "2")


def device(
    api: str = "vulkan",
    index: int = 0,
    name: str = "AMD Radeon RX 580",
    vendor: str = "amd",
    kind: DeviceType = "discrete",
    driver: str = "radv",
    uuid: str | None = None,
    pci: str | None = None,
    mib: int | None = 8000,
) -> Accelerator:
    pools: dict[DeviceType, Pool] = {"discrete": "discrete", "integrated": "unified", "cpu": "unified"}
    total = Figure(None if mib is None else mib * MIB, f"{api} {driver}")
    identity = DeviceIdentity(api, index, name, uuid, pci)
    return Accelerator(identity, vendor, kind, driver, pools.get(kind), total, total)


def names(accelerators: tuple[Accelerator, ...]) -> list[str]:
    return [found.views[0].identity.name for found in physical_devices(accelerators)]


LLVMPIPES = (
    device(name="llvmpipe (LLVM 15.0.7, 256 bits)", vendor="mesa", kind="cpu", driver="llvmpipe 1", index=3),
    device(name="llvmpipe (LLVM 12.0.0, 256 bits)", vendor="mesa", kind="cpu", driver="llvmpipe 2", index=4),
)
FIVE_ENTRIES = (
    device(driver="radv 1", pci="0000:03:00.0", uuid=UUIDS[0]),
    device(driver="radv 2", pci="0000:03:00.0", uuid=UUIDS[0], index=1),
    device(name="NVIDIA GeForce GTX 1650", vendor="nvidia", driver="nvidia", pci="0000:01:00.0", mib=4096),
    *LLVMPIPES,
)


@pytest.mark.parametrize("order", list(permutations(range(5)))[::7])
def test_five_entries_are_two_gpus_and_the_cpu_in_any_order(order: tuple[int, ...]) -> None:
    found = physical_devices([FIVE_ENTRIES[place] for place in order])
    assert [(len(one.views), one.is_software) for one in found] == [(2, False), (1, False), (2, True)]
    assert [one.doubts for one in found] == [(), (), ()]


def test_discrete_comes_before_integrated_whatever_the_size() -> None:
    card = device(name="NVIDIA GeForce RTX 5070 Ti", vendor="nvidia", driver="nvidia", mib=15_995)
    chip = device(name="AMD Radeon(TM) Graphics", kind="integrated", mib=16_180)
    laptop = device(name="NVIDIA GeForce RTX 4080 Laptop GPU", vendor="nvidia", driver="nvidia", mib=12_282)
    shared = device(name="Intel(R) UHD Graphics", vendor="intel", kind="integrated", mib=32_563)
    assert names((chip, card)) == ["NVIDIA GeForce RTX 5070 Ti", "AMD Radeon(TM) Graphics"]
    assert names((shared, laptop))[0] == "NVIDIA GeForce RTX 4080 Laptop GPU"


def test_processors_that_contradict_each_other_are_named() -> None:
    rocm = parse_rocm_smi("device,Card Series,GFX Version\ncard0,AMD Radeon RX 9070,gfx1201\n")
    radv = replace(device(name="AMD Radeon Graphics (RADV GFX1200)", pci="0000:03:00.0"), processor="gfx1200")
    (found,) = physical_devices((*rocm, radv))
    (doubt,) = found.doubts
    assert "its processor is given as" in doubt
    assert "gfx1201 by AMD Radeon RX 9070" in doubt
    assert "gfx1200 by AMD Radeon Graphics (RADV GFX1200)" in doubt


def test_cards_whose_order_differs_by_interface_are_joined_by_identity() -> None:
    listed = parse_nvidia_smi(
        f"0, NVIDIA GeForce GTX 1660 SUPER, {UUIDS[0]}, 00000000:01:00.0, 6144, 6000\n"
        f"1, NVIDIA GeForce RTX 3090, {UUIDS[1]}, 00000000:02:00.0, 24576, 24000\n"
    )
    vulkan = (
        device(name="NVIDIA GeForce RTX 3090", vendor="nvidia", driver="nvidia", uuid=UUIDS[1], mib=24_576),
        device(
            name="NVIDIA GeForce GTX 1660 SUPER", vendor="nvidia", driver="nvidia", uuid=UUIDS[0], index=1
        ),
    )
    large, small = physical_devices((*listed, *vulkan))
    assert [view.identity.index for view in large.views] == [1, 0]
    assert [view.identity.index for view in small.views] == [1, 0]
    cuda = large.through("cuda")
    assert cuda is not None
    assert (cuda.identity.index, cuda.identity.name) == (1, "NVIDIA GeForce RTX 3090")
    assert large.through("rocm") is None


def test_two_cards_that_share_an_id_are_two() -> None:
    twins = (device(uuid=UUIDS[0]), device(uuid=UUIDS[0], index=1))
    assert len(physical_devices(twins)) == 2
    assert len(physical_devices((*twins, device(api="metal", driver="metal", uuid=UUIDS[0])))) == 2


def test_slices_of_one_card_are_two_and_two_addresses_are_two() -> None:
    slices = [device(pci="0000:01:00.0", uuid=uuid) for uuid in UUIDS]
    assert len(physical_devices(slices)) == 2
    cards = [device(pci=f"0000:0{bus}:00.0", uuid=UUIDS[0]) for bus in (1, 2)]
    assert len(physical_devices(cards)) == 2


def test_one_card_of_a_vendor_without_identity_is_one_and_two_stay_apart() -> None:
    metal = device(api="metal", name="Apple M2 Max", vendor="apple", kind="integrated", driver="metal")
    molten = device(name="Apple M2 Max", vendor="apple", kind="integrated", driver="MoltenVK", uuid=UUIDS[0])
    assert len(physical_devices((metal, molten))) == 1
    second = replace(molten, identity=replace(molten.identity, uuid=UUIDS[1], index=1))
    assert len(physical_devices((metal, molten, second))) == 3


def entry(driver_id: int, **identity: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "name": "Microsoft Direct3D12 (NVIDIA GeForce RTX 4090)",
        "vendor_id": 0x10DE,
        "type": "discrete",
        "driver": {"name": "Dozen", "info": "Mesa 24.0.9", "id": driver_id},
        "device_uuid": UUIDS[1],
        "pci": None,
        "heaps": [{"size_bytes": 24_000 * MIB, "flags": 1}],
        "memory_types": [],
        "queue_families": [],
        **identity,
    }


@pytest.mark.parametrize(("driver_id", "count"), [(23, 1), (4, 2)])
def test_a_card_under_wsl_is_one_device_whatever_its_layered_driver_calls_it(
    driver_id: int, count: int
) -> None:
    layered = parse_vulkan(json.dumps({"devices": [entry(driver_id)]}))
    listed = parse_nvidia_smi(f"0, NVIDIA GeForce RTX 4090, {UUIDS[0]}, 00000000:01:00.0, 24564, 23000\n")
    assert len(physical_devices((*layered, *listed))) == count


@pytest.mark.parametrize(("mib", "doubts"), [(7600, 0), (7599, 1)])
def test_figures_that_differ_by_more_than_five_percent_are_reported_and_the_smaller_used(
    mib: int, doubts: int
) -> None:
    first = device("cuda", driver="nvidia 580", pci="0000:01:00.0")
    second = device("cuda", driver="nvidia-smi", pci="0000:01:00.0", mib=mib)
    for one, other in ((first, second), (second, first)):
        (found,), notes = combine([one], [other])
        assert found.total.bytes == mib * MIB
        assert [("differ; the smaller is used" in note) for note in notes] == [True] * doubts * 2
        (physical,) = physical_devices((one, other))
        assert (physical.total.bytes, len(physical.doubts)) == (mib * MIB, doubts * 2)


def test_a_figure_that_one_tool_lacks_is_taken_from_the_other_and_two_unknown_stay_unknown() -> None:
    silent = device("rocm", pci="0000:01:00.0", mib=None)
    (found,), notes = combine([silent], [device("rocm", pci="0000:01:00.0")])
    assert (found.total.bytes, notes) == (8000 * MIB, ())
    (found,), _ = combine([silent], [silent])
    assert found.total == silent.total


SYSFS = """\
==> card0/device/vendor <==
0x1a03

==> card0/device/uevent <==
PCI_SLOT_NAME=0000:c3:00.0

==> card2/device/vendor <==
0x1002

==> card2/device/device <==
0x1586

==> card2/device/uevent <==
DRIVER=amdgpu
PCI_SLOT_NAME=0000:c5:00.0

==> card2/device/mem_info_vram_total <==
536870912

==> card2/device/mem_info_gtt_total <==
108000000000

==> card2/device/mem_info_gtt_used <==
20000000

==> card1/device/vendor <==
0x1002

==> card1/device/device <==
0x73a5

==> card1/device/uevent <==
PCI_SLOT_NAME=0000:03:00.0

==> card1/device/mem_info_vram_total <==
17163091968

==> card1/device/mem_info_vram_used <==
163091968
"""


def test_amdgpu_tells_a_card_an_apu_and_the_display_chip_of_a_server_apart() -> None:
    card, apu = parse_drm(SYSFS)
    assert (card.pool, card.total.bytes, card.free.bytes) == ("discrete", 17_163_091_968, 17_000_000_000)
    assert (apu.pool, apu.total.bytes, apu.free.bytes) == ("unified", 108_000_000_000, 107_980_000_000)
    assert [found.identity.pci for found in (card, apu)] == ["0000:03:00.0", "0000:c5:00.0"]
    assert [found.identity.index for found in (card, apu)] == [0, 1]


ROCM = """\
device,VRAM Total Memory (B),VRAM Total Used Memory (B),PCI Bus,Card Series,GFX Version
card0,N/A,N/A,0000:C5:00.0,Radeon 8060S Graphics,gfx1151
card1,17163091968,163091968,0000:03:00.0,AMD Radeon RX 6950 XT,gfx1030
"""


def test_rocm_smi_names_what_amdgpu_measures() -> None:
    (apu, card), notes = combine(parse_rocm_smi(ROCM), parse_drm(SYSFS))
    assert (apu.identity.name, apu.free.bytes) == ("Radeon 8060S Graphics", 107_980_000_000)
    assert (card.identity.name, card.free.bytes) == ("AMD Radeon RX 6950 XT", 17_000_000_000)
    assert notes == ()


def test_devices_without_addresses_are_not_counted_again() -> None:
    listed = parse_rocm_smi("device,Card Series,GFX Version\ncard0,A,gfx1030\ncard1,B,gfx1151\n")
    found, (note,) = combine(listed, parse_drm(SYSFS))
    assert found == listed
    assert "cannot be told from these" in note


def test_what_only_the_second_tool_lists_is_added() -> None:
    card, apu = parse_drm(SYSFS)
    assert combine([card], [apu, card]) == ((card, apu), ())
    assert combine([], [card]) == ((card,), ())
