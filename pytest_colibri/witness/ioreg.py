"""GPU time of each process on macOS, as the drivers of Apple and Intel GPUs keep it in the I/O Registry.

It is read as the property list that ``ioreg -a -l -r -c IOAccelerator`` prints. Each user of a GPU is an
entry below that GPU, with ``IOUserClientCreator`` ("pid 533, name") and ``accumulatedGPUTime`` in
nanoseconds: on the entry itself (Intel), or for each interface in its ``AppUsage`` (Apple). Apple documents
none of these keys.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.host.tools import bounded, printable, run_tool
from pytest_colibri.witness.evidence import DeviceUse, EngineUse, ProcessAccount, Reach

ENGINE = "gpu"
MAX_ENTRIES = 100_000
MAX_TIME_NS = 2**63 - 1

_COMMAND = ("ioreg", "-a", "-l", "-r", "-c", "IOAccelerator")
_CREATOR = re.compile(r"pid ([0-9]{1,10})(?:,.*)?", re.DOTALL)


@dataclass(frozen=True)
class AppleClient:
    """One user of a GPU: which GPU, the number of its registry entry, its process, and its time so far."""

    gpu: DeviceIdentity
    entry: int
    pid: int
    busy_ns: int


def parse_ioreg(text: str) -> tuple[AppleClient, ...]:
    """Return the users of all GPUs in the property list. Raises UsageError for any other text.

    An entry without a process or a time that can be read is left out: it is unmeasured, not idle.
    """
    import plistlib
    from xml.parsers.expat import ExpatError

    try:
        roots = plistlib.loads(bounded(text, "ioreg").encode(), fmt=plistlib.FMT_XML)
    except (ExpatError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise UsageError("ioreg: not the property list of ioreg -a") from error
    if not isinstance(roots, list) or not all(isinstance(root, dict) for root in roots):
        raise UsageError("ioreg: not a list of registry entries")
    return tuple(client for index, root in enumerate(roots) for client in _clients(index, root))


def _clients(index: int, root: dict[str, object]) -> Iterator[AppleClient]:
    gpu = DeviceIdentity("metal", index, printable(str(root.get("IORegistryEntryName", "GPU")), 64))
    waiting: list[object] = [root]
    for _ in range(MAX_ENTRIES):
        if not waiting:
            return
        entry = waiting.pop()
        if not isinstance(entry, dict):
            continue
        children = entry.get("IORegistryEntryChildren")
        waiting += children if isinstance(children, list) else []
        pid, busy_ns, number = _creator(entry), _time(entry), entry.get("IORegistryEntryID")
        if pid is not None and busy_ns is not None and isinstance(number, int):
            yield AppleClient(gpu, number, pid, busy_ns)
    raise UsageError(f"ioreg: more than {MAX_ENTRIES} registry entries")


def _creator(entry: dict[str, object]) -> int | None:
    match = _CREATOR.fullmatch(str(entry.get("IOUserClientCreator", "")))
    return int(match[1]) if match else None


def _time(entry: dict[str, object]) -> int | None:
    """Return the time of an entry: its own, or the sum over the interfaces that its process uses."""
    own = _nanoseconds(entry)
    uses = entry.get("AppUsage")
    if own is not None or not isinstance(uses, list):
        return own
    times = [_nanoseconds(use) for use in uses if isinstance(use, dict)]
    told = [time for time in times if time is not None]
    return sum(told) if told else None


def _nanoseconds(values: dict[str, object]) -> int | None:
    time = values.get("accumulatedGPUTime")
    is_count = isinstance(time, int) and not isinstance(time, bool)
    return time if is_count and isinstance(time, int) and 0 <= time <= MAX_TIME_NS else None


class IoregWitness:
    """GPU time of the processes of a run on macOS; it needs no rights."""

    name = "ioreg"
    interval_s = 0.5  # the tool starts anew for each look
    lag_us = 0
    unseen_percent = 0

    def reach(self) -> Reach:
        """Read the registry once."""
        try:
            clients = _read()
        except Unavailable as error:
            return Reach(self.name, False, str(error))
        gpus = sorted({client.gpu.name for client in clients})
        if not gpus:
            return Reach(self.name, False, "the registry names no user of a GPU with its time")
        return Reach(self.name, True, f"reads GPU time of the engine's processes on {', '.join(gpus)}")

    def session(self) -> AbstractContextManager[IoregSession]:
        """Start to add up the users of one run."""
        return nullcontext(IoregSession())


class IoregSession:
    """Adds up the users of one run; one that has gone keeps the time that it had at the last look."""

    def __init__(self) -> None:
        self._busy_ns: dict[tuple[DeviceIdentity, int], int] = {}

    def notes(self) -> tuple[str, ...]:
        """Return nothing: a look either shows all users or fails."""
        return ()

    def accounts(self) -> tuple[ProcessAccount, ...]:
        """Return nothing: the registry forgets those that have ended."""
        return ()

    def read(self, pids: Iterable[int], at_us: int) -> tuple[DeviceUse, ...]:  # noqa: ARG002
        """Look at all users of GPUs. Raises Unavailable when the registry cannot be read."""
        return self.take(_read(), pids)

    def take(self, clients: Iterable[AppleClient], pids: Iterable[int]) -> tuple[DeviceUse, ...]:
        """Add what the clients of these processes have had, and return the sums by GPU."""
        ours = set(pids)
        now_open = {(client.gpu, client.entry): client for client in clients if client.pid in ours}
        for key, client in now_open.items():
            self._busy_ns[key] = max(client.busy_ns, self._busy_ns.get(key, 0))
        gpus = dict.fromkeys(gpu for gpu, _ in self._busy_ns)
        return tuple(self._use(gpu, now_open.keys()) for gpu in gpus)

    def _use(self, gpu: DeviceIdentity, now_open: Iterable[tuple[DeviceIdentity, int]]) -> DeviceUse:
        ours = {key: busy_ns for key, busy_ns in self._busy_ns.items() if key[0] == gpu}
        return DeviceUse(
            device=gpu,
            driver="IOAccelerator",
            engines=(EngineUse(ENGINE, True, sum(ours.values())),),
            resident_bytes=None,
            ended_clients=len(ours.keys() - now_open),
        )


def _read() -> tuple[AppleClient, ...]:
    if sys.platform != "darwin":
        raise Unavailable("only macOS has it")
    output = run_tool(_COMMAND)
    if output.status != 0:
        raise Unavailable(f"ioreg ended with status {output.status}: {printable(output.errors)}")
    try:
        return parse_ioreg(output.text)
    except UsageError as error:
        raise Unavailable(str(error)) from None
