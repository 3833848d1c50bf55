from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.errors import UsageError
from pytest_colibri.host.memory import (
    AvailableMemory,
    group_folders,
    parse_cgroup,
    parse_cim,
    parse_meminfo,
    parse_vm_stat,
    probe_memory,
)
from pytest_colibri.units import MIB

linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")

GB10_MEMINFO = "MemTotal:       127535300 kB\nMemFree:          9000000 kB\nMemAvailable:   108000000 kB\n"


def test_available_memory_is_memavailable_in_kb_of_1024_bytes_not_memfree():
    total, available = parse_meminfo(GB10_MEMINFO)
    assert (total.bytes, available.bytes) == (127_535_300 * 1024, 108_000_000 * 1024)


def test_meminfo_without_memavailable_is_unknown_not_memfree():
    total, available = parse_meminfo("MemTotal:  16777216 kB\nMemFree:  8388608 kB\n")
    assert total.bytes == 16 * 2**30
    assert available.bytes is None
    assert "MemAvailable" in available.source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MemTotal: -5 kB\nMemAvailable: -5 kB\n",
        "MemTotal: 5 MB\nMemAvailable: 5 MB\n",
        f"MemTotal: {'9' * 5000} kB\nMemAvailable: {'9' * 5000} kB\n",
        "XMemTotal: 5 kB\nXMemAvailable: 5 kB\n",
        "MemTotal: ١٢ kB x\nMemAvailable: 1.5 kB\n",
    ],
)
def test_meminfo_that_gives_no_figure_is_unknown(text):
    assert [figure.bytes for figure in parse_meminfo(text)] == [None, None]


def test_more_available_than_there_is_is_refused_and_both_figures_are_named():
    total, available = parse_meminfo("MemTotal: 1000000 kB\nMemAvailable: 2000000 kB\n")
    assert total.bytes == 1_024_000_000
    assert available.bytes is None
    assert "2.05 GB" in available.source
    assert "1.02 GB" in available.source


def test_text_longer_than_any_meminfo_is_refused():
    with pytest.raises(UsageError, match="meminfo"):
        parse_meminfo("x" * (5 * MIB))


def test_windows_counts_kilobytes_of_1024_bytes():
    text = "\n\nTotalVisibleMemorySize : 33464844\nFreePhysicalMemory     : 20971520\n\n\nNumberOfCores : 8\n"
    total, available = parse_cim(text)
    assert (total.bytes, available.bytes) == (33464844 * 1024, 20971520 * 1024)
    assert (total.source, available.source) == (
        "Windows TotalVisibleMemorySize",
        "Windows FreePhysicalMemory",
    )


@pytest.mark.parametrize("text", ["", "FreePhysicalMemory : lots\n", "TotalVisibleMemorySize :\n"])
def test_what_windows_does_not_say_is_unknown(text):
    assert [figure.bytes for figure in parse_cim(text)] == [None, None]


def v2_group(limit: str, used: int, inactive: int, folder: str = "") -> str:
    return (
        f"==> {folder}memory.max <==\n{limit}\n\n==> {folder}memory.current <==\n{used}\n\n"
        f"==> {folder}memory.stat <==\nanon 4096\nfile 8192\ninactive_file {inactive}\nactive_file 0\n"
    )


def v1_group(limit: str, used: int, inactive: int) -> str:
    return (
        f"==> memory.limit_in_bytes <==\n{limit}\n\n==> memory.usage_in_bytes <==\n{used}\n\n"
        f"==> memory.stat <==\ninactive_file 0\ntotal_inactive_file {inactive}\n"
    )


