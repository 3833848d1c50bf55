"""The physical cores that a program may use here.

Siblings of simultaneous multithreading share a core and count once. Recordings are the output of
``lscpu -p=cpu,core,socket`` or ``lscpu -p=core,socket``.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Set
from pathlib import Path

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host.memory import read_vm_stat
from pytest_colibri.host.model import Processor
from pytest_colibri.host.tools import bounded, run_tool

_TOPOLOGY = Path("/sys/devices/system/cpu")


def parse_lscpu(text: str, usable: Set[int] | None = None, source: str = "lscpu") -> Processor:
    """Return the distinct (core, socket) pairs of the last two columns; ``-`` marks a processor as offline.

    ``usable`` holds the numbers of the logical processors that this process may run on: where the text has
    the column, only their cores count, and a note says so. Raises UsageError for text of another shape.
    """
    bounded(text, source)
    rows = [_columns(line, source) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    online = [row for row in rows if "-" not in row[-2:]]
    cores = {row[-2:] for row in online}
    mine = {row[-2:] for row in online if usable is None or len(row) == 2 or int(row[0]) in usable}
    if not mine:
        return Processor(1, 1, source, f"{source} shows no core that is online and usable; 1 is taken")
    note = None
    if mine != cores:
        note = f"{len(mine)} of {len(cores)} physical cores: this process may not run on the others"
    return Processor(len(mine), len({socket for _, socket in mine}), source, note)


def parse_mac_cores(text: str) -> Processor:
    """Return the performance cores of a Mac, from ``sysctl`` lines (``hw.perflevel0.physicalcpu: 8``).

    An Intel Mac has no performance levels: there all physical cores count.
    """
    bounded(text, "sysctl")
    sockets = _sysctl(text, "hw.packages") or 1
    for key in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
        cores = _sysctl(text, key)
        if cores:
            return Processor(cores, sockets, key)
    return Processor(1, 1, "sysctl", "sysctl gives no number of physical cores; 1 is taken")


def parse_cim_cores(text: str) -> Processor:
    """Return the cores of a Windows machine, of which ``NumberOfCores`` stands once for each socket."""
    sockets = re.findall(r"^NumberOfCores *: (\d{1,4})$", bounded(text, "cim"), re.MULTILINE)
    cores = sum(map(int, sockets))
    if not cores:
        return Processor(1, 1, "cim", "cim gives no number of cores; 1 is taken")
    return Processor(cores, len(sockets), "Windows NumberOfCores")


def probe_processor() -> Processor:
    """Count the cores of this machine that this process may use."""
    if platform.system() == "Linux":
        return _probe_linux()
    if platform.system() == "Darwin":
        return parse_mac_cores(read_vm_stat())
    return _probe_with_psutil()


def _probe_linux() -> Processor:
    usable = os.sched_getaffinity(0)
    try:
        output = run_tool(["lscpu", "-p=cpu,core,socket"])
        if output.status == 0:
            return parse_lscpu(output.text, usable)
    except (Unavailable, UsageError):
        pass
    text = _topology(_TOPOLOGY)
    return parse_lscpu(text, usable, "/sys topology") if text else _probe_with_psutil()


def _topology(folder: Path) -> str:
    """Write the topology of the online processors as ``lscpu -p=cpu,core,socket`` does."""
    rows = []
    for cpu in folder.glob("cpu[0-9]*"):
        try:
            core, socket = (
                (cpu / "topology" / name).read_text().strip() for name in ("core_id", "physical_package_id")
            )
        except OSError:
            continue
        rows.append(f"{cpu.name.removeprefix('cpu')},{core},{socket}")
    return "\n".join(rows)


def _probe_with_psutil() -> Processor:
    import psutil

    cores = psutil.cpu_count(logical=False)
    if cores:
        return Processor(cores, 1, "psutil", "the number of sockets is unknown; 1 is taken")
    logical = psutil.cpu_count(logical=True)
    if logical:
        return Processor(logical, 1, "psutil", "logical processors: nothing tells the physical cores")
    return Processor(1, 1, "psutil", "nothing tells the number of cores; 1 is taken")


def _columns(line: str, source: str) -> tuple[str, ...]:
    columns = tuple(column.strip() for column in line.split(","))
    if len(columns) not in (2, 3) or not all(re.fullmatch(r"\d{1,9}|-", column) for column in columns):
        raise UsageError(
            f"{source}: {line[:80]!r} is not core,socket or cpu,core,socket; use lscpu -p=cpu,core,socket"
        )
    return columns


def _sysctl(text: str, key: str) -> int | None:
    line = re.search(rf"^{re.escape(key)}: (\d{{1,6}})$", text, re.MULTILINE)
    return int(line[1]) if line else None
