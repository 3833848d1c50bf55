"""What the doctor says of the machines in reports: devices by identity, memory from the right source."""

from __future__ import annotations

import re

import pytest

from pytest_colibri.cli import main

# One line of a finding each, in this order; what stands between and after them is left out.
REPORTS = {
    "two names of one card's processor": (
        "rx-9070-two-names",
        "warning accelerator.gpu AMD Radeon Graphics (RADV GFX1200)",
        "its processor is given as gfx1200 by AMD Radeon Graphics (RADV GFX1200)",
        "and gfx1201 by AMD Radeon RX 9070",
    ),
    "llvmpipe alone is no GPU": (
        "software-vulkan",
        "ok accelerator.cpu llvmpipe (LLVM 15.0.6, 256 bits) (CPU device, not a GPU",
        "warning accelerator.gpu no supported GPU was found: the CPU does all work",
    ),
    "five entries are two GPUs and the CPU": (
        "radeon-gtx-1650-five-entries",
        "ok accelerator.gpu AMD Radeon RX 5600 XT (RADV NAVI10)",
        "; also AMD Radeon RX 5600 XT (RADV NAVI10)",
        "ok accelerator.gpu NVIDIA GeForce GTX 1650",
        "ok accelerator.cpu llvmpipe",
        "; also llvmpipe",
    ),
    "a card before a chip that shows more": (
        "rtx-5070-ti-radeon-igpu",
        "ok accelerator.gpu NVIDIA GeForce RTX 5070 Ti (discrete GPU",
        "ok accelerator.gpu AMD Radeon(TM) Graphics (integrated GPU",
    ),
    "the card of a hybrid laptop before its chip": (
        "rtx-4080-laptop-windows",
        "ok accelerator.gpu NVIDIA GeForce RTX 4080 Laptop GPU (discrete GPU",
        "ok accelerator.gpu Intel(R) UHD Graphics (integrated GPU",
    ),
    "MemAvailable, not MemFree": (
        "gb10-page-cache",
        "ok host.memory 110.6 GB are available",
        "limit: 110.6 GB (meminfo MemAvailable)",
    ),
    "free memory beyond the total": (
        "rtx-5090-free-over-total",
        "unknown accelerator.gpu NVIDIA GeForce RTX 5090",
        "refused: 58.1 GB (nvidia-smi memory.free) exceeds the total, 33.7 GB (nvidia-smi memory.total)",
        "so it gets no tier",
    ),
    "the pool of an APU is GTT": (
        "strix-halo-carve-out-16gb",
        "ok accelerator.gpu Radeon 8060S Graphics (integrated GPU, rocm, driver amdgpu); shares the RAM",
        "total: 103.1 GB (rocm-smi GTT Total Memory (B))",
    ),
    "a carve-out is not the pool": (
        "strix-halo-carve-out-512mib",
        "shares the RAM",
        "total: 108.0 GB (rocm-smi GTT Total Memory (B))",
    ),
    "the pod is the host": (
        "pod-150gib",
        "total: 743.0 GB (meminfo MemTotal)",
        "limit: 159.1 GB (cgroup v2 memory.max less used memory)",
    ),
    "reclaimable cache is available": (
        "pod-page-cache",
        "limit: 48.7 GB (cgroup v1 memory.limit_in_bytes less used memory)",
    ),
    "memory that may not be seen is unknown": (
        "a100-mig",
        "unknown accelerator.gpu NVIDIA A100-SXM4-80GB",
        "its free memory is unknown (the driver gives memory as [Insufficient Permissions])",
    ),
    "memory that does not apply is shared": (
        "gb10-114gb",
        "ok accelerator.gpu NVIDIA GB10 (integrated GPU, cuda, driver nvidia); shares the RAM",
        "total: unknown (the driver gives memory as [N/A])",
    ),
    "PCI order is not the order of another interface": (
        "gtx-1660-super-rtx-3090",
        "ok accelerator.gpu NVIDIA GeForce RTX 3090 (discrete GPU, vulkan",
        "; also NVIDIA GeForce RTX 3090 (discrete GPU, cuda",
        "ok accelerator.gpu NVIDIA GeForce GTX 1660 SUPER (discrete GPU, vulkan",
        "; also NVIDIA GeForce GTX 1660 SUPER (discrete GPU, cuda",
    ),
    "sources that differ": (
        "steam-deck",
        "total 10.7 GB (Vulkan heap 1) and 8.59 GB (amdgpu mem_info_gtt_total) differ; the smaller is used",
        "total: 8.59 GB (amdgpu mem_info_gtt_total)",
    ),
    "the display chip of a server is no GPU": (
        "mi210-behind-display-chip",
        "ok accelerator.gpu AMD Instinct MI210 (discrete GPU, rocm, driver amdgpu); has memory of its own",
    ),
    "text around the table of rocm-smi": (
        "rx-6950-xt-text-around-csv",
        "ok accelerator.gpu AMD Radeon RX 6950 XT",
        "total: 17.2 GB (rocm-smi VRAM Total Memory (B))",
    ),
    "a meminfo without MemAvailable": (
        "msys2",
        "limit: 21.5 GB (Windows FreePhysicalMemory)",
    ),
    "a board without nvidia-smi": (
        "jetson-agx-orin",
        "ok accelerator.gpu NVIDIA Jetson AGX Orin Developer Kit (integrated GPU, cuda",
        "total: unknown (a Tegra chip has no memory of its own)",
    ),
    "siblings that are offline": ("cores-64-three-columns", "physical cores: 64, sockets: 1 (lscpu)"),
}


@pytest.mark.parametrize("report", REPORTS)
def test_the_doctor_says_what_is_right(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *sentences = REPORTS[report]
    assert main(["doctor", f"--profile={name}", "--emulate"]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    places = [said.find(sentence) for sentence in sentences]
    assert -1 not in places, said
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("software-vulkan", 0),
        ("radeon-gtx-1650-five-entries", 2),
        ("rtx-5070-ti-radeon-igpu", 2),
        ("gtx-1660-super-rtx-3090", 2),
        ("rtx-a6000-four", 4),
        ("wsl-rtx-4090", 1),
        ("mi210-behind-display-chip", 1),
        ("apple-m2-max-64gb", 1),
    ],
)
def test_the_doctor_counts_each_gpu_once(name: str, gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", f"--profile={name}", "--emulate"])
    said = capsys.readouterr().out
    found = [line for line in said.splitlines() if "accelerator.gpu" in line and "was found" not in line]
    assert len(found) == gpus, said
