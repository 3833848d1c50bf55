"""Profiles: the shipped ones load; what is wrong in a file is said with its place and what is allowed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_colibri.errors import UsageError
from pytest_colibri.profiles.loader import (
    RECORDING_LIMIT_BYTES,
    all_profiles,
    find_profile,
    load_profile,
    profile_names,
    profiles_directory,
)
from pytest_colibri.profiles.model import DeviceMatch, HostMatch, Profile, Recording
from pytest_colibri.profiles.validation import VIOLATION_LIMIT

GPU = """\
name: box
title: A box with a GPU
backend: vulkan
match:
  system: [linux]
  architecture: [x86_64]
  device:
    vendor: [intel]
    type: [integrated]
    name: ["*Xe*"]
    driver: ["intel*"]
pool: unified
tiers: [vram, ram, disk]
environment:
  COLI_VK_EXPERTS: "16"
recordings:
  - tool: meminfo
    provenance: reported
    link: https://example.org/1
    text: |
      MemTotal: 1 kB
  - tool: lscpu
    provenance: constructed
    file: recordings/box.lscpu.txt
"""
CPU = """\
name: box
title: A box
backend: cpu
match: {}
tiers: [ram, disk]
recordings:
  - {tool: meminfo, provenance: constructed, text: x}
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    (recordings / "box.lscpu.txt").write_bytes(b"0,0\r\n")
    return tmp_path / "box.yaml"


