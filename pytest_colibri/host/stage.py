"""A stage: a folder from which the recordings of a profile are replayed for another program.

Programs learn about a machine from tools and from files. Tools are scripts in a folder that is the whole
PATH: each prints what its recording answers, and a tool without a recording is not found. Files
(``/proc/meminfo``, the control groups) are bound over the real ones in a mount namespace of the program.
Where there are no namespaces, a planner in Python is run by a driver that redirects ``open`` for these paths
(``subjects/checkout_driver.py``), and any other program is not run. Nor is it for a Windows machine, where a
program asks the system itself: only the driver answers these calls.

Libraries (NVML, HIP, Vulkan) and the processors that a program may run on cannot be replayed.
A file that this machine does not have cannot be bound over either.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host import replayed_tool, stage_entry
from pytest_colibri.host.cpus import parse_cim_cores
from pytest_colibri.host.memory import parse_cim
from pytest_colibri.host.tools import printable, printed_files, run_tool
from pytest_colibri.profiles.model import Profile

STAGE_VARIABLE = "COLIBRI_STAGE"

_RECORDINGS_OF_TOOLS: Mapping[str, str] = {"sysctl": "vm_stat", "hipInfo": "hipinfo"}
_PYTHON_PLATFORMS = {"linux": "linux", "darwin": "darwin", "windows": "win32"}
_ISOLATED_PYTHON = (sys.executable, "-I", "-S")

_MEMINFO = "/proc/meminfo"
_OWN_GROUP = "/proc/self/cgroup"
_OWN_MOUNTS = "/proc/self/mountinfo"
_DEVICE_TREE = "/proc/device-tree"
_DEVICE_CLASSES = "/sys/class"
_ONLINE_PROCESSORS = "/sys/devices/system/cpu/online"  # where C libraries count them
_CGROUP_MOUNT = PurePosixPath("/sys/fs/cgroup")
_MEMORY_V1_MOUNT = _CGROUP_MOUNT / "memory"


@dataclass(frozen=True)
class _Layout:
    """What was written for a stage: ``bindings`` is what its entry reads, None where it cannot enter."""

    bindings: Path | None
    is_complete: bool
    reach: str


class Stage:
    """The recordings of ``profile``, laid out in ``folder`` for programs to find, once one asks for them.

    Raises UsageError for a profile without recordings. Whatever a program needs of it raises Unavailable on
    Windows.
    """

    def __init__(self, profile: Profile, folder: Path) -> None:
        if not profile.recordings:
            raise UsageError(f"{profile.path}: profile {profile.name} has no recordings to replay")
        self.profile = profile
        self._texts = {str(recording.tool): recording.text for recording in profile.recordings}
        self._folder = folder.absolute()
        self._tools = self._folder / "bin"

    @property
    def reach(self) -> str:
        """How the recordings are replayed here, in a sentence."""
        return self._layout.reach

    @property
    def is_complete(self) -> bool:
        """Whether any program finds what is recorded.

        Otherwise only one does that follows the description which STAGE_VARIABLE names.
        """
        return self._layout.is_complete

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on this stage; its environment is to be staged too."""
        bindings = self._layout.bindings
        if bindings is None:
            return tuple(argv)
        return (*_ISOLATED_PYTHON, str(Path(stage_entry.__file__)), str(bindings), *argv)

    def environment(self, base: Mapping[str, str]) -> Mapping[str, str]:
        """Return ``base`` with the PATH of this stage and what leads to its other parts."""
        _ = self._layout
        staged = {**base, "PATH": str(self._tools), STAGE_VARIABLE: str(self._folder / "stage.json")}
        if "hipinfo" in self._texts:
            staged["HIP_PATH"] = str(self._folder)  # where an installer of the HIP SDK has bin/hipInfo.exe
        return staged

    @cached_property
    def _layout(self) -> _Layout:
        if os.name != "posix":
            raise Unavailable("recorded tools are replayed by scripts, which Windows does not start; use WSL")
        self._write_tools()
        recorded = self._write_recorded_files()
        bound = _that_exist(self._write_hiding_files() | recorded)
        bindings = self._write("bindings.json", json.dumps(bound | self._hidden_tools()))
        obstacle = _obstacle(bindings)
        redirected = (
            recorded if obstacle else {path: recorded[path] for path in recorded.keys() - bound.keys()}
        )
        self._write_behaviour(redirected)
        return _Layout(
            bindings=bindings if obstacle is None else None,
            is_complete=not redirected and "cim" not in self._texts,
            reach=self._describe(bound, redirected, obstacle),
        )

    def _write_tools(self) -> None:
        for name in ("python", "python3"):
            self._write_script(name, (sys.executable,))
        for tool in replayed_tool.ANSWERS:
            text = self._texts.get(_RECORDINGS_OF_TOOLS.get(tool, tool))
            if text is not None:
                recording = self._write(f"recordings/{tool}.txt", text)
                command = (*_ISOLATED_PYTHON, str(Path(replayed_tool.__file__)), tool, str(recording))
                self._write_script(tool, command)
        if "hipinfo" in self._texts:
            shutil.copy2(self._tools / "hipInfo", self._tools / "hipInfo.exe")

    def _hidden_tools(self) -> dict[str, str]:
        """Map the tools of this machine, which a program may call by their path, to the replayed ones."""
        hidden = {}
        for tool in replayed_tool.ANSWERS:
            installed, replayed = shutil.which(tool), self._tools / tool
            # A link may lead to a program of many names, such as the one that is the shell as well.
            if installed is not None and Path(installed).resolve().name == tool:
                hidden[installed] = str(replayed) if replayed.exists() else os.devnull
        return hidden

    def _write_hiding_files(self) -> dict[str, str]:
        """Write what stands for the files of this machine that say nothing of the emulated one."""
        groups = self._make_folder("hiding/groups")
        return {
            _MEMINFO: str(self._write("hiding/meminfo", "")),
            _OWN_GROUP: str(self._write("hiding/cgroup", "0::/\n")),
            _OWN_MOUNTS: str(self._write("hiding/mountinfo", _mount_line(_CGROUP_MOUNT, "cgroup2", "rw"))),
            str(_CGROUP_MOUNT): str(groups),
            _DEVICE_CLASSES: str(self._make_folder("hiding/class")),
            _DEVICE_TREE: str(self._make_folder("hiding/device-tree")),
        }

    def _write_recorded_files(self) -> dict[str, str]:
        """Write the recorded files; return what stands for each path."""
        files = {}
        if "meminfo" in self._texts:
            files[_MEMINFO] = self._write("files/meminfo", self._texts["meminfo"])
        if "cgroup-v1" in self._texts or "cgroup-v2" in self._texts:
            files |= self._write_groups()
        if "amd-sysfs" in self._texts:
            files[_DEVICE_CLASSES] = self._make_folder("files/class")
            cards = PurePosixPath(_DEVICE_CLASSES) / "drm"
            self._write_printed("amd-sysfs", files[_DEVICE_CLASSES] / "drm", cards)
        if "device-tree" in self._texts:
            model, _, compatible = self._texts["device-tree"].rstrip("\n").partition("\n")
            files[_DEVICE_TREE] = self._make_folder("files/device-tree")
            self._write("files/device-tree/model", f"{model}\0")
            self._write("files/device-tree/compatible", compatible.strip("\n").replace("\n", "\0") + "\0")
        processors = self._logical_processors()
        if processors:
            files[_ONLINE_PROCESSORS] = self._write("files/online", f"0-{processors - 1}\n")
        return {path: str(file) for path, file in files.items()}

    def _write_groups(self) -> dict[str, Path]:
        """Write the control groups; the deepest of a recording is the one of the program."""
        folder = self._make_folder("files/groups")
        groups, mounts = "", ""
        if "cgroup-v1" in self._texts:
            own = self._write_printed("cgroup-v1", folder / "memory", _MEMORY_V1_MOUNT)
            groups += f"4:memory:{own}\n"
            mounts += _mount_line(_MEMORY_V1_MOUNT, "cgroup", "rw,memory")
        if "cgroup-v2" in self._texts:
            below = "unified" if groups else ""  # where a machine with both versions mounts the second one
            own = self._write_printed("cgroup-v2", folder / below, _CGROUP_MOUNT / below)
            groups += f"0::{own}\n"
            mounts += _mount_line(_CGROUP_MOUNT / below, "cgroup2", "rw")
        return {
            _OWN_GROUP: self._write("files/cgroup", groups),
            _OWN_MOUNTS: self._write("files/mountinfo", mounts),
            str(_CGROUP_MOUNT): folder,
        }

    def _write_printed(self, tool: str, folder: Path, origin: PurePosixPath) -> PurePosixPath:
        """Write the files that ``tail -n +1`` printed in ``origin``; return the deepest of their folders."""
        deepest = PurePosixPath("/")
        for parent, files in printed_files(self._texts[tool], tool).items():
            below = parent.relative_to(origin) if parent.is_relative_to(origin) else parent
            for name, content in files.items():
                if below.is_absolute() or not name or ".." in (below / name).parts:
                    what = f"recording of {tool}: {str(parent / name)!r} is no file below {origin}"
                    raise UsageError(f"{self.profile.path}: {what}")
                self._write(folder / below / name, content.rstrip("\n") + "\n")
            deepest = max(deepest, "/" / below, key=lambda path: len(path.parts))
        return deepest

    def _logical_processors(self) -> int | None:
        """Return how many a recording lists; an Apple chip has one for each core."""
        if "cim" in self._texts:
            return (
                sum(map(int, re.findall(r"NumberOfLogicalProcessors *: (\d{1,6})", self._texts["cim"])))
                or None
            )
        if "lscpu" in self._texts:
            rows = [line for line in self._texts["lscpu"].splitlines() if line and line[0] != "#"]
            return len([row for row in rows if "-" not in row])
        counts = dict(re.findall(r"^hw\.(\w+cpu): (\d{1,6})$", self._texts.get("vm_stat", ""), re.MULTILINE))
        known = counts.get("logicalcpu") or counts.get("physicalcpu")
        return int(known) if known else None

    def _windows(self) -> dict[str, int | None] | None:
        if "cim" not in self._texts:
            return None
        total, available = parse_cim(self._texts["cim"])
        cores = parse_cim_cores(self._texts["cim"]).physical_cores
        return {"total_bytes": total.bytes, "available_bytes": available.bytes, "cores": cores}

    def _write_behaviour(self, redirected: Mapping[str, str]) -> None:
        """Write what a driver of planners in Python is to do.

        ``system`` becomes ``sys.platform`` and ``processors`` ``os.cpu_count()``, None leaves them.
        ``windows`` is what Windows answers of its memory and cores, None on other systems.
        """
        systems = self.profile.match.systems
        document = {
            "system": _PYTHON_PLATFORMS.get(systems[0]) if systems else None,
            "processors": self._logical_processors(),
            "files": redirected,
            "windows": self._windows(),
        }
        self._write("stage.json", json.dumps(document))

    def _describe(self, bound: Mapping[str, str], redirected: Mapping[str, str], obstacle: str | None) -> str:
        tools = sorted(set(replayed_tool.ANSWERS) & {path.name for path in self._tools.iterdir()})
        parts = [f"PATH holds {', '.join(tools) or 'no tool'}, as recorded"]
        if obstacle is None:
            parts.append(f"{', '.join(bound)} are bound over in a mount namespace")
        if redirected:
            reason = obstacle or "this machine has no such file"
            parts.append(f"{', '.join(redirected)} are redirected for planners in Python only ({reason})")
        if "cim" in self._texts:
            parts.append("Windows answers planners in Python only")
        return "; ".join([*parts, "libraries (NVML, HIP, Vulkan) are those of this machine"])

    def _write_script(self, name: str, command: Sequence[str]) -> None:
        script = self._write(self._tools / name, f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        script.chmod(0o755)

    def _write(self, name: str | Path, text: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def _make_folder(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def _obstacle(bindings: Path) -> str | None:
    """Return why files cannot be bound here, None when they can: it is tried, and nothing is run."""
    if sys.platform != "linux":
        return f"{sys.platform} has no mount namespaces"
    attempt = run_tool([*_ISOLATED_PYTHON, str(Path(stage_entry.__file__)), str(bindings)])
    return None if attempt.status == 0 else printable(attempt.errors.strip() or "no reason is given")


def _that_exist(files: Mapping[str, str]) -> dict[str, str]:
    return {path: file for path, file in files.items() if Path(path).exists()}


def _mount_line(mount: PurePosixPath, kind: str, options: str) -> str:
    return f"31 23 0:27 / {mount} rw - {kind} {kind} {options}\n"
