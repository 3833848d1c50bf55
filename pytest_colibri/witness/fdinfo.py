"""Engine time and memory that Linux graphics drivers tell of each of their clients, in ``/proc/PID/fdinfo``.

The format is https://docs.kernel.org/gpu/drm-usage-stats.html. A client is one opening of a device; several
descriptors and processes may share it. Its counters only grow, and are gone when it is closed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pytest_colibri.errors import Unavailable
from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.host.tools import printable
from pytest_colibri.units import KIB, MIB
from pytest_colibri.witness.evidence import DeviceUse, EngineUse, ProcessAccount, Reach

MAX_FILE_BYTES = 64 * KIB
MAX_CLIENTS = 1024
MAX_COUNT = 2**64 - 1

_KEY = re.compile(r"(drm-[A-Za-z0-9_.-]{1,60}):[ \t]*(.{0,80}?)[ \t]*")
_COUNT = re.compile(r"([0-9]{1,20})(?:[ \t]+([A-Za-z]{1,4}))?")
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SCALES = {"": 1, "KiB": KIB, "MiB": MIB}
_DEVICES, _ROCM = "/dev/dri/", "/dev/kfd"


@dataclass(frozen=True)
class _Driver:
    """What the engine classes of a driver mean. ``computes`` names those that get compute work;
    ``omits_idle`` says that a class that never worked is left out; ``switch`` is the bit of the driver's
    ``profiling`` file without which it measures no time, 0 where it always does."""

    computes: frozenset[str]
    omits_idle: bool = False
    switch: int = 0


_DRIVERS: Mapping[str, _Driver] = {
    "i915": _Driver(frozenset({"render", "compute"})),
    "xe": _Driver(frozenset({"rcs", "ccs"})),
    "amdgpu": _Driver(frozenset({"gfx", "compute"}), omits_idle=True),
    "msm": _Driver(frozenset({"gpu"})),
    "panfrost": _Driver(frozenset({"vertex-tiler"}), switch=1),
    "panthor": _Driver(frozenset({"panthor"}), switch=2),
    "v3d": _Driver(frozenset({"csd"})),
}
_UNKNOWN_DRIVER = _Driver(frozenset())


@dataclass(frozen=True)
class DrmClient:
    """What one fdinfo file tells of a client. ``busy_ns`` and the cycles are by engine class, of which
    ``total_cycles`` passed on the clock of the engine; ``resident_bytes`` is by memory region."""

    driver: str
    pci: str | None
    number: int
    busy_ns: Mapping[str, int]
    cycles: Mapping[str, int]
    total_cycles: Mapping[str, int]
    resident_bytes: Mapping[str, int]


def parse_fdinfo(text: str) -> DrmClient | None:
    """Return the client of one fdinfo file, None where the descriptor is none of a graphics driver.

    Keys that are unknown, and values of another form or unit than documented, are left out: they are
    unmeasured, not zero. So is a last line without its end.
    """
    lines = text[: text.rfind("\n") + 1].splitlines()
    told = {match[1]: match[2] for line in lines if (match := _KEY.fullmatch(line))}
    driver, number = told.get("drm-driver"), _count(told.get("drm-client-id", ""), {"": 1})
    if not driver or number is None:
        return None
    pci = told.get("drm-pdev", "").lower()
    return DrmClient(
        driver=printable(driver, 32),
        pci=pci if _PCI.fullmatch(pci) else None,
        number=number,
        busy_ns=_family(told, "drm-engine-", {"ns": 1}),
        cycles=_family(told, "drm-cycles-", {"": 1}),
        total_cycles=_family(told, "drm-total-cycles-", {"": 1}),
        # Older kernels know only the second name; where both stand they mean the same.
        resident_bytes=_family(told, "drm-memory-", _SCALES) | _family(told, "drm-resident-", _SCALES),
    )


def _family(told: Mapping[str, str], prefix: str, scales: Mapping[str, int]) -> dict[str, int]:
    counts = ((key, _count(value, scales)) for key, value in told.items() if key.startswith(prefix))
    return {key.removeprefix(prefix): count for key, count in counts if count is not None}


def _count(text: str, scales: Mapping[str, int]) -> int | None:
    match = _COUNT.fullmatch(text)
    scale = scales.get(match[2] or "") if match else None
    if match is None or scale is None or int(match[1]) > MAX_COUNT:
        return None
    return int(match[1]) * scale


class FdinfoWitness:
    """Engine time of the processes of a run on Linux, by device, from ``proc`` and the nodes in ``nodes``;
    ``drivers`` is where the kernel keeps the settings of drivers for devices without PCI."""

    name = "DRM fdinfo"
    interval_s = 0.025
    lag_us = 0
    unseen_percent = 0

    def __init__(
        self,
        proc: Path = Path("/proc"),
        nodes: Path = Path("/dev/dri"),
        drivers: Path = Path("/sys/bus/platform/drivers"),
    ) -> None:
        self._proc = proc
        self._nodes = nodes
        self._drivers = drivers

    def reach(self) -> Reach:
        """Open each render node, and look at what its driver tells of this process then."""
        if sys.platform != "linux":
            return Reach(self.name, False, "only Linux has it")
        nodes = sorted(self._nodes.glob("renderD*"))
        if not nodes:
            reason = "no device of a graphics driver of the kernel is here (/dev/dri/renderD*)"
            return Reach(self.name, False, f"{reason}; in a container, pass it with --device=/dev/dri")
        seen, unseen = [], []
        for node in nodes:
            try:
                seen.append(self._told_of(node))
            except Unavailable as error:
                unseen.append(str(error))
        if not seen:
            return Reach(self.name, False, "; ".join(unseen))
        statement = f"reads engine time and memory of the engine's processes on {', '.join(seen)}"
        return Reach(self.name, True, "; ".join([statement, *unseen]))

    def session(self) -> AbstractContextManager[FdinfoSession]:
        """Start to add up the clients of one run."""
        return nullcontext(FdinfoSession(self._proc, self._drivers))

    def _told_of(self, node: Path) -> str:
        try:
            descriptor = os.open(node, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"{node.name}: {error.strerror}; {_advice(error)}") from None
        try:
            client = parse_fdinfo(_read(self._proc / "self" / "fdinfo" / str(descriptor)))
        except OSError as error:
            raise Unavailable(f"{node.name}: {self._proc} cannot be read: {error.strerror}") from None
        finally:
            os.close(descriptor)
        if client is None:
            raise Unavailable(f"{node.name}: its driver tells nothing of its clients")
        return self._described(client)

    def _described(self, client: DrmClient) -> str:
        driver = _DRIVERS.get(client.driver, _UNKNOWN_DRIVER)
        name = f"{client.pci or 'a device without PCI address'} ({client.driver})"
        if _is_switched_off(client.driver, self._drivers):
            raise Unavailable(f"{name}: {_switch_advice(client.driver, self._drivers)}")
        if not driver.omits_idle and not driver.computes & (client.busy_ns.keys() | client.cycles.keys()):
            raise Unavailable(f"{name}: tells no time of an engine that computes")
        return f"{name}, but not of work through ROCm" if driver.omits_idle else name


@dataclass
class _Client:
    """The largest counts that were seen of a client, and the latest look at it."""

    counts: DrmClient
    busy_ns: dict[str, int] = field(default_factory=dict)
    cycles: dict[str, int] = field(default_factory=dict)
    is_open: bool = True

    def update(self, counts: DrmClient) -> None:
        """Take a newer look at it. A count may fall behind for a while; then the larger one stays."""
        self.counts, self.is_open = counts, True
        for kept, told in ((self.busy_ns, counts.busy_ns), (self.cycles, counts.cycles)):
            for engine, count in told.items():
                kept[engine] = max(count, kept.get(engine, 0))


@dataclass
class _CycleClock:
    """Turns the cycles of one engine class into time, once its own clock was read twice."""

    first_us: int
    first_cycles: int
    latest_us: int
    latest_cycles: int
    counted_cycles: int = 0
    busy_ns: float | None = None

    def add(self, cycles: int) -> None:
        """Add what ``cycles`` has more than was added before. What did not grow adds exactly nothing."""
        passed = self.latest_cycles - self.first_cycles
        if passed > 0:
            ns_per_cycle = (self.latest_us - self.first_us) * 1000 / passed
            self.busy_ns = (self.busy_ns or 0.0) + (cycles - self.counted_cycles) * ns_per_cycle
            self.counted_cycles = cycles


class FdinfoSession:
    """Adds up the clients of one run, each once however many descriptors and processes share it."""

    def __init__(self, proc: Path, drivers: Path) -> None:
        self._proc = proc
        self._drivers = drivers
        self._clients: dict[tuple[str, int], _Client] = {}
        self._clocks: dict[tuple[str, str], _CycleClock] = {}
        self._devices: dict[str, int] = {}
        self._has_rocm = False
        self._has_all = True
        self._notes: dict[str, None] = {}

    def notes(self) -> tuple[str, ...]:
        """Return what could not be read, or is not what it seems."""
        return tuple(self._notes)

    def accounts(self) -> tuple[ProcessAccount, ...]:
        """Return nothing: these drivers keep no accounts of processes that have ended."""
        return ()

    def read(self, pids: Iterable[int], at_us: int) -> tuple[DeviceUse, ...]:
        """Look at every client that the processes hold open. Raises Unavailable when one may not be read."""
        for client in self._clients.values():
            client.is_open = False
        for pid in pids:
            for counts in self._clients_of(pid):
                self._take(counts, at_us)
        return tuple(
            self._device_use(device, [client for (of, _), client in self._clients.items() if of == device])
            for device in self._devices
        )

    def _clients_of(self, pid: int) -> list[DrmClient]:
        """Return the clients of a process, once for each descriptor; of an ended one those read before."""
        folder, found = self._proc / str(pid), list[DrmClient | None]()
        try:
            for descriptor in self._descriptors(folder / "fd"):
                with suppress(FileNotFoundError):
                    found.append(parse_fdinfo(_read(folder / "fdinfo" / descriptor)))
        except OSError as error:
            if not _has_ended(folder):
                raise Unavailable(f"a process of the run may not be looked at: {error.strerror}") from None
        return [client for client in found if client is not None]

    def _descriptors(self, folder: Path) -> Iterator[str]:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    target = os.readlink(entry.path)  # noqa: PTH115 - a Path costs more than the call
                    self._has_rocm |= target == _ROCM
                    if target.startswith(_DEVICES):
                        yield entry.name

    def _take(self, counts: DrmClient, at_us: int) -> None:
        device = counts.pci or counts.driver
        key = (device, counts.number)
        if key not in self._clients and len(self._clients) >= MAX_CLIENTS:
            self._notes[f"more than {MAX_CLIENTS} clients: those that came later are not counted"] = None
            self._has_all = False
            return
        self._devices.setdefault(device, len(self._devices))
        self._clients.setdefault(key, _Client(counts)).update(counts)
        for engine, total in counts.total_cycles.items():
            clock = self._clocks.setdefault((device, engine), _CycleClock(at_us, total, at_us, total))
            if total > clock.latest_cycles:
                clock.latest_us, clock.latest_cycles = at_us, total

    def _device_use(self, device: str, clients: list[_Client]) -> DeviceUse:
        first = clients[0].counts
        still_open = [client for client in clients if client.is_open]
        told = [client.counts.resident_bytes for client in still_open if client.counts.resident_bytes]
        return DeviceUse(
            device=DeviceIdentity("drm", self._devices[device], first.driver, pci=first.pci),
            driver=first.driver,
            engines=tuple(self._engine_uses(device, first.driver, clients)),
            resident_bytes=sum(sum(regions.values()) for regions in told) if told or not still_open else None,
            ended_clients=len(clients) - len(still_open),
        )

    def _engine_uses(self, device: str, name: str, clients: list[_Client]) -> Iterator[EngineUse]:
        driver = _DRIVERS.get(name, _UNKNOWN_DRIVER)
        engines = {engine for client in clients for engine in (*client.busy_ns, *client.cycles)}
        measured = not _is_switched_off(name, self._drivers)
        if not measured:
            self._notes[f"{name}: {_switch_advice(name, self._drivers)}"] = None
        by_rocm = driver.omits_idle and self._has_rocm
        if by_rocm:
            self._notes[f"{name}: what the run does through ROCm ({_ROCM}) is in no counter"] = None
        for engine in sorted(engines | (driver.computes if driver.omits_idle else frozenset())):
            yield EngineUse(
                engine=engine,
                compute=engine in driver.computes,
                busy_ns=self._busy_ns(device, engine, clients, driver) if measured else None,
                bounded=self._has_all and not by_rocm,
            )

    def _busy_ns(self, device: str, engine: str, clients: list[_Client], driver: _Driver) -> int | None:
        told = [client.busy_ns[engine] for client in clients if engine in client.busy_ns]
        if told or driver.omits_idle:
            return sum(told)
        clock = self._clocks.get((device, engine))
        if clock is None:
            return None
        clock.add(sum(client.cycles.get(engine, 0) for client in clients))
        return None if clock.busy_ns is None else int(clock.busy_ns)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES).decode("ascii", "replace")


def _has_ended(folder: Path) -> bool:
    """Tell whether only the exit status of a process is left, which others may not look into."""
    try:
        state = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2]
    except OSError:
        return True
    return state.startswith(("Z", "X"))


def _is_switched_off(driver: str, drivers: Path) -> bool:
    """Tell whether the driver is set not to measure time; one without the setting always does."""
    bit = _DRIVERS.get(driver, _UNKNOWN_DRIVER).switch
    states = []
    for file in drivers.glob(f"{driver}/*.gpu/profiling") if bit else ():
        with suppress(OSError, ValueError):
            states.append(int(file.read_text(encoding="utf-8")) & bit)
    return bool(states) and not all(states)


def _switch_advice(driver: str, drivers: Path) -> str:
    bits = 3 if _DRIVERS[driver].switch == 2 else 1
    return f"it measures no time by default: echo {bits} | sudo tee {drivers}/{driver}/*.gpu/profiling"


def _advice(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "join the group that owns it, mostly render or video"
    return "its driver may not be loaded"
