"""Find profiles by name or path, and load them from their YAML form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.profiles.model import DeviceMatch, HostMatch, Profile, Recording
from pytest_colibri.profiles.validation import Violation, nearest, violations
from pytest_colibri.profiles.yaml import Document, read_document, read_text

RECORDING_LIMIT_BYTES = 4 * 2**20


def profiles_directory() -> Path:
    """Return the folder of the shipped profiles: inside the package, or beside it in a checkout.

    Raises Unavailable when neither exists, which a complete installation never sees.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "_profiles", package.parent / "hardware_profiles"):
        if folder.is_dir():
            return folder
    raise Unavailable(f"{package} was installed without its hardware profiles; install pytest-colibri again")


def profile_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles in alphabetical order."""
    return tuple(sorted(path.stem for path in profiles_directory().glob("*.yaml")))


def all_profiles() -> tuple[Profile, ...]:
    """Return every shipped profile, by name."""
    return tuple(find_profile(name) for name in profile_names())


def find_profile(name_or_path: str) -> Profile:
    """Load a shipped profile by its name, or a user's own by a path (with a separator, or to a YAML file).

    Raises UsageError: an unknown name with the nearest and all known ones, a bad file with the place.
    """
    if "/" in name_or_path or "\\" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return load_profile(Path(name_or_path))
    known = profile_names()
    if name_or_path not in known:
        raise UsageError(
            f"unknown profile {name_or_path!r}{nearest(name_or_path, known)}; allowed: {', '.join(known)},"
            " or the path of a YAML file of your own"
        )
    return load_profile(profiles_directory() / f"{name_or_path}.yaml")


def load_profile(path: Path) -> Profile:
    """Load the profile in ``path`` with its recordings.

    Raises UsageError with one line, ``FILE:LINE:COLUMN: what; allowed: ...``, for each violation.
    """
    document = read_document(path)
    files, unreadable = _recorded_files(document)
    if found := violations(document, unreadable):
        raise UsageError("\n".join(found))
    value: Any = document.value
    return Profile(
        name=value["name"],
        title=value["title"],
        backend=value["backend"],
        match=_host_match(value["match"]),
        pool=None if value.get("pool") == "either" else value.get("pool"),
        tiers=tuple(value["tiers"]),
        environment=MappingProxyType(dict(value.get("environment", {}))),
        recordings=tuple(_recording(document, index, files) for index in range(len(value["recordings"]))),
        path=path,
        auto=value.get("auto", True),
    )


def _host_match(match: Mapping[str, Any]) -> HostMatch:
    device = match.get("device")
    return HostMatch(
        systems=tuple(match.get("system", ())),
        architectures=tuple(match.get("architecture", ())),
        device=None
        if device is None
        else DeviceMatch(
            vendors=tuple(device.get("vendor", ())),
            types=tuple(device.get("type", ())),
            names=tuple(device.get("name", ())),
            drivers=tuple(device.get("driver", ())),
        ),
    )


def _recording(document: Document, index: int, files: Mapping[int, str]) -> Recording:
    value: Any = document.value
    recording = value["recordings"][index]
    mark = document.value_marks[("recordings", index, "file" if "file" in recording else "text")]
    return Recording(
        tool=recording["tool"],
        provenance=recording["provenance"],
        text=recording["text"] if "text" in recording else files[index],
        link=recording.get("link"),
        place=f"{document.path}:{mark.line}:{mark.column}",
    )


def _recorded_files(document: Document) -> tuple[dict[int, str], list[Violation]]:
    """Return the texts of recorded files by the number of the recording, and what hinders the others."""
    value: Any = document.value
    texts: dict[int, str] = {}
    unreadable: list[Violation] = []
    for location, mark in document.value_marks.items():
        match location:
            case ("recordings", int(index), "file"):
                try:
                    texts[index] = _recorded_text(document.path, str(value["recordings"][index]["file"]))
                except UsageError as error:
                    unreadable.append((mark, str(error), "an existing text file in the profile's folder"))
    return texts, unreadable


def _recorded_text(profile: Path, name: str) -> str:
    """Read a recording's file, which must lie in the profile's folder even after links are followed."""
    folder = profile.resolve().parent
    try:
        file = (folder / name).resolve()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{name} is a link that leads nowhere: {error}") from error
    if not file.is_relative_to(folder):
        raise UsageError(f"{name} leads out of the profile's folder")
    return read_text(file, RECORDING_LIMIT_BYTES)