def test_reclaimable_file_cache_of_a_group_is_available():
    limit, used = 161_061_273_600, 100_000_000_000
    headroom = parse_cgroup(v2_group(str(limit), used, used * 6 // 10), 2)
    assert headroom.bytes == limit - used * 4 // 10


def test_v1_counts_the_reclaimable_cache_of_the_whole_subtree():
    assert parse_cgroup(v1_group("1000000", 600_000, 100_000), 1).bytes == 500_000


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (v2_group("max", 5, 0), 2),
        (v1_group("9223372036854771712", 5, 0), 1),
        (v1_group("9223372036854710272", 5, 0), 1),
    ],
    ids=["v2", "v1 with 4 KiB pages", "v1 with 64 KiB pages"],
)
def test_no_limit_is_unknown_and_says_so(text, version):
    headroom = parse_cgroup(text, version)
    assert headroom.bytes is None
    assert headroom.source == "no control group limits memory"


def test_the_tightest_of_nested_groups_counts():
    text = v2_group("max", 900, 0, "/a/b/") + v2_group("1000", 400, 0, "/a/") + v2_group("5000", 100, 0, "/")
    assert parse_cgroup(text, 2).bytes == 600


def test_a_group_over_its_limit_leaves_nothing():
    assert parse_cgroup(v2_group("1000", 1500, 0), 2).bytes == 0


def test_more_cache_than_use_does_not_raise_the_limit():
    assert parse_cgroup(v2_group("1000", 300, 700), 2).bytes == 1000


def test_limit_without_usage_is_unknown_not_unlimited():
    headroom = parse_cgroup("==> memory.max <==\n1000\n", 2)
    assert headroom.bytes is None
    assert "memory.current" in headroom.source


def test_cgroup_text_of_another_version_is_refused():
    with pytest.raises(UsageError, match=r"cgroup v2: no '==> memory.max <=='"):
        parse_cgroup(v1_group("1000", 1, 0), 2)


def test_pod_limit_is_the_host_whatever_the_machine_has():
    total, available = parse_meminfo("MemTotal: 725614592 kB\nMemAvailable: 700000000 kB\n")
    pod = parse_cgroup(v2_group("161061273600", 0, 0), 2)
    assert total.bytes == 692 * 2**30
    assert pod.bytes == 150 * 2**30
    assert pod.bytes < (available.bytes or 0)


HYBRID_CGROUP = "9:name=systemd:/\n4:memory:/docker/abc\n2:cpu,cpuacct:/\n0::/init.scope\n"
HYBRID_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def test_hybrid_mounts_give_the_groups_of_both_versions_up_to_the_mount():
    assert group_folders(HYBRID_CGROUP, HYBRID_MOUNTS) == (
        (1, Path("/sys/fs/cgroup/memory/docker/abc")),
        (1, Path("/sys/fs/cgroup/memory/docker")),
        (1, Path("/sys/fs/cgroup/memory")),
        (2, Path("/sys/fs/cgroup/unified/init.scope")),
        (2, Path("/sys/fs/cgroup/unified")),
    )


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/docker/abc/job", "/docker/abc", ["/cg/job", "/cg"]),
        ("/docker/abc", "/docker/abc", ["/cg"]),
        ("/../other", "/", ["/cg"]),
        ("/elsewhere", "/docker/abc", ["/cg"]),
    ],
    ids=[
        "below a container's root",
        "the container's root",
        "outside of the namespace",
        "outside of the mount",
    ],
)
def test_groups_of_a_container_end_at_its_mount(path, root, expected):
    mounts = f"41 31 0:38 {root} /cg rw - cgroup2 cgroup2 rw\n"
    assert group_folders(f"0::{path}\n", mounts) == tuple((2, Path(folder)) for folder in expected)


def test_escaped_mount_points_are_read():
    mounts = "41 31 0:38 / /my\\040groups rw - cgroup2 cgroup2 rw\n"
    assert group_folders("0::/\n", mounts) == ((2, Path("/my groups")),)


def test_a_machine_without_memory_groups_has_no_folders():
    assert group_folders("2:cpu:/\n", HYBRID_MOUNTS) == ()
    assert group_folders("garbage\n", "garbage\n") == ()