def refusal(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_profile(path)
    return str(caught.value)


def test_a_profile_is_read_whole(box: Path) -> None:
    box.write_text(GPU)
    assert load_profile(box) == Profile(
        name="box",
        title="A box with a GPU",
        backend="vulkan",
        match=HostMatch(
            ("linux",), ("x86_64",), DeviceMatch(("intel",), ("integrated",), ("*Xe*",), ("intel*",))
        ),
        pool="unified",
        tiers=("vram", "ram", "disk"),
        environment={"COLI_VK_EXPERTS": "16"},
        recordings=(
            Recording("meminfo", "reported", "MemTotal: 1 kB\n", "https://example.org/1"),
            Recording("lscpu", "constructed", "0,0\n"),
        ),
        path=box,
    )


def test_a_cpu_profile_has_no_device(box: Path) -> None:
    box.write_text(CPU)
    profile = load_profile(box)
    assert (profile.match, profile.pool, dict(profile.environment)) == (HostMatch(), None, {})


def test_either_leaves_the_pool_to_the_device(box: Path) -> None:
    box.write_text(GPU.replace("pool: unified", "pool: either"))
    assert load_profile(box).pool is None


def test_the_environment_cannot_be_changed(box: Path) -> None:
    box.write_text(GPU)
    with pytest.raises(TypeError):
        load_profile(box).environment["NEW"] = "1"  # type: ignore[index]


# ruff: noqa: E501 - one rejection a line
REJECTIONS = [
    ("title: A box with a GPU", "title: 3", "2:8: title must be text, not 3", 'text in quotes: "3"'),
    ("title: A box with a GPU", "title: [a]", "2:8: title must be text, not a list", "text"),
    ("title: A box with a GPU", 'title: "a\\n"', '2:8: title cannot be "a\\n"', "one line that tells"),
    ("pool: unified", "pool: unified\nnaem: x", '13:1: unknown key "naem" in the profile; nearest: name', "name, title"),
    ("title: A box with a GPU\n", "", "1:1: the profile lacks the key title", "name, title, backend, match"),
    ("name: box", "name: Box 1", '1:7: name cannot be "Box 1"', "name of the profile"),
    ("name: box", "name: bax", '1:7: name is "bax" in a file called box.yaml', '"box"'),
    ("backend: vulkan", "backend: vulcan", '3:10: backend cannot be "vulcan"; nearest: vulkan', "cpu, vulkan, cuda"),
    ("backend: vulkan", "backend: no", '3:10: backend cannot be "no"', "cpu, vulkan, cuda, rocm, metal"),
    ("backend: vulkan", "backend: true", "3:10: backend cannot be true", "cpu, vulkan, cuda"),
    ("[linux]", "[lunix]", '5:12: match.system[1] cannot be "lunix"; nearest: linux', "linux, darwin, windows"),
    ("[linux]", "linux", '5:11: match.system must be a list, not "linux"', "a list"),
    ("[linux]", "[linux, linux]", '5:19: "linux" stands twice in match.system', "each value once"),
    ("[linux]", "[]", "5:11: match.system holds too little", "at least 1 in the list"),
    ("[integrated]", "[igpu]", '9:12: match.device.type[1] cannot be "igpu"', "discrete, integrated, virtual"),
    ('["*Xe*"]', '[""]', "10:12: match.device.name[1] holds too little", "at least 1 character"),
    ('["*Xe*"]', f'["{"x" * 129}"]', "10:12: match.device.name[1] holds too much", "at most 128 characters"),
    ("    vendor:", "    vendors:", '8:5: unknown key "vendors" in match.device; nearest: vendor', "vendor, type"),
    ("pool: unified", "pool: shared", '12:7: pool cannot be "shared"', "unified, discrete, either"),
    ("pool: unified\n", "", "1:1: the profile lacks the key pool, which vulkan needs", "unified, discrete"),
    ("[vram, ram, disk]", "[ram, disk]", "13:8: tiers lack vram, which vulkan needs", "vram with ram and disk"),
    ("[vram, ram, disk]", "{vram: 1}", "13:8: tiers must be a list, not a mapping", "a list"),
    ('"16"', "16", "15:20: environment.COLI_VK_EXPERTS must be text, not 16", 'text in quotes: "16"'),
    ('"16"', "true", "15:20: environment.COLI_VK_EXPERTS must be text, not true", 'text in quotes: "true"'),
    ('"16"', "", "15:19: environment.COLI_VK_EXPERTS must be text, not null", "text"),
    ("COLI_VK_EXPERTS:", "coli-vk:", '15:3: "coli-vk" cannot be a key here', "the name of a variable"),
    ("COLI_VK_EXPERTS:", '"COLI\\n":', '15:3: "COLI\\n" cannot be a key here', "the name of a variable"),
    ("    link: https://example.org/1\n", "", "17:5: the reported recording of meminfo lacks the key link", "the add"),
    ("https:", "http:", '19:11: recordings[1].link cannot be "http://example.org/1"', "the public report"),
    ("tool: lscpu", "tool: meminfo", "22:11: a second recording of meminfo", "one recording of each tool"),
    ("tool: lscpu", "tool: cpuinfo", '22:11: recordings[2].tool cannot be "cpuinfo"', "meminfo, cgroup-v1"),
    ("    provenance: constructed\n", "", "22:5: recordings[2] lacks the key provenance", "tool, provenance, and if"),
    ("    file: recordings/box.lscpu.txt\n", "", "22:5: the recording of lscpu needs its output", "exactly one of"),
    ("    file:", "    text: x\n    file:", "22:5: the recording of lscpu needs its output", "exactly one of"),
    ("recordings/box.lscpu.txt", "recordings/none.txt", "24:11: ", "an existing text file"),
    ("recordings/box.lscpu.txt", "recordings", "24:11: ", "an existing text file"),
    ("recordings/box.lscpu.txt", "/etc/hostname", '24:11: recordings[2].file cannot be "/etc/hostname"', "the file"),
    ("recordings/box.lscpu.txt", "../box.txt", '24:11: recordings[2].file cannot be "../box.txt"', "the file"),
    ("recordings/box.lscpu.txt", "a/../../b", '24:11: recordings[2].file cannot be "a/../../b"', "the file"),
    ("recordings/box.lscpu.txt", "C:\\x", '24:11: recordings[2].file cannot be "C:\\\\x"', "the file"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "what", "allowed"), REJECTIONS)
def test_a_violation_is_said_with_its_place(box: Path, old: str, new: str, what: str, allowed: str) -> None:
    assert old in GPU
    message = refusal(box, GPU.replace(old, new, 1))
    assert message.startswith(f"{box}:{what}")
    assert f"; allowed: {allowed}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("old", "new", "what", "allowed"),
    [
        (
            "match: {}",
            "match: {device: {vendor: [amd]}}",
            "4:9: device in a profile of the backend cpu",
            "none",
        ),
        ("tiers:", "pool: unified\ntiers:", "5:1: pool in a profile of the backend cpu", "none"),
        ("[ram, disk]", "[ram, vram]", "5:14: tier vram in a profile of the backend cpu", "ram, disk"),
        ("match: {}", "match:", "4:7: match must be a mapping of keys to values, not null", "a mapping"),
    ],
)
def test_a_cpu_profile_with_a_device_makes_no_sense(
    box: Path, old: str, new: str, what: str, allowed: str
) -> None:
    message = refusal(box, CPU.replace(old, new, 1))
    assert message.startswith(f"{box}:{what}; allowed: {allowed}")


