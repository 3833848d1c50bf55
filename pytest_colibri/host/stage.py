"""A stage: a folder from which the recordings of a profile are replayed for another program.

Programs learn about a machine from tools and from files. Tools are scripts in a folder that is the whole
PATH: each prints what its recording answers, and a tool without a recording is not found. Files
(``/proc/meminfo``, the control groups) are bound over the real ones in a mount namespace of the program.
Where there are no namespaces, a planner in Python is run by a driver that redirects ``open`` for these paths
(``subjects/checkout_driver.py``), and any other program is not run.

Libraries (NVML, HIP, Vulkan) and the processors that a program may run on cannot be replayed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host import replayed_tool, stage_entry
from pytest_colibri.host.tools import printable, run_tool
from pytest_colibri.profiles.model import Profile

STAGE_VARIABLE = "COLIBRI_STAGE"

_RECORDINGS_OF_TOOLS: Mapping[str, str] = {"sysctl": "vm_stat"}
_PYTHON_PLATFORMS = {"linux": "linux", "darwin": "darwin", "windows": "win32"}
_ISOLATED_PYTHON = (sys.executable, "-I", "-S")
_NOT_REPLAYED = "libraries (NVML, HIP, Vulkan) are those of this machine"

_CGROUP_MOUNT = PurePosixPath("/sys/fs/cgroup")
_MEMORY_V1_MOUNT = _CGROUP_MOUNT / "memory"


class Stage:
    """The recordings of ``profile``, laid out in ``folder`` for programs to find.

    ``reach`` says in a sentence how they are replayed here. ``binds_files`` tells whether any program finds
    the recorded files; otherwise only one does that redirects ``open`` as STAGE_VARIABLE tells it to. Raises
    UsageError for a profile without recordings, Unavailable on Windows.
    """

    def __init__(self, profile: Profile, folder: Path) -> None:
        if os.name != "posix":
            raise Unavailable("recorded tools are replayed by scripts, which Windows does not start; use WSL")
        if not profile.recordings:
            raise UsageError(f"{profile.path}: profile {profile.name} has no recordings to replay")
        self.profile = profile
        self._texts = {str(recording.tool): recording.text for recording in profile.recordings}
        self._folder = folder.absolute()
        self._tools = self._folder / "bin"
        self._write_tools()
        self._files = self._write_files()
        self._bindings = self._write("bindings.json", json.dumps(self._files | self._hidden_tools()))
        obstacle = self._obstacle() if self._files else None
        self.binds_files = obstacle is None
        self._write_redirections()
        self.reach = self._describe(obstacle)

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on this stage; its environment is to be staged too."""
        if not self.binds_files or not self._files:
            return tuple(argv)
        return (*_ISOLATED_PYTHON, str(Path(stage_entry.__file__)), str(self._bindings), *argv)

    def environment(self, base: Mapping[str, str]) -> Mapping[str, str]:
        """Return ``base`` with the PATH of this stage and what leads to its other parts."""
        staged = {**base, "PATH": str(self._tools), STAGE_VARIABLE: str(self._folder / "stage.json")}
        if "hipInfo" in self._texts:
            staged["HIP_PATH"] = str(self._folder)  # where an installer of the HIP SDK has bin/hipInfo.exe
        return staged

    def _write_tools(self) -> None:
        for name in ("python", "python3"):
            self._write_script(name, (sys.executable,))
        for tool in replayed_tool.ANSWERS:
            text = self._texts.get(_RECORDINGS_OF_TOOLS.get(tool, tool))
            if text is not None:
                recording = self._write(f"recordings/{tool}.txt", text)
                command = (*_ISOLATED_PYTHON, str(Path(replayed_tool.__file__)), tool, str(recording))
                self._write_script(tool, command)
        if "hipInfo" in self._texts:
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

    def _write_files(self) -> dict[str, str]:
        """Write the files that programs read; return what stands for each path that this machine has."""
        groups, own_group, mounts = self._write_groups()
        files = {
            "/proc/meminfo": self._write("files/meminfo", self._texts.get("meminfo", "")),
            "/proc/self/cgroup": self._write("files/cgroup", own_group),
            "/proc/self/mountinfo": self._write("files/mountinfo", mounts),
            str(_CGROUP_MOUNT): groups,
            "/sys/class/drm": self._make_folder("files/drm"),
        }
        processors = self._logical_processors()
        if processors:
            # This is where C libraries count them.
            files["/sys/devices/system/cpu/online"] = self._write("files/online", f"0-{processors - 1}\n")
        return {path: str(file) for path, file in files.items() if Path(path).exists()}

    def _write_groups(self) -> tuple[Path, str, str]:
        """Write the control groups; return their folder, and the texts of ``cgroup`` and ``mountinfo``.

        The deepest group of a recording is the one of the program.
        """
        folder = self._make_folder("files/groups")
        lines, mounts = [], []
        if "cgroup-v1" in self._texts:
            own = self._write_group_files(self._texts["cgroup-v1"], folder / "memory", _MEMORY_V1_MOUNT)
            lines.append(f"4:memory:{own}")
            mounts.append(f"32 31 0:28 / {_MEMORY_V1_MOUNT} rw - cgroup cgroup rw,memory")
        if "cgroup-v2" in self._texts or not lines:
            below = "unified" if lines else ""  # a machine with both mounts the second one there
            text = self._texts.get("cgroup-v2", "")
            own = self._write_group_files(text, folder / below, _CGROUP_MOUNT / below)
            lines.append(f"0::{own}")
            mounts.append(f"31 23 0:27 / {_CGROUP_MOUNT / below} rw - cgroup2 cgroup2 rw")
        return folder, "\n".join(lines) + "\n", "\n".join(mounts) + "\n"

    def _write_group_files(self, recording: str, folder: Path, mount: PurePosixPath) -> PurePosixPath:
        """Write the files that ``tail -n +1`` printed into ``folder``; return the path of the deepest."""
        parts = re.split(r"^==> (.{1,4096}) <==$\n?", recording, flags=re.MULTILINE)
        own = PurePosixPath("/")
        for name, content in zip(parts[1::2], parts[2::2], strict=True):
            path = PurePosixPath(name)
            path = path.relative_to(mount) if path.is_relative_to(mount) else path
            if path.is_absolute() or ".." in path.parts:
                raise UsageError(f"{self.profile.path}: recording of a cgroup: {name!r} is not below {mount}")
            self._write(folder / path, content.rstrip("\n") + "\n")
            own = max(own, "/" / path.parent, key=lambda group: len(group.parts))
        return own

    def _logical_processors(self) -> int | None:
        """Return how many a recording lists; an Apple chip has one for each core."""
        if "lscpu" in self._texts:
            rows = [line for line in self._texts["lscpu"].splitlines() if line and line[0] != "#"]
            return len([row for row in rows if "-" not in row])
        counts = dict(re.findall(r"^hw\.(\w+cpu): (\d{1,6})$", self._texts.get("vm_stat", ""), re.MULTILINE))
        known = counts.get("logicalcpu") or counts.get("physicalcpu")
        return int(known) if known else None

    def _obstacle(self) -> str | None:
        """Return why files cannot be bound here, None when they can: it is tried, and nothing is run."""
        if sys.platform != "linux":
            return f"{sys.platform} has no mount namespaces"
        entry = [*_ISOLATED_PYTHON, str(Path(stage_entry.__file__)), str(self._bindings)]
        attempt = run_tool(entry)
        return None if attempt.status == 0 else printable(attempt.errors.strip() or "no reason is given")

    def _write_redirections(self) -> None:
        """Write what a driver of planners in Python is to do.

        ``system`` becomes ``sys.platform`` and ``processors`` ``os.cpu_count()``, None leaves them.
        """
        systems = self.profile.match.systems
        document = {
            "system": _PYTHON_PLATFORMS.get(systems[0]) if systems else None,
            "processors": self._logical_processors(),
            "files": {} if self.binds_files else self._files,
        }
        self._write("stage.json", json.dumps(document))

    def _describe(self, obstacle: str | None) -> str:
        tools = sorted(set(replayed_tool.ANSWERS) & {path.name for path in self._tools.iterdir()})
        shown = f"PATH holds {', '.join(tools) or 'no tool'}, as recorded"
        if not self._files:
            return f"{shown}; {_NOT_REPLAYED}"
        files = ", ".join(self._files)
        if obstacle is None:
            return f"{shown}; {files} are bound over in a mount namespace; {_NOT_REPLAYED}"
        return f"{shown}; {files} are redirected for planners in Python only ({obstacle}); {_NOT_REPLAYED}"

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
