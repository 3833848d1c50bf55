"""Where the loader of this machine finds the libraries of a program; the program is not run, and not ldd.

The order is that of ld.so(8): RPATH of the file and of what needs it, LD_LIBRARY_PATH, RUNPATH of the file,
the cache, the standard folders.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_colibri.errors import Unavailable
from pytest_colibri.host.elf import Elf, NotElf, read_elf
from pytest_colibri.host.tools import run_tool

MAX_PATHS = 100_000

_STANDARD_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_CACHED = re.compile(r"^\s*(\S+) \([^)]*\) => (\S.*)$", re.MULTILINE)
_GLIBC_LOADER = re.compile(r"ld(-linux.*|64|-lsb.*)?\.so\.\d+")


@dataclass(frozen=True)
class Loader:
    """What the loader looks through beside a program's own folders; ``doubt`` says why it may be more."""

    library_path: tuple[str, ...]
    cache: Mapping[str, tuple[str, ...]]
    folders: tuple[str, ...] = _STANDARD_FOLDERS
    doubt: str | None = None


@dataclass(frozen=True)
class Missing:
    """A library that is not found, and the name of the file that needs it."""

    library: str
    needed_by: str


def this_loader(environment: Mapping[str, str]) -> Loader:
    """Return what the loader of this machine looks through, with the search path of an environment."""
    path = tuple(folder for folder in re.split("[:;]", environment.get("LD_LIBRARY_PATH", "")) if folder)
    # Folders of system programs are not on every user's PATH.
    tool = shutil.which("ldconfig", path=os.pathsep.join([os.defpath, "/sbin", "/usr/sbin"]))
    if tool is None:
        return Loader(path, {}, doubt="ldconfig is not installed, so the cache of the loader is unknown")
    try:
        output = run_tool([tool, "-p"])
    except Unavailable as error:
        return Loader(path, {}, doubt=f"the cache of the loader is unknown: {error}")
    if output.status != 0:
        return Loader(path, {}, doubt="the cache of the loader is unknown: ldconfig -p failed")
    return Loader(path, parse_cache(output.text))


def parse_cache(text: str) -> Mapping[str, tuple[str, ...]]:
    """Return the files of each library, in the order of ``ldconfig -p``."""
    cache: dict[str, tuple[str, ...]] = {}
    for name, file in _CACHED.findall(text):
        cache[name] = (*cache.get(name, ()), file)
    return cache


def missing_libraries(program: Elf, loader: Loader) -> tuple[tuple[Missing, ...], str | None]:
    """Return what does not resolve, of the program and of its libraries, and why that may be wrong.

    The doubt is None where every rule of the loader is known; without anything missing there is none.
    """
    missing: list[Missing] = []
    doubts = [loader.doubt, _unknown_loader(program)]
    seen: set[str] = set()
    queue: list[tuple[Elf, tuple[str, ...]]] = [(program, _own_folders(program, program.rpath))]
    if program.interpreter is not None and not Path(program.interpreter).exists():
        missing.append(Missing(program.interpreter, program.path.name))
    looked_at = 0
    while queue:
        file, rpath = queue.pop(0)
        doubts.append(_unknown_token(file))
        for name in file.needed:
            if name in seen:
                continue
            seen.add(name)
            paths = _paths(name, file, rpath, loader)
            looked_at += len(paths)
            if looked_at > MAX_PATHS:
                missing.append(Missing(name, file.path.name))
                return tuple(missing), f"the search takes more than {MAX_PATHS} paths"
            found = next(filter(None, (_loadable(path, program) for path in paths)), None)
            if found is None:
                missing.append(Missing(name, file.path.name))
            else:
                queue.append((found, (*_own_folders(found, found.rpath), *rpath)))
    return tuple(missing), next(filter(None, doubts), None) if missing else None


def _paths(name: str, file: Elf, rpath: Sequence[str], loader: Loader) -> list[Path]:
    """Return where the loader looks for a library; it takes the first that the process can hold."""
    if "/" in name:
        return [Path(name)]
    # A file with a RUNPATH is not looked for in any RPATH.
    runpath = _own_folders(file, file.runpath)
    before = () if file.runpath else rpath
    return [
        *(Path(folder, name) for folder in (*before, *loader.library_path, *runpath)),
        *map(Path, loader.cache.get(name, ())),
        *(Path(folder, name) for folder in loader.folders),
    ]


def _loadable(path: Path, program: Elf) -> Elf | None:
    try:
        library = read_elf(path)
    except NotElf:
        return None
    return library if program.loads(library) else None


def _own_folders(file: Elf, folders: Sequence[str]) -> tuple[str, ...]:
    origin = str(file.path.resolve().parent)
    return tuple(re.sub(r"\$(ORIGIN\b|\{ORIGIN\})", lambda _: origin, folder) for folder in folders)


def _unknown_token(file: Elf) -> str | None:
    tokens = [folder for folder in (*file.rpath, *file.runpath) if re.search(r"\$\{?(LIB|PLATFORM)", folder)]
    return f"{file.path.name} has a search path that is not followed: {tokens[0]}" if tokens else None


def _unknown_loader(program: Elf) -> str | None:
    loader = program.interpreter
    if loader is None or _GLIBC_LOADER.fullmatch(Path(loader).name):
        return None
    return f"the rules of its loader {loader} are not known here"
