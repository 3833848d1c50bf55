"""ELF files are read as readelf reads them, damaged ones refused, and libraries found as ld.so finds them."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.host.elf import MAX_DYNAMIC_ENTRIES, NotElf, names_any, read_elf
from pytest_colibri.host.libraries import (
    MAX_PATHS,
    Loader,
    Missing,
    missing_libraries,
    parse_cache,
    this_loader,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs of other systems are no ELF files")

Build = Callable[..., Path]

PYTHON = Path(sys.executable).resolve()


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build a program, or with ``library=NAME`` a library, with the options of the linker given."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build programs with")

    def build(*options: str, folder: Path = tmp_path, library: str | None = None) -> Path:
        folder.mkdir(exist_ok=True)
        source = tmp_path / "source.c"
        source.write_text(
            "int one(void) { return 1; }\n" + ("" if library else "int main(void) { return 0; }\n")
        )
        path = folder / (library or "program")
        shared = ["-shared", "-fPIC", f"-Wl,-soname,{library}"] if library else []
        subprocess.run(
            [compiler, source, "-o", path, *shared, "-Wl,--no-as-needed", *options], check=True, timeout=60
        )
        return path

    return build


def system_files() -> list[Path]:
    extension = Path(sysconfig.get_path("platstdlib")) / "lib-dynload"
    return [PYTHON, *sorted(extension.glob("_s*.so"))[:3], Path("/bin/ls"), Path("/bin/sh")]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf to compare with")
@pytest.mark.parametrize("path", system_files(), ids=lambda path: path.name.split(".")[0])
def test_what_readelf_says(path: Path) -> None:
    if not path.exists():
        pytest.skip("not on this system")
    said = subprocess.run(
        ["readelf", "-hdlW", path],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    elf = read_elf(path)
    assert elf.needed == tuple(re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", said))
    assert elf.runpath == tuple(
        folder for text in re.findall(r"runpath: \[(.*)\]", said) for folder in text.split(":")
    )
    assert elf.rpath == tuple(
        folder for text in re.findall(r"rpath: \[(.*)\]", said) for folder in text.split(":")
    )
    assert elf.interpreter == next(iter(re.findall(r"program interpreter: (.*)\]", said)), None)
    assert f"ELF{elf.bits}" in said
    assert os.uname().machine in elf.architectures


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"#!/bin/sh\n", "a script"),
        (b"MZ\x90\x00", "a program for Windows"),
        (b"\xcf\xfa\xed\xfe", "a program for macOS"),
        (b"hello", "not an ELF file"),
        (b"\x7fELF", "a damaged ELF file"),
        (b"\x7fELF\x02\x01\x01\0" + b"\0" * 8 + b"\x02\0" + b"\xff" * 46, "65535 segments"),
        (b"\x7fELF\x02\x01\x01\x09" + b"\0" * 56, "of another system than Linux"),
        (b"\x7fELF\x02\x01\x01\0" + b"\0" * 8 + b"\x01\0" + b"\0" * 46, "an object file of a compiler"),
        (b"\x7fELF\x02\x01\x01\0" + b"\0" * 8 + b"\x04\0" + b"\0" * 46, "a core dump"),
        (b"\x7fELF\x02\x01", "it ends before byte"),
    ],
)
def test_other_files_are_called_what_they_are(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "engine"
    path.write_bytes(content)
    with pytest.raises(NotElf, match=said):
        read_elf(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotElf, match="not a regular file"):
        read_elf(tmp_path / "pipe")
    with pytest.raises(NotElf, match="not a regular file"):
        read_elf(tmp_path)
    with pytest.raises(NotElf, match="cannot be read: No such file"):
        read_elf(tmp_path / "nothing")


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    whole = Path("/bin/ls").read_bytes()
    image = bytearray(whole[: data.draw(st.sampled_from([64, 400, 1024, len(whole)]))])
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(4, min(len(image), 1024) - 8))
        image[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8))
    path.write_bytes(image)
    with suppress(NotElf):
        assert len(read_elf(path).needed) <= MAX_DYNAMIC_ENTRIES


def test_a_program_of_this_machine_resolves(build: Build) -> None:
    program = read_elf(build("-lm"))
    assert "libm.so.6" in program.needed
    assert missing_libraries(program, this_loader(os.environ)) == ((), None)


@pytest.mark.parametrize(
    ("options", "library", "is_program"),
    [
        ((), None, True),
        (("-no-pie",), None, True),
        (("-static", "-nostdlib"), None, True),
        (("-static-pie", "-nostdlib"), None, True),
        ((), "libinner.so.1", False),
    ],
)
def test_programs_are_told_from_libraries(
    build: Build, options: tuple[str, ...], library: str | None, is_program: bool
) -> None:
    assert read_elf(build(*options, library=library)).is_program == is_program


@pytest.mark.skipif(not Path("/sys/kernel/uevent_seqnum").exists(), reason="a file that cannot be mapped")
def test_a_file_that_cannot_be_mapped() -> None:
    with pytest.raises(NotElf, match="cannot be read"):
        read_elf(Path("/sys/kernel/uevent_seqnum"))


def test_a_search_without_end_is_given_up(build: Build) -> None:
    program = read_elf(build("-lm"))
    endless = Loader(("nowhere",) * (MAX_PATHS + 1), {}, folders=())
    missing, doubt = missing_libraries(program, endless)
    assert [one.needed_by for one in missing] == ["program"]
    assert doubt == f"the search takes more than {MAX_PATHS} paths"


def test_the_last_search_path_counts(build: Build) -> None:
    """As for the loader; or a small file could name endless folders."""
    program = build("-lm", "-Wl,--disable-new-dtags,-rpath,/last")
    needed, rpath = struct.pack("<q", 1), struct.pack("<q", 15)
    two_libraries = re.compile(re.escape(needed) + b"(.{8})" + re.escape(needed) + b"(.{8})", re.DOTALL)
    image = two_libraries.sub(lambda found: rpath + found[1] + rpath + found[2], program.read_bytes())
    program.write_bytes(image)
    elf = read_elf(program)
    assert (elf.needed, elf.rpath) == ((), ("/last",))


def test_a_lost_library_is_named_with_what_needs_it(build: Build, tmp_path: Path) -> None:
    """The program links one library, and that one another: both rules, and the loader's own answer."""
    folder = tmp_path / "lib"
    build(library="libinner.so.1", folder=folder)
    build(f"-L{folder}", "-l:libinner.so.1", library="libouter.so.1", folder=folder)
    options = [f"-L{folder}", "-l:libouter.so.1", f"-Wl,-rpath-link,{folder}"]
    lost = read_elf(build(*options))
    loader = this_loader({})
    assert missing_libraries(lost, loader) == ((Missing("libouter.so.1", "program"),), None)
    assert loads(lost.path) == {"libouter.so.1"}

    runpath = read_elf(build(*options, "-Wl,--enable-new-dtags,-rpath,$ORIGIN/lib"))
    assert runpath.runpath == ("$ORIGIN/lib",)
    assert missing_libraries(runpath, loader)[0] == (Missing("libinner.so.1", "libouter.so.1"),)
    assert loads(runpath.path) == {"libinner.so.1"}, "a RUNPATH is not inherited"

    rpath = read_elf(build(*options, "-Wl,--disable-new-dtags,-rpath,$ORIGIN/lib"))
    assert rpath.rpath == ("$ORIGIN/lib",)
    assert missing_libraries(rpath, loader)[0] == ()
    assert loads(rpath.path) == set(), "an RPATH is"

    given_path = this_loader({"LD_LIBRARY_PATH": str(folder)})
    assert missing_libraries(lost, given_path)[0] == ()


