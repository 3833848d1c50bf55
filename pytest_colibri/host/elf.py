"""Read what a program for Linux needs before it starts, from its ELF file; nothing of it is executed.

Format: System V ABI, chapters 4 and 5 (https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html). Every
count and length of the file is bounded before it is used.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_colibri.errors import UsageError

MAX_SEGMENTS = 1024
MAX_DYNAMIC_ENTRIES = 4096
MAX_NAME_BYTES = 4096

_MACHINES = {
    3: ("i386", "i486", "i586", "i686"),
    40: ("arm", "armv6l", "armv7l", "armv8l"),
    62: ("x86_64", "amd64"),
    183: ("aarch64", "arm64"),
    243: ("riscv64",),
    258: ("loongarch64",),
}
_SYSTEMS = (0, 3)  # of any system, and of Linux by its GNU extensions
_PROGRAM, _SHARED = 2, 3
_OTHER_TYPES = {1: "an object file of a compiler", 4: "a core dump"}
_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3
_END, _NEEDED, _STRINGS, _RPATH, _RUNPATH, _FLAGS = 0, 1, 5, 15, 29, 0x6FFFFFFB
_POSITION_INDEPENDENT_PROGRAM = 0x08000000


class NotElf(UsageError):
    """A file that is no ELF file, or none that can be read: says what it is, or what is wrong with it."""


@dataclass(frozen=True)
class Elf:
    """A program or library. ``architectures`` are the names of its processor, as machines call themselves.

    ``interpreter`` is the loader that starts it, None for a library and for a program without one;
    ``is_program`` tells these apart. ``needed`` are the libraries that it is linked with; they are looked
    for in ``rpath`` or ``runpath``.
    """

    path: Path
    bits: int
    machine: int
    is_program: bool
    interpreter: str | None
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names of the processor that it is built for."""
        return _MACHINES.get(self.machine, (f"ELF machine {self.machine}",))

    def loads(self, other: Elf) -> bool:
        """Tell whether a process of this program can hold the other file."""
        return (self.bits, self.machine) == (other.bits, other.machine)


def read_elf(path: Path) -> Elf:
    """Read the headers and the dynamic section of a file. Raises NotElf for any other file."""
    with _mapped(path) as image:
        return _Reader(path, image).read()


def names_any(path: Path, words: tuple[str, ...], most_bytes: int) -> tuple[str, ...]:
    """Return which of the words end a zero-terminated text in the first ``most_bytes`` of a file."""
    with _mapped(path) as image:
        return tuple(word for word in words if image.find(f"{word}\0".encode(), 0, most_bytes) >= 0)


