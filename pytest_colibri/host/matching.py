"""Hold a profile against a host: does it fit, with which devices, and which profile fits best."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import get_args

from pytest_colibri.errors import HostMismatch
from pytest_colibri.host.devices import device_rank, physical_devices
from pytest_colibri.host.model import Accelerator, Host
from pytest_colibri.profiles.model import Backend, DeviceMatch, DeviceType, Profile

_API_NAMES = {"vulkan": "Vulkan", "cuda": "CUDA", "rocm": "ROCm", "metal": "Metal"}


def mismatches(profile: Profile, host: Host) -> tuple[str, ...]:
    """Return a sentence for each need of the profile that the host does not meet; none means that it fits."""
    return tuple(
        f"the profile {profile.name} needs {need}; this host {has}" for need, has in _unmet(profile, host)
    )


def matching_accelerators(profile: Profile, host: Host) -> tuple[Accelerator, ...]:
    """Return the devices of the host that fit the profile, the best first.

    Discrete comes before integrated whatever the size, then the larger; an unknown size ranks last. A device
    that two drivers show is returned once, with the smallest figures that any interface gives of its memory.
    """
    match = profile.match.device
    if match is None:
        return ()
    devices = physical_devices(host.accelerators)
    fitting = [(device, [view for view in device.views if _fits(profile, match, view)]) for device in devices]
    return tuple(
        replace(views[0], total=device.total, free=device.free) for device, views in fitting if views
    )


def best_profile(
    profiles: Sequence[Profile], host: Host, backends: Container[Backend] | None = None
) -> tuple[Profile, str]:
    """Choose the profile that fits the host best; say why, and why the others were passed over.

    Profiles that are taken by name only are none of them.

    A GPU comes before a software device, that before none; discrete before integrated; one of ``backends``,
    those that the engine under test computes on, before another (None: all alike); then the profile that asks
    for more. Raises HostMismatch when none fits.
    """
    profiles = [profile for profile in profiles if profile.auto]
    fitting = [profile for profile in profiles if not _unmet(profile, host)]
    if not fitting:
        reasons = [sentence for profile in profiles for sentence in mismatches(profile, host)]
        raise HostMismatch("\n".join(["no profile fits this host", *reasons]))
    best = min(fitting, key=lambda profile: _profile_rank(profile, host, backends))
    devices = matching_accelerators(best, host)
    reason = f"the profile {best.name} was chosen: {_what_fits(devices)}"
    others = [
        f"{other.name} ({_reason_against(other, best, host, backends)})"
        for other in profiles
        if other is not best
    ]
    return best, f"{reason}; passed over: {', '.join(others)}" if others else reason


def _unmet(profile: Profile, host: Host) -> list[tuple[str, str]]:
    """Return each unmet need, and what the host has instead."""
    match, unmet = profile.match, []
    if match.systems and host.system not in match.systems:
        unmet.append((f"the system {_either(match.systems)}", f"runs {host.system}"))
    if match.architectures and host.architecture not in match.architectures:
        unmet.append((f"the architecture {_either(match.architectures)}", f"has {host.architecture}"))
    if match.device is not None and not matching_accelerators(profile, host):
        unmet.append((_needed_device(profile, match.device), _devices_of(host, profile.backend)))
    return unmet


def _fits(profile: Profile, match: DeviceMatch, device: Accelerator) -> bool:
    return (
        device.identity.api == profile.backend
        and (not match.vendors or device.vendor in match.vendors)
        and (not match.types or device.type in match.types)
        and (not match.names or _matches_any(device.identity.name, match.names))
        and (not match.drivers or _matches_any(device.driver, match.drivers))
        and (profile.pool is None or device.pool in (None, profile.pool))
    )


def _matches_any(text: str, patterns: Sequence[str]) -> bool:
    # Names of devices hold brackets, which stand for themselves.
    literal = (pattern.lower().replace("[", "[[]") for pattern in patterns)
    return any(fnmatchcase(text.lower(), pattern) for pattern in literal)


def _needed_device(profile: Profile, match: DeviceMatch) -> str:
    wanted = {"vendor": match.vendors, "type": match.types, "name": match.names, "driver": match.drivers}
    needs = [f"{what} {_either(allowed)}" for what, allowed in wanted.items() if allowed]
    if profile.pool is not None:
        needs.append(f"{profile.pool} memory")
    return f"a {_API_NAMES[profile.backend]} device of {' and '.join(needs)}"


def _devices_of(host: Host, api: str) -> str:
    """Say which devices the host has under the interface; without one, which under others, and why."""
    devices = [device.describe() for device in host.accelerators if device.identity.api == api]
    if devices:
        return f"has {', '.join(devices)}"
    others = [device.describe() for device in host.accelerators]
    instead = f", only {', '.join(others)}" if others else ""
    reasons = [note for note in host.notes if note.startswith(_API_NAMES[api])]
    return f"has no {_API_NAMES[api]} device{instead}" + (f" ({'; '.join(reasons)})" if reasons else "")


def _profile_rank(profile: Profile, host: Host, backends: Container[Backend] | None) -> tuple[int, bool, int]:
    devices = matching_accelerators(profile, host)
    type_rank = device_rank(devices[0])[0] if devices else len(get_args(DeviceType))
    foreign = backends is not None and profile.backend not in backends
    return type_rank, foreign, -_constraint_count(profile)


def _what_fits(devices: Sequence[Accelerator]) -> str:
    return f"{devices[0].describe()} fits it" if devices else "it needs no device"


def _constraint_count(profile: Profile) -> int:
    match, device = profile.match, profile.match.device or DeviceMatch()
    constraints = (
        match.systems, match.architectures,
        device.vendors, device.types, device.names, device.drivers, profile.pool,
    )  # fmt: skip
    return sum(bool(constraint) for constraint in constraints)


def _reason_against(profile: Profile, best: Profile, host: Host, backends: Container[Backend] | None) -> str:
    if unmet := _unmet(profile, host):
        return f"needs {unmet[0][0]}"
    rank, best_rank = _profile_rank(profile, host, backends), _profile_rank(best, host, backends)
    if rank[0] != best_rank[0]:
        devices = matching_accelerators(profile, host)
        return f"fits, but with {devices[0].describe() if devices else 'no device'}"
    if rank[1] != best_rank[1]:
        return f"fits, but the engine does not compute on {_API_NAMES[profile.backend]}"
    return "fits, but is no more specific"


def _either(allowed: Sequence[str]) -> str:
    return " or ".join(allowed)