def loads(program: Path) -> set[str]:
    """Return the libraries that the loader itself does not find."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    said = subprocess.run(
        [program], env={**environment, "LC_ALL": "C"}, capture_output=True, text=True, timeout=60, check=False
    ).stderr
    return set(re.findall(r"libraries: (\S+): cannot open", said))


def test_a_library_of_another_kind_of_machine_is_none(build: Build, tmp_path: Path) -> None:
    library = build(library="libinner.so.1", folder=tmp_path / "lib")
    program = read_elf(build(f"-L{tmp_path / 'lib'}", "-l:libinner.so.1", "-Wl,-rpath,$ORIGIN/lib"))
    image = bytearray(library.read_bytes())
    image[18] ^= 1  # e_machine
    library.write_bytes(image)
    assert [one.library for one in missing_libraries(program, this_loader({}))[0]] == ["libinner.so.1"]


@pytest.mark.parametrize(
    ("options", "loader", "doubt"),
    [
        ([], Loader((), {}, folders=(), doubt="no cache"), "no cache"),
        (["-Wl,-rpath,/somewhere/$LIB"], Loader((), {}, folders=()), "is not followed: /somewhere/$LIB"),
        (["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"], Loader((), {}, folders=()), "/lib/ld-musl"),
    ],
)
def test_what_may_be_elsewhere_is_doubted(
    build: Build, options: list[str], loader: Loader, doubt: str
) -> None:
    missing, said = missing_libraries(read_elf(build(*options)), loader)
    assert "libc.so.6" in [one.library for one in missing]
    assert said is not None
    assert doubt in said


def test_a_lost_loader_is_missing(build: Build) -> None:
    program = read_elf(build("-Wl,--dynamic-linker=/lib/ld-linux-lost.so.2"))
    assert missing_libraries(program, this_loader({}))[0] == (Missing("/lib/ld-linux-lost.so.2", "program"),)


def test_the_cache_is_read() -> None:
    text = (
        "3 libs found in cache `/etc/ld.so.cache'\n"
        "\tliba.so.1 (libc6,x86-64) => /lib/x/liba.so.1\n"
        "\tliba.so.1 (libc6) => /lib/i/liba.so.1\n"
        "\tlibb.so (libc6,x86-64, OS ABI: Linux 3.2.0) => /opt/a b/libb.so\n"
        "Cache generated by: ldconfig\n"
    )
    assert parse_cache(text) == {
        "liba.so.1": ("/lib/x/liba.so.1", "/lib/i/liba.so.1"),
        "libb.so": ("/opt/a b/libb.so",),
    }


def test_names_are_found_whole_and_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\0vkCreateInstance\0vkCreateDeviceX\0")
    assert names_any(path, ("vkCreateInstance", "vkCreateDevice"), 2**20) == ("vkCreateInstance",)
    assert names_any(path, ("vkCreateInstance",), 10) == ()
