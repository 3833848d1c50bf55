"""How many bytes RAM and devices may take: one function a rule, each physical pool counted once."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_colibri.container.geometry import Geometry
from pytest_colibri.errors import HostMismatch
from pytest_colibri.host.model import Accelerator, Host
from pytest_colibri.planner.plan import DoesNotFit
from pytest_colibri.units import GB, Figure, format_bytes, smallest

POOL_PERCENT = 88
DEVICE_RESERVE_BYTES = 2 * GB


def limit_of(host: Host) -> Figure:
    """Return the physical bound: the smaller of available memory and what the control group leaves."""
    return host.memory.limit


def automatic_ram_budget(limit_bytes: int) -> int:
    """Return what a plan may take of the limit; the rest is the reserve."""
    return limit_bytes * POOL_PERCENT // 100


def explicit_ram_budget(asked_bytes: int, limit_bytes: int) -> int:
    """Keep an explicit RAM budget that fits the limit; any other becomes the automatic one."""
    return asked_bytes if asked_bytes <= limit_bytes else automatic_ram_budget(limit_bytes)


def stated_ram_budget(asked_bytes: int | None, host: Host) -> int:
    """Return the RAM budget where no source gives the available memory: only an explicit one can serve.

    Raises HostMismatch without one, and DoesNotFit above the total memory, which is an upper bound.
    """
    memory = host.memory
    if asked_bytes is None:
        raise HostMismatch(
            f"the available memory is unknown ({memory.limit.source}), and an unknown figure drives no plan; "
            "state the RAM budget explicitly"
        )
    if memory.total.bytes is not None and asked_bytes > memory.total.bytes:
        raise DoesNotFit(
            asked_bytes - memory.total.bytes,
            f"the RAM budget of {format_bytes(asked_bytes)} exceeds the total memory of {memory.total}",
        )
    return asked_bytes


def ram_floor(geometry: Geometry, runtime_bytes: int) -> int:
    """Return the least RAM that a run needs: dense weights, runtime, and one slot in every sparse layer."""
    return geometry.dense_bytes + runtime_bytes + geometry.bytes_per_slot


def refuse_below_floor(budget_bytes: int, geometry: Geometry, runtime_bytes: int, source: str) -> None:
    """Raise DoesNotFit for a RAM budget that cannot hold the least that a run needs."""
    needed = ram_floor(geometry, runtime_bytes)
    if budget_bytes < needed:
        raise DoesNotFit(
            needed - budget_bytes,
            f"dense weights of {format_bytes(geometry.dense_bytes)}, runtime of "
            f"{format_bytes(runtime_bytes)} and one slot per sparse layer of "
            f"{format_bytes(geometry.bytes_per_slot)} need "
            f"{format_bytes(needed)}, and the RAM budget is {format_bytes(budget_bytes)} ({source})",
        )


def shares_ram(accelerator: Accelerator) -> bool:
    """Tell whether the device's bytes must be taken from the RAM; where that is unknown, they must."""
    return accelerator.pool != "discrete"


def device_reserve(accelerator: Accelerator, scratch_bytes: int) -> int:
    """Return what stays free on a device for the scratch of a prompt.

    On unified memory the reserve of the pool serves for the rest.
    """
    return scratch_bytes if accelerator.pool == "unified" else max(DEVICE_RESERVE_BYTES, scratch_bytes)


def usable_on_device(accelerator: Accelerator, reserve_bytes: int, limit: Figure) -> Figure:
    """Return free - reserve, or an unknown figure with the reason.

    A unified device that does not report what is free (``[N/A]``) is bounded by the pool and by its total.
    Nothing is taken from a pool whose limit is unknown.
    """
    if shares_ram(accelerator) and limit.bytes is None:
        return Figure(None, f"the pool that it shares is unknown: {limit.source}")
    free = trusted_free(accelerator)
    if accelerator.free.bytes is None and accelerator.pool == "unified" and limit.bytes is not None:
        pool = Figure(automatic_ram_budget(limit.bytes), f"{POOL_PERCENT} % of the pool, {limit.source}")
        free = smallest(pool, accelerator.total)
    if free.bytes is None:
        return free
    return Figure(max(0, free.bytes - reserve_bytes), f"{free.source}, less the reserve")


def trusted_free(accelerator: Accelerator) -> Figure:
    """Return the free memory of a device, unknown where its source contradicts itself."""
    free, total = accelerator.free, accelerator.total
    if free.bytes is not None and total.bytes is not None and free.bytes > total.bytes:
        return Figure(
            None, f"free {format_bytes(free.bytes)} exceeds total {format_bytes(total.bytes)}, {free.source}"
        )
    return free


def spread(total_bytes: int, bounds: Sequence[int]) -> tuple[int, ...]:
    """Give ``total_bytes`` to the devices in order, so that one device serves where one suffices."""
    shares = []
    for bound in bounds:
        share = min(bound, total_bytes)
        shares.append(share)
        total_bytes -= share
    return tuple(shares)


def split_unified_pool(
    pool_bytes: int,
    floor_bytes: int,
    asked_ram: int | None,
    asked_vram: int | None,
    tier_bytes: int,
    resident_bytes: int,
    scratch: int,
) -> tuple[int, int]:
    """Divide one pool into (RAM budget, VRAM), together with ``scratch`` at most ``pool_bytes``.

    One slot per sparse layer and the ``resident_bytes`` that the user puts on the device come first, then the
    GPU tier of at most ``tier_bytes``, then the rest of the RAM cache. An explicit RAM budget comes before a
    tier that nobody asked for. Raises DoesNotFit where the pool cannot hold what comes first.
    """
    if resident_bytes:
        needed = floor_bytes + resident_bytes + scratch
        if needed > pool_bytes:
            raise DoesNotFit(
                needed - pool_bytes,
                f"{format_bytes(resident_bytes)} beside experts on a device that shares the RAM, its "
                f"scratch of {format_bytes(scratch)} and the least RAM of {format_bytes(floor_bytes)} exceed "
                f"the pool of {format_bytes(pool_bytes)}",
            )
        pool_bytes, scratch = pool_bytes - resident_bytes - scratch, 0
    first = floor_bytes
    if asked_ram is not None and asked_vram is None:
        first = min(max(asked_ram, floor_bytes), pool_bytes)
    tier = max(0, min(tier_bytes, pool_bytes - first - scratch))
    ram = max(first, pool_bytes - scratch - tier)
    return (ram if asked_ram is None else min(asked_ram, ram)), resident_bytes + tier


def clamp_warning(what: str, asked_bytes: int | None, granted_bytes: int, because: str) -> tuple[str, ...]:
    """Return the line for an explicit budget that could not be kept; it names both figures."""
    if asked_bytes is None or asked_bytes == granted_bytes:
        return ()
    asked, granted = (f"{format_bytes(count)} ({count} B)" for count in (asked_bytes, granted_bytes))
    return (f"{what} budget clamped from {asked} to {granted}: {because}",)