def _mapped(path: Path) -> mmap.mmap:
    try:
        # Opening a FIFO would block, and opening a device may set it going.
        if not stat.S_ISREG(path.stat().st_mode):
            raise NotElf(f"{path}: not a regular file")
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise NotElf(f"{path}: an empty file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise NotElf(f"{path}: cannot be read: {error.strerror}") from None


class _Reader:
    """Reads one image; ``order`` is the mark of struct for its byte order."""

    def __init__(self, path: Path, image: mmap.mmap) -> None:
        self._path, self._image = path, image
        start = image[:8]
        if start[:4] != b"\x7fELF":
            raise NotElf(f"{path}: {_other_kind(start)}")
        if len(start) < 6 or start[4] not in (1, 2) or start[5] not in (1, 2):
            raise self._wrong("neither 32 nor 64 bits, or of no known byte order")
        if len(start) == 8 and start[7] not in _SYSTEMS:
            raise NotElf(f"{path}: an ELF file of another system than Linux (OS ABI {start[7]})")
        self._bits = 32 * start[4]
        self._order = "<" if start[5] == 1 else ">"

    def read(self) -> Elf:
        kind, machine, *_ = self._unpack("HHI", 16)
        if kind not in (_PROGRAM, _SHARED):
            what = _OTHER_TYPES.get(kind, f"an ELF file of type {kind}")
            raise NotElf(f"{self._path}: {what}, not a program")
        segments = list(self._segments())
        dynamic = self._dynamic(segments)
        strings = dynamic[_STRINGS][0] if dynamic[_STRINGS] else 0
        names = {
            tag: tuple(self._text(self._offset(segments, strings) + place) for place in dynamic[tag])
            for tag in (_NEEDED, _RPATH, _RUNPATH)
        }
        loader = [self._text(begin) for kind, begin, _, _ in segments if kind == _INTERPRETER]
        flags = dynamic[_FLAGS][0] if dynamic[_FLAGS] else 0
        return Elf(
            path=self._path,
            bits=self._bits,
            machine=machine,
            is_program=kind == _PROGRAM or bool(loader or flags & _POSITION_INDEPENDENT_PROGRAM),
            interpreter=loader[0] if loader else None,
            needed=names[_NEEDED],
            rpath=_folders(names[_RPATH]),
            runpath=_folders(names[_RUNPATH]),
        )

    def _segments(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (type, offset in the file, address, bytes in the file) of each segment."""
        wide = self._bits == 64
        (table,) = self._unpack("Q", 32) if wide else self._unpack("I", 28)
        size, count = self._unpack("HH", 54 if wide else 42)
        if count > MAX_SEGMENTS:
            raise self._wrong(f"{count} segments; at most {MAX_SEGMENTS} are read")
        for number in range(count):
            if wide:
                kind, _, offset, address, _, length = self._unpack("IIQQQQ", table + number * size)
            else:
                kind, offset, address, _, length = self._unpack("IIIII", table + number * size)
            yield kind, offset, address, length

    def _dynamic(self, segments: list[tuple[int, int, int, int]]) -> Mapping[int, list[int]]:
        """Return the values of each tag of the dynamic section; none in a static program."""
        values: defaultdict[int, list[int]] = defaultdict(list)
        form, entry = ("qQ", 16) if self._bits == 64 else ("iI", 8)
        for begin, length in ((begin, length) for kind, begin, _, length in segments if kind == _DYNAMIC):
            for number in range(min(length // entry, MAX_DYNAMIC_ENTRIES)):
                tag, value = self._unpack(form, begin + number * entry)
                if tag == _END:
                    break
                values[tag].append(value)
        return values

    def _offset(self, segments: list[tuple[int, int, int, int]], address: int) -> int:
        """Return where in the file the bytes of an address lie."""
        for kind, begin, start, length in segments:
            if kind == _LOAD and start <= address < start + length:
                return begin + address - start
        raise self._wrong(f"no segment holds its address {address:#x}")

    def _text(self, offset: int) -> str:
        self._check_within(offset)
        end = self._image.find(b"\0", offset, offset + MAX_NAME_BYTES)
        if end < 0:
            raise self._wrong(f"no name of at most {MAX_NAME_BYTES} bytes at {offset}")
        return os.fsdecode(self._image[offset:end])

    def _unpack(self, form: str, offset: int) -> tuple[int, ...]:
        form = self._order + form
        self._check_within(offset + struct.calcsize(form))
        return struct.unpack_from(form, self._image, offset)

    def _check_within(self, offset: int) -> None:
        if offset > len(self._image):
            raise self._wrong(f"it ends before byte {offset}")

    def _wrong(self, why: str) -> NotElf:
        return NotElf(f"{self._path}: a damaged ELF file: {why}")


def _folders(paths: tuple[str, ...]) -> tuple[str, ...]:
    # The loader knows one path of a kind: the last.
    return tuple(folder for path in paths[-1:] for folder in path.split(":") if folder)


def _other_kind(start: bytes) -> str:
    if start[:2] == b"#!":
        return "a script, not an ELF file"
    if start[:2] == b"MZ":
        return "a program for Windows, not an ELF file"
    if start[:4] in (b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe"):
        return "a program for macOS, not an ELF file"
    return "not an ELF file"
