"""The RAM of a machine: what there is, what is available, and what the control groups leave of it.

The parsers are pure functions of text, so that a recording is read by the same code as the live machine.
Recordings are the output of

* ``meminfo``: ``cat /proc/meminfo``
* ``cgroup-v2``: ``tail -n +1 memory.max memory.current memory.stat`` in the folder of the group
* ``cgroup-v1``: ``tail -n +1 memory.limit_in_bytes memory.usage_in_bytes memory.stat``
* ``vm_stat``: ``sysctl`` with the keys of MAC_KEYS, then ``vm_stat``
* ``cim``: in PowerShell, ``Get-CimInstance Win32_OperatingSystem | Format-List TotalVisibleMemorySize,
  FreePhysicalMemory`` and ``Get-CimInstance Win32_Processor | Format-List NumberOfCores,
  NumberOfLogicalProcessors``

A recording of several nested groups names their folders: ``tail -n +1 */memory.max ...``.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host.figures import within
from pytest_colibri.host.model import Memory
from pytest_colibri.host.tools import bounded, printed_files, run_tool
from pytest_colibri.units import KIB, Figure, smallest

CgroupVersion = Literal[1, 2]

# A planner may ask for logical processors where the probes ask for physical ones.
MAC_KEYS = (
    "hw.memsize",
    "hw.physicalcpu",
    "hw.logicalcpu",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel0.logicalcpu",
    "hw.packages",
)

NO_CGROUP = Figure(None, "no control group limits memory")

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63, which differs by page size.
_UNLIMITED_FROM_BYTES = 2**60
_READ_BYTES = 64 * KIB


@dataclass(frozen=True)
class _CgroupFiles:
    limit: str
    used: str
    reclaimable: str


_CGROUP_FILES: Mapping[CgroupVersion, _CgroupFiles] = {
    1: _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _CgroupFiles("memory.max", "memory.current", "inactive_file"),
}


def parse_meminfo(text: str) -> tuple[Figure, Figure]:
    """Return the total and the available RAM from the text of ``/proc/meminfo``, whose kB are 1024 bytes.

    A kernel that gives no MemAvailable leaves it unknown: MemFree would not count reclaimable cache.
    """
    bounded(text, "meminfo")
    total = _meminfo_figure(text, "MemTotal")
    return total, within(total, _meminfo_figure(text, "MemAvailable"))


def parse_cgroup(text: str, version: CgroupVersion) -> Figure:
    """Return the tightest headroom of the groups whose files ``tail -n +1`` printed, one after another.

    Headroom is limit - (used - reclaimable file cache). Unknown where no group has a limit.
    """
    groups = printed_files(text, f"cgroup v{version}")
    files = _CGROUP_FILES[version]
    if not any(files.limit in group for group in groups.values()):
        raise UsageError(f"cgroup v{version}: no '==> {files.limit} <==' in the text")
    return _tightest(
        [
            _headroom(
                version, group.get(files.limit, ""), group.get(files.used, ""), group.get("memory.stat", "")
            )
            for group in groups.values()
        ]
    )


def parse_vm_stat(text: str) -> tuple[Figure, Figure]:
    """Return the total (``hw.memsize``) and the available RAM of a Mac.

    Available are the free, inactive, speculative and purgeable pages, of the page size that the text states.
    """
    bounded(text, "vm_stat")
    size = re.search(r"^hw\.memsize: (\d{1,18})$", text, re.MULTILINE)
    total = Figure(int(size[1]), "hw.memsize") if size else Figure(None, "hw.memsize is not in the text")
    page = re.search(r"page size of (\d{1,7}) bytes", text)
    counts = [
        re.search(rf"^Pages {kind}: +(\d{{1,15}})\.$", text, re.MULTILINE)
        for kind in ("free", "inactive", "speculative", "purgeable")
    ]
    if page is None or None in counts:
        return total, Figure(None, "vm_stat lacks its page size or a page count")
    pages = sum(int(count[1]) for count in counts if count)
    return total, within(total, Figure(pages * int(page[1]), "vm_stat"))


def parse_cim(text: str) -> tuple[Figure, Figure]:
    """Return the total and the available RAM of a Windows machine, whose kilobytes are 1024 bytes."""
    bounded(text, "cim")
    total = _cim_figure(text, "TotalVisibleMemorySize")
    return total, within(total, _cim_figure(text, "FreePhysicalMemory"))


def probe_memory() -> Memory:
    """Read the memory of this machine now."""
    system = platform.system()
    if system == "Linux":
        total, available = parse_meminfo(_read("/proc/meminfo"))
        headrooms = [
            _headroom(version, *map(_read, _group_files(version, folder)))
            for version, folder in _own_groups()
        ]
        return Memory(total, available, _tightest(headrooms))
    if system == "Darwin":
        total, available = parse_vm_stat(read_vm_stat())
    else:
        import psutil

        memory = psutil.virtual_memory()
        total, available = Figure(memory.total, "psutil"), Figure(memory.available, "psutil")
    return Memory(total, available, Figure(None, f"{system} has no control groups"))


def read_vm_stat() -> str:
    """Return the output of ``sysctl`` and ``vm_stat`` on this Mac, empty where they cannot be run."""
    text = ""
    for arguments in (["sysctl", *MAC_KEYS], ["vm_stat"]):
        with suppress(Unavailable):
            text += run_tool(arguments).text
    return text


class AvailableMemory:
    """How much memory can still be taken, for a sampler: the smaller of MemAvailable and cgroup headroom.

    Files stay open between reads. The groups are those of this process at the time of creation. macOS counts
    no purgeable pages here.
    """

    def __init__(self) -> None:
        self._meminfo: int | None = None
        self._groups: list[tuple[CgroupVersion, list[int | None]]] = []
        if platform.system() != "Linux":
            return
        self._meminfo = os.open("/proc/meminfo", os.O_RDONLY)
        for version, folder in _own_groups():
            self._groups.append((version, [_open(path) for path in _group_files(version, folder)]))

    def read(self) -> int | None:
        """Return the bytes that can be taken now, None when nothing tells."""
        if platform.system() != "Linux":
            import psutil

            return psutil.virtual_memory().available
        _, available = parse_meminfo(_pread(self._meminfo))
        headrooms = [_live_headroom(version, files) for version, files in self._groups]
        return smallest(available, *headrooms).bytes

    def close(self) -> None:
        """Close the files; what is read afterwards is unknown."""
        files = [self._meminfo, *(file for _, group in self._groups for file in group)]
        self._meminfo, self._groups = None, []
        for file in files:
            if file is not None:
                os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def group_folders(cgroup: str, mountinfo: str) -> tuple[tuple[CgroupVersion, Path], ...]:
    """Return the folders of the memory groups of a process, from its own group up to the mount.

    ``cgroup`` and ``mountinfo`` are the texts of ``/proc/PID/cgroup`` and ``/proc/PID/mountinfo``. A machine
    may mount v1 and v2 at the same time. A group outside of the mount (a container sees only its own part) is
    taken as the root of the mount.
    """
    paths: dict[CgroupVersion, str] = {}
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[1] = path
        elif number == "0" and controllers == "":
            paths[2] = path
    folders: list[tuple[CgroupVersion, Path]] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        version = _mounted_version(after)
        if version is None or version not in paths:
            continue
        root, mount = (_unescape(field) for field in before.split()[3:5])
        folders += [(version, folder) for folder in _upwards(Path(mount), root, paths[version])]
    return tuple(dict.fromkeys(folders))


def _own_groups() -> list[tuple[CgroupVersion, Path]]:
    """Return the groups of this process that can limit memory; the root group of v2 has no such file."""
    groups = group_folders(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo"))
    return [
        (version, folder) for version, folder in groups if (folder / _CGROUP_FILES[version].limit).exists()
    ]


def _mounted_version(after_separator: str) -> CgroupVersion | None:
    kind, _, source_and_options = after_separator.partition(" ")
    if kind == "cgroup2":
        return 2
    if kind == "cgroup" and "memory" in source_and_options.rpartition(" ")[2].split(","):
        return 1
    return None


def _upwards(mount: Path, root: str, path: str) -> list[Path]:
    group, top = PurePosixPath(path), PurePosixPath(root)
    if ".." in group.parts or not group.is_relative_to(top):
        return [mount]
    inside = group.relative_to(top)
    return [mount / level for level in (inside, *inside.parents)]


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _group_files(version: CgroupVersion, folder: Path) -> tuple[Path, Path, Path]:
    files = _CGROUP_FILES[version]
    return folder / files.limit, folder / files.used, folder / "memory.stat"


def _headroom(version: CgroupVersion, limit_text: str, used_text: str, stat_text: str) -> Figure:
    files = _CGROUP_FILES[version]
    limit, used = _count(limit_text), _count(used_text)
    if _is_unlimited(limit_text):
        return NO_CGROUP
    if limit is None or used is None:
        return Figure(None, f"cgroup v{version}: {files.limit} or {files.used} cannot be read")
    stat = re.search(rf"^{files.reclaimable} (\d{{1,18}})$", stat_text, re.MULTILINE)
    reclaimable = min(int(stat[1]), used) if stat else 0
    return Figure(max(0, limit - (used - reclaimable)), f"cgroup v{version} {files.limit} less used memory")


def _live_headroom(version: CgroupVersion, files: list[int | None]) -> Figure:
    """Return the headroom of a group; one without a limit is asked for nothing else, which takes longest."""
    limit = _pread(files[0])
    if _is_unlimited(limit):
        return NO_CGROUP
    return _headroom(version, limit, *map(_pread, files[1:]))


def _is_unlimited(limit_text: str) -> bool:
    limit = _count(limit_text)
    return limit_text.strip() == "max" or (limit is not None and limit >= _UNLIMITED_FROM_BYTES)


def _tightest(headrooms: list[Figure]) -> Figure:
    limited = [headroom for headroom in headrooms if headroom is not NO_CGROUP]
    return smallest(*limited) if limited else NO_CGROUP


def _meminfo_figure(text: str, key: str) -> Figure:
    line = re.search(rf"^{key}: +(\d{{1,15}}) kB$", text, re.MULTILINE)
    if line is None:
        return Figure(None, f"meminfo has no {key}")
    return Figure(int(line[1]) * KIB, f"meminfo {key}")


def _cim_figure(text: str, key: str) -> Figure:
    line = re.search(rf"^{key} *: (\d{{1,15}})$", text, re.MULTILINE)
    if line is None:
        return Figure(None, f"cim has no {key}")
    return Figure(int(line[1]) * KIB, f"Windows {key}")


def _count(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _read(path: str | Path) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _pread(file: int | None) -> str:
    """Read a file again from its start; empty when it is gone, as that of a removed group."""
    try:
        return "" if file is None else os.pread(file, _READ_BYTES, 0).decode("utf-8", "replace")
    except OSError:
        return ""