def test_a_gpu_profile_needs_a_device_to_match(box: Path) -> None:
    text = CPU.replace("backend: cpu", "backend: cuda").replace(
        "tiers: [ram", "pool: discrete\ntiers: [vram, ram"
    )
    assert refusal(box, text).startswith(
        f"{box}:4:8: match lacks the key device, which cuda needs; allowed: device"
    )


def test_a_document_that_is_no_mapping_is_refused(box: Path) -> None:
    assert refusal(box, "- a\n").startswith(
        f"{box}:1:1: the profile must be a mapping of keys to values, not a list"
    )


def test_all_violations_are_said_in_order_of_place_up_to_a_bound(box: Path) -> None:
    lines = refusal(
        box, GPU.replace("title", "titel").replace('"16"', "16").replace("[vram", "[vrom")
    ).splitlines()
    places = [line.removeprefix(f"{box}:").partition(" ")[0] for line in lines]
    assert places == ["1:1:", "2:1:", "13:9:", "15:20:"]

    beyond = refusal(
        box,
        GPU.replace("title", "titel")
        .replace("pool: unified\n", "")
        .replace("box.lscpu", "none")
        .replace("tool: lscpu", "tool: meminfo"),
    ).splitlines()
    assert [line.removeprefix(f"{box}:").partition("; allowed")[0] for line in beyond] == [
        "1:1: the profile lacks the key pool, which vulkan needs",
        "1:1: the profile lacks the key title",
        '2:1: unknown key "titel" in the profile; nearest: title, tiers',
        "21:11: a second recording of meminfo",
        f"23:11: {box.parent / 'recordings' / 'none.txt'}: no such file",
    ]

    missing = refusal(box, "match: {}\nname: box\ntitle: A box\ntiers: [ram]\n").splitlines()
    assert [line.partition("; allowed: ")[0] for line in missing] == [
        f"{box}:1:1: the profile lacks the key backend",
        f"{box}:1:1: the profile lacks the key recordings",
    ]

    many = refusal(
        box, CPU + "".join(f"key{number}: 1\n" for number in range(VIOLATION_LIMIT + 3))
    ).splitlines()
    assert len(many) == VIOLATION_LIMIT + 1
    assert many[-1] == f"{box}: and 3 more"


def test_long_values_are_not_echoed_whole(box: Path) -> None:
    message = refusal(box, GPU.replace("vulkan", "v" * 5000).replace("COLI_VK_EXPERTS", "X" * 5000))
    assert max(map(len, message.removeprefix(str(box)).splitlines())) < 500