VM_STAT = """hw.memsize: 68719476736
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              100000.
Pages active:                            900000.
Pages inactive:                          200000.
Pages speculative:                        30000.
Pages throttled:                              0.
Pages wired down:                        400000.
Pages purgeable:                           4000.
"""


def test_vm_stat_counts_free_inactive_speculative_and_purgeable_pages_of_the_stated_size():
    total, available = parse_vm_stat(VM_STAT)
    assert (total.bytes, available.bytes) == (64 * 2**30, 334_000 * 16384)


def test_vm_stat_without_its_page_size_is_unknown():
    _, available = parse_vm_stat(VM_STAT.replace("16384 bytes", "some bytes"))
    assert available.bytes is None


@given(st.text(max_size=300))
def test_no_text_makes_a_memory_parser_fail_otherwise_than_by_a_usage_error(text):
    parse_meminfo(text)
    parse_vm_stat(text)
    group_folders(text, text)
    try:
        parse_cgroup(f"==> memory.max <==\n{text}", 2)
    except UsageError:
        pytest.fail("the limit is there, whatever it says")


@linux_only
@pytest.mark.skipif(shutil.which("free") is None, reason="free (procps) is not installed")
def test_live_memory_agrees_with_free():
    # Other programs take and give memory meanwhile, so that a moment of agreement is looked for.
    assert any(agrees_with_free() for _ in range(5))


def agrees_with_free() -> bool:
    output = subprocess.run(["free", "-b"], capture_output=True, text=True, check=True, timeout=10).stdout
    row = output.splitlines()[1].split()
    memory = probe_memory()
    assert memory.total.bytes == int(row[1])
    assert memory.available.bytes is not None
    return abs(memory.available.bytes - int(row[-1])) < 32 * MIB


@linux_only
def test_a_closed_sampler_knows_nothing():
    with AvailableMemory() as memory:
        assert memory.read()
    assert memory.read() is None


GROUP_REPORT = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from pytest_colibri.host.memory import AvailableMemory, probe_memory
with AvailableMemory() as memory:
    before = memory.read()
    block = bytearray(b"x") * (40 * 2**20)
    print(before, memory.read(), probe_memory().cgroup_available.bytes, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def memory_group() -> Iterator[tuple[Path, str, str, str]]:
    """A group of our own, with the names of its limit, usage and reclaimable cache."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if (v1 / "memory.limit_in_bytes").exists():
        root, names = v1, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    elif (v2 / "cgroup.subtree_control").exists() and (
        "memory" in (v2 / "cgroup.subtree_control").read_text().split()
    ):
        root, names = v2, ("memory.max", "memory.current", "inactive_file")
    else:
        pytest.skip("no cgroup memory controller for groups of our own")
    folder = root / f"pytest-colibri-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield folder, *names
    for group in (*folder.glob("*/"), folder):
        group.rmdir()


@linux_only
@pytest.mark.parametrize("limit_is_on", ["the group", "its parent"])
def test_headroom_is_that_of_a_real_control_group(memory_group, limit_is_on):
    parent, limit_name, used_name, reclaimable = memory_group
    group = parent / "inner"
    if limit_name == "memory.max":
        (parent / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    limited = group if limit_is_on == "the group" else parent
    (limited / limit_name).write_text(str(512 * MIB))
    child = subprocess.Popen(
        [sys.executable, "-c", GROUP_REPORT, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with child:
        assert child.stdout is not None
        before, sampled, probed = map(int, child.stdout.readline().split())
        used = int((limited / used_name).read_text())
        stat = dict(line.split() for line in (limited / "memory.stat").read_text().splitlines())
        child.communicate("done\n", timeout=10)
    expected = 512 * MIB - (used - int(stat[reclaimable]))
    # Kernels charge in batches of pages per processor, so that readings differ a little.
    assert abs(probed - expected) < 4 * MIB
    assert abs(sampled - expected) < 4 * MIB
    assert abs(before - sampled - 40 * MIB) < 4 * MIB
