"""What NVIDIA's driver tells of each process through NVML: its share of the GPU's time, memory, accounts.

NVML gives the process identifiers of the machine, also within a container, where they mean other processes
(https://github.com/NVIDIA/nvidia-docker/issues/1483). There it is not used at all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_colibri.errors import Unavailable
from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.host.nvidia import is_sliced, nvml_identity, nvml_library
from pytest_colibri.witness.evidence import DeviceUse, EngineUse, ProcessAccount, Reach

ENGINE = "sm"

# The longest period over which a driver averages, as documented with nvmlUtilization_t.
LONGEST_PERIOD_US = 1_000_000

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"


class NvmlWitness:
    """The share of the time of each NVIDIA GPU that the processes of a run had; ``proc`` tells whether their
    identifiers are those of the machine."""

    name = "NVML"
    interval_s = 0.1
    lag_us = LONGEST_PERIOD_US
    unseen_percent = 1

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def reach(self) -> Reach:
        """Ask every device for the shares of its processes."""
        try:
            with nvml_library() as nvml:
                self._check_namespace()
                return self._reach_of(nvml)
        except Unavailable as error:
            return Reach(self.name, False, str(error).removeprefix("NVML: "))

    @contextmanager
    def session(self) -> Iterator[NvmlSession]:
        """Hold NVML open for one run. Raises Unavailable where it cannot tell the processes of the run."""
        with nvml_library() as nvml:
            self._check_namespace()
            yield NvmlSession(nvml, [device for device in _devices(nvml) if device.obstacle is None])

    def _reach_of(self, nvml: Any) -> Reach:
        devices = _devices(nvml)
        seen = ", ".join(device.name for device in devices if device.obstacle is None)
        unseen = [f"{device.name}: {device.obstacle}" for device in devices if device.obstacle is not None]
        if not seen:
            return Reach(self.name, False, "; ".join(unseen) or "the driver shows no device")
        statement = f"reads the engine's share of the time of {seen}, in percent of up to a second"
        return Reach(self.name, True, "; ".join([statement, *unseen]))

    def _check_namespace(self) -> None:
        if sys.platform != "linux":
            return
        try:
            namespace = str((self._proc / "self" / "ns" / "pid").readlink())
        except OSError as error:
            raise Unavailable(f"whose process identifiers NVML gives is unknown: {error.strerror}") from None
        if namespace != _INITIAL_PID_NAMESPACE:
            raise Unavailable(
                "NVML gives process identifiers of the machine, and here is a container with its own: "
                "start it with --pid=host, or run outside"
            )


@dataclass
class _Device:
    """One GPU, why its processes cannot be told, and what was counted of it so far."""

    handle: Any
    identity: DeviceIdentity
    obstacle: str | None
    last_seen_us: int
    busy_ns: int = 0
    is_bounded: bool = True

    @property
    def name(self) -> str:
        """Its name and address, for a person."""
        return f"{self.identity.name} ({self.identity.pci or 'no PCI address'})"


def _devices(nvml: Any) -> list[_Device]:
    return [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _device(nvml: Any, index: int) -> _Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    identity = nvml_identity(nvml, handle, index)
    if is_sliced(nvml, handle):
        return _Device(handle, identity, "MIG is enabled: no process has a share of the whole", 0)
    try:
        shares = _shares(nvml, handle, 0)
    except nvml.NVMLError as error:
        return _Device(handle, identity, f"the driver tells no shares of processes: {error}", 0)
    return _Device(handle, identity, None, max((share.timeStamp for share in shares), default=0))


def _shares(nvml: Any, handle: Any, since_us: int) -> list[Any]:
    """Return the driver's samples of processes after ``since_us`` of its own clock, one for each at most."""
    try:
        return list(nvml.nvmlDeviceGetProcessUtilization(handle, since_us))
    except nvml.NVMLError as error:
        # Success means no sample too: the binding takes it for a failure to tell their number.
        if error.value in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND):
            return []
        raise


@dataclass
class NvmlSession:
    """Adds up the shares of one run. A share is a percentage of the time since the driver's sample before, so
    that the busy time is an estimate."""

    nvml: Any
    devices: list[_Device]
    _ours: set[int] = field(default_factory=set)
    _began_us: int | None = None
    _notes: dict[str, None] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        """Return what could not be read, or is not what it seems."""
        return ("busy time is estimated from percentages", *self._notes)

    def read(self, pids: Iterable[int], at_us: int) -> tuple[DeviceUse, ...]:
        """Look at every device. Raises Unavailable when the driver fails."""
        now = set(pids)
        self._ours |= now
        self._began_us = at_us if self._began_us is None else self._began_us
        return tuple(self._use(device, now, at_us - self._began_us) for device in self.devices)

    def accounts(self) -> tuple[ProcessAccount, ...]:
        """Return the accounts of the processes of the run, on devices where accounting is on."""
        return tuple(
            account
            for device in self.devices
            if self._keeps_accounts(device)
            for pid in sorted(self._ours)
            if (account := self._account(device, pid)) is not None
        )

    def _use(self, device: _Device, running: set[int], elapsed_us: int) -> DeviceUse:
        try:
            self._add_shares(device, elapsed_us)
        except self.nvml.NVMLError as error:
            raise Unavailable(f"{device.name}: {error}") from None
        return DeviceUse(
            device=device.identity,
            driver="nvidia",
            engines=(EngineUse(ENGINE, True, device.busy_ns, device.is_bounded),),
            resident_bytes=self._resident_bytes(device),
            ended_clients=len(self._ours - running),
        )

    def _add_shares(self, device: _Device, elapsed_us: int) -> None:
        shares = _shares(self.nvml, device.handle, device.last_seen_us)
        latest = {share.pid: share for share in sorted(shares, key=lambda share: int(share.timeStamp))}
        for share in latest.values():
            if share.pid in self._ours and share.timeStamp > device.last_seen_us:
                self._add_share(device, share, elapsed_us)
        device.last_seen_us = max([device.last_seen_us, *(share.timeStamp for share in latest.values())])

    def _add_share(self, device: _Device, share: Any, elapsed_us: int) -> None:
        if share.smUtil > 100:
            device.is_bounded = False
            self._notes[f"{device.name}: a share of {share.smUtil} % was refused"] = None
            return
        period_us = min(share.timeStamp - device.last_seen_us, LONGEST_PERIOD_US, elapsed_us)
        device.busy_ns += period_us * 10 * share.smUtil

    def _resident_bytes(self, device: _Device) -> int | None:
        try:
            processes = self.nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)
        except self.nvml.NVMLError:
            return None
        held = [process.usedGpuMemory for process in processes if process.pid in self._ours]
        return None if None in held else sum(held)

    def _keeps_accounts(self, device: _Device) -> bool:
        try:
            return bool(
                self.nvml.nvmlDeviceGetAccountingMode(device.handle) == self.nvml.NVML_FEATURE_ENABLED
            )
        except self.nvml.NVMLError:
            return False

    def _account(self, device: _Device, pid: int) -> ProcessAccount | None:
        try:
            stats = self.nvml.nvmlDeviceGetAccountingStats(device.handle, pid)
        except (self.nvml.NVMLError, TypeError):  # the binding trips over a peak that is not available
            return None
        return ProcessAccount(
            device=device.identity,
            pid=pid,
            busy_percent=stats.gpuUtilization if stats.gpuUtilization <= 100 else None,
            open_ms=stats.time,
            peak_bytes=stats.maxMemoryUsage,
        )