def test_a_recording_must_not_lead_out_of_the_folder(
    box: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.txt"
    secret.write_text("secret")
    try:
        (box.parent / "recordings" / "link.txt").symlink_to(secret)
    except OSError:
        pytest.skip("this system lets no ordinary user make symbolic links")
    message = refusal(box, GPU.replace("box.lscpu.txt", "link.txt"))
    assert (
        f"{box}:24:11: recordings/link.txt leads out of the profile's folder; allowed: an existing text file"
        in message
    )


def test_a_recording_that_links_to_itself_is_refused(box: Path) -> None:
    loop = box.parent / "recordings" / "loop.txt"
    try:
        loop.symlink_to(loop)
    except OSError:
        pytest.skip("this system lets no ordinary user make symbolic links")
    message = refusal(box, GPU.replace("box.lscpu.txt", "loop.txt"))
    assert message.startswith(f"{box}:24:11: ")
    assert "; allowed: an existing text file" in message
    assert "\n" not in message


def test_a_recording_is_bounded(box: Path) -> None:
    (box.parent / "recordings" / "box.lscpu.txt").write_bytes(b"#" * (RECORDING_LIMIT_BYTES + 1))
    message = refusal(box, GPU)
    assert message.startswith(f"{box}:24:11: ")
    assert "the file is too large" in message


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_load(name: str) -> None:
    profile = find_profile(name)
    assert (profile.name, profile.path) == (name, profiles_directory() / f"{name}.yaml")
    assert {recording.tool for recording in profile.recordings} & {"meminfo", "vm_stat", "cim"}


def test_auto_is_true_or_false(box: Path) -> None:
    box.write_text(GPU.replace("backend: vulkan", "backend: vulkan\nauto: false"))
    assert not load_profile(box).auto
    message = refusal(box, GPU.replace("backend: vulkan", "backend: vulkan\nauto: no"))
    assert message == f'{box}:4:7: auto must be true or false, not "no"; allowed: true or false'


def test_auto_chooses_among_these() -> None:
    assert [profile.name for profile in all_profiles() if profile.auto] == [
        "amd-rocm",
        "amd-vulkan",
        "apple-metal",
        "apple-vulkan",
        "cpu",
        "intel-vulkan",
        "jetson-agx-orin",
        "jetson-thor",
        "nvidia-cuda",
        "nvidia-unified",
        "nvidia-vulkan",
        "software-vulkan",
    ]


def test_every_shipped_recording_belongs_to_a_profile() -> None:
    used = {
        profiles_directory() / name
        for path in profiles_directory().glob("*.yaml")
        for name in re.findall(r"file: (\S+)", path.read_text(encoding="utf-8"))
    }
    assert used == set((profiles_directory() / "recordings").iterdir())


def test_an_installed_package_carries_its_profiles_inside(tmp_path: Path) -> None:
    package = tmp_path / "pytest_colibri"
    source = profiles_directory().parent / "pytest_colibri"
    for name in ("__init__.py", "errors.py", "units.py"):
        package.mkdir(exist_ok=True)
        shutil.copy(source / name, package)
    shutil.copytree(source / "profiles", package / "profiles")
    code = (
        "from pytest_colibri.profiles.loader import *; print(find_profile('cpu').path, len(profile_names()))"
    )

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            timeout=60,
            check=False,
            capture_output=True,
            text=True,
        )

    assert "installed without its hardware profiles; install pytest-colibri again" in run().stderr
    shutil.copytree(profiles_directory(), package / "_profiles")
    assert run().stdout.strip() == f"{package / '_profiles' / 'cpu.yaml'} {len(profile_names())}"


def test_an_unknown_name_is_told_the_nearest_and_all() -> None:
    with pytest.raises(UsageError) as caught:
        find_profile("intle-vulkan")
    message = str(caught.value)
    assert message.startswith("unknown profile 'intle-vulkan'; nearest: intel-vulkan")
    assert all(name in message for name in profile_names())


@pytest.mark.parametrize("name", ["", "..", "CPU", "cpu ", "\0", "x" * 10_000])
def test_what_is_no_known_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"^unknown profile "):
        find_profile(name)


@pytest.mark.parametrize("path", ["./none", "none.yaml", "none.yml", "a\\b", "\0.yaml"])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="no such file"):
        find_profile(path)


def test_a_path_finds_a_users_own_profile(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box.write_text(GPU)
    assert find_profile(str(box)).title == "A box with a GPU"
    monkeypatch.chdir(box.parent)
    assert find_profile("box.yaml").path == Path("box.yaml")


def test_finding_names_loads_no_schema_library() -> None:
    code = (
        "import sys; from pytest_colibri.profiles.loader import profile_names; profile_names();"
        "sys.exit('jsonschema' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


_LINES = st.sampled_from(
    [*GPU.splitlines(), *CPU.splitlines(), "pool: 3", "  - tool", "environment: []", "recordings: {}", "match: ~",
     "  device: x", "tiers: [[], {}]", "tiers: [1, 1, true]", "? a", "name: [box]", "  A: 1", "    link: 1"]
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_LINES, max_size=30).map("\n".join))
def test_any_lines_give_a_profile_or_a_usage_error(box: Path, text: str) -> None:
    box.write_text(text, encoding="utf-8")
    try:
        profile = load_profile(box)
    except UsageError as error:
        lines = str(error).splitlines()
    else:
        lines = [f"{box}: {profile.title}"]
    assert all(line.startswith(f"{box}:") for line in lines)
