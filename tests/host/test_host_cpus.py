from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.errors import UsageError
from pytest_colibri.host.cpus import parse_cim_cores, parse_lscpu, parse_mac_cores, probe_processor

linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="reads the processors of Linux")


def test_siblings_of_a_core_count_once_and_sockets_tell_cores_apart():
    rows = [f"{cpu},{cpu % 32},{cpu % 32 // 16}" for cpu in range(64)]
    processor = parse_lscpu("# CPU,Core,Socket\n" + "\n".join(rows))
    assert (processor.physical_cores, processor.sockets, processor.note) == (32, 2, None)


def test_core_numbers_that_repeat_on_each_socket_are_different_cores():
    assert parse_lscpu("0,0\n1,0\n0,1\n1,1\n").physical_cores == 4


def test_offline_rows_do_not_count():
    processor = parse_lscpu("0,0,0\n1,1,0\n2,-,-\n3,-,-\n")
    assert (processor.physical_cores, processor.sockets) == (2, 1)


def test_cores_that_this_process_may_not_use_are_left_out_aloud():
    processor = parse_lscpu("0,0,0\n1,1,0\n2,2,1\n3,3,1\n", usable={0, 1})
    assert (processor.physical_cores, processor.sockets) == (2, 1)
    assert processor.note is not None
    assert "2 of 4" in processor.note


@pytest.mark.parametrize("text", ["", "# Core,Socket\n", "0,-,-\n"])
def test_no_core_becomes_one_with_a_note(text):
    processor = parse_lscpu(text)
    assert processor.physical_cores == 1
    assert processor.note is not None


@pytest.mark.parametrize(
    "text",
    ["0,0,0,0,,0,0,0,0\n", "one,two\n", "0\n", "-1,0,0\n"],
    ids=["all columns", "words", "one", "negative"],
)
def test_another_shape_is_refused_and_the_right_command_named(text):
    with pytest.raises(UsageError, match="lscpu -p=cpu,core,socket"):
        parse_lscpu(text)


def test_windows_names_the_cores_of_each_socket():
    processor = parse_cim_cores("NumberOfCores : 16\n\nNumberOfCores : 12\n")
    assert (processor.physical_cores, processor.sockets, processor.note) == (28, 2, None)


def test_windows_without_a_number_of_cores_becomes_one_with_a_note():
    processor = parse_cim_cores("TotalVisibleMemorySize : 33464844\n")
    assert (processor.physical_cores, processor.note) == (1, "cim gives no number of cores; 1 is taken")


def test_performance_cores_of_an_apple_chip():
    processor = parse_mac_cores("hw.physicalcpu: 12\nhw.perflevel0.physicalcpu: 8\nhw.packages: 1\n")
    assert (processor.physical_cores, processor.source) == (8, "hw.perflevel0.physicalcpu")


def test_an_intel_mac_counts_all_physical_cores():
    assert parse_mac_cores("hw.physicalcpu: 6\nhw.packages: 1\n").physical_cores == 6


@pytest.mark.parametrize("text", ["", "hw.perflevel0.physicalcpu: 0\n"])
def test_no_number_from_a_mac_becomes_one_with_a_note(text):
    processor = parse_mac_cores(text)
    assert processor.physical_cores == 1
    assert processor.note is not None


@given(st.text(max_size=200))
def test_no_text_makes_a_core_parser_fail_otherwise_than_by_a_usage_error(text):
    assert parse_mac_cores(text).physical_cores >= 1
    with suppress(UsageError):
        assert parse_lscpu(text).physical_cores >= 1


def siblings_of_usable_cpus() -> set[str]:
    """An independent count: the kernel's own lists of the threads of each core."""
    return {
        Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        for cpu in os.sched_getaffinity(0)
    }


@linux_only
def test_live_cores_are_the_kernels_sibling_groups():
    assert probe_processor().physical_cores == len(siblings_of_usable_cpus())


@linux_only
def test_without_lscpu_the_kernels_topology_gives_the_same(monkeypatch, tmp_path):
    expected = probe_processor()
    monkeypatch.setenv("PATH", str(tmp_path))
    processor = probe_processor()
    assert processor.source == "/sys topology"
    assert (processor.physical_cores, processor.sockets) == (expected.physical_cores, expected.sockets)


@linux_only
@pytest.mark.skipif(shutil.which("nproc") is None, reason="nproc (coreutils) is not installed")
def test_a_process_bound_to_one_processor_has_one_core():
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import subprocess; from pytest_colibri.host.cpus import probe_processor\n"
        "print(probe_processor().physical_cores, subprocess.check_output(['nproc'], text=True))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert output.stdout.split() == ["1", "1"]
