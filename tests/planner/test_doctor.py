"""What the doctor finds of machines and binaries; of plans it never says what the planner denies."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import device, machine

from pytest_colibri.cli import main
from pytest_colibri.container.hollow import write_hollow_model
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.errors import Unavailable
from pytest_colibri.findings import Finding
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.model import Host
from pytest_colibri.planner.doctor.engine import engine_findings
from pytest_colibri.planner.doctor.machine import machine_findings
from pytest_colibri.planner.doctor.report import Diagnosis, diagnosis_lines, load_doctor_schema
from pytest_colibri.planner.exchange import load_plan_schema
from pytest_colibri.profiles.loader import all_profiles, find_profile
from pytest_colibri.units import GB, Figure

Models = dict[str, Path]

PROFILES = sorted(profile.name for profile in all_profiles())
TIGHT = ("a100-mig", "gb10-114gb", "gtx-1660-super-rtx-3090", "h200", "host-3gb", "steam-deck")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    found = {"tiny": write_tiny_model(folder / "tiny", "int4-row")}
    try:
        for name in ("olmoe", "glm-small", "glm-mixed"):
            found[name] = write_hollow_model(folder / name, name)
    except Unavailable as error:
        pytest.skip(str(error))
    return found


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """Return the status of a command, the JSON that it printed, and its words to standard error."""
    status = main(arguments)
    said = capsys.readouterr()
    printed = json.loads(said.out, parse_constant=pytest.fail) if said.out else None
    return status, printed, said.err.removeprefix("pytest-colibri: ").strip()


@pytest.fixture(scope="module")
def validate() -> Callable[[object], None]:
    from jsonschema import Draft202012Validator

    for schema in (load_doctor_schema(), load_plan_schema()):
        Draft202012Validator.check_schema(schema)
    doctor, plan = Draft202012Validator(load_doctor_schema()), Draft202012Validator(load_plan_schema())

    def check(diagnosis: object) -> None:
        doctor.validate(diagnosis)
        assert isinstance(diagnosis, dict)
        if diagnosis["plan"] is not None:
            plan.validate(diagnosis["plan"])

    return check


def without_disk(plan: dict[str, Any]) -> dict[str, Any]:
    """Leave out the free space of this machine's disk, which others change meanwhile."""
    plan["tiers"]["disk"].pop("available_bytes")
    return {**plan, "steps": [step for step in plan["steps"] if step["name"] != "free disk space"]}


CASES = [
    *((profile, model, ()) for profile in PROFILES for model in ("tiny", "olmoe", "glm-small")),
    *((profile, "glm-mixed", ()) for profile in TIGHT),
    *((profile, "olmoe", ("--ram=9GB", "--vram=2GB", "--context=50000")) for profile in PROFILES),
    *((profile, "glm-small", ("--ram=4000GB", "--vram=1000GB")) for profile in TIGHT),
]


@pytest.mark.parametrize(
    ("profile", "model", "options"),
    CASES,
    ids=lambda part: "".join(part) if isinstance(part, tuple) else part,
)
def test_plan_and_doctor_agree(
    models: Models,
    profile: str,
    model: str,
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    validate: Callable[[object], None],
) -> None:
    arguments = (str(models[model]), f"--profile={profile}", "--emulate", *options)
    status, plan, refusal = asked(capsys, "plan", *arguments)
    doctors_status, diagnosis, _ = asked(capsys, "doctor", "--json", *arguments)
    assert doctors_status == status
    assert status in (0, 7)
    validate(diagnosis)
    placed = of_check(diagnosis, "placement.plan")
    assert len(placed) == 1
    if status != 0:
        assert (placed[0]["sentence"], placed[0]["state"] in ("failed", "unknown")) == (refusal, True)
        assert diagnosis["plan"] is None
        return
    steps = {step["name"]: {"bytes": step["bytes"], "source": step["source"]} for step in plan["steps"]}
    assert {**placed[0]["figures"], "free disk space": None} == {**steps, "free disk space": None}
    assert without_disk(diagnosis["plan"]) == without_disk(plan)
    assert all(warning in placed[0]["sentence"] for warning in plan["warnings"])
    memory = of_check(diagnosis, "host.memory")[0]["figures"]["limit"]["bytes"]
    assert memory == plan["memory"]["available_bytes"]
    for planned in plan["tiers"]["vram"]["devices"]:
        figures = {"total": planned["total_bytes"], "free": planned["free_bytes"]}
        seen = [of for of in of_check(diagnosis, "accelerator.") if planned["name"] in of["sentence"]]
        assert figures in [{name: of["figures"][name]["bytes"] for name in figures} for of in seen]


def of_check(diagnosis: Any, check: str) -> list[Any]:
    return [finding for finding in diagnosis["findings"] if finding["check"].startswith(check)]


def findings_of(profile: str, check: str) -> list[Finding]:
    host = emulate_host(find_profile(profile))
    return [finding for finding in machine_findings(host) if finding.check == check]


@pytest.mark.parametrize("profile", PROFILES)
def test_no_vendor_is_missed_where_none_was_found(profile: str) -> None:
    """No machine lacks "an NVIDIA device": it has a GPU, or it has none."""
    host = emulate_host(find_profile(profile))
    gpus = [finding for finding in machine_findings(host) if finding.check == "accelerator.gpu"]
    names = {device.identity.name for device in host.accelerators if not device.is_software}
    assert gpus
    if not names:
        assert [gpu.state for gpu in gpus] == ["warning"]
        assert not re.search(r"nvidia|amd|intel|apple|cuda|vulkan", gpus[0].sentence, re.IGNORECASE)
    for name in names:
        assert any(name in gpu.sentence for gpu in gpus)


def test_what_interfaces_contradict_is_a_warning() -> None:
    (gpu,) = findings_of("rx-9070-two-names", "accelerator.gpu")
    assert gpu.state == "warning"
    assert "gfx1200" in gpu.sentence
    assert "gfx1201" in gpu.sentence


def test_unknown_memory_is_unknown_and_of_a_shared_pool_is_not() -> None:
    assert findings_of("a100-mig", "accelerator.gpu")[0].state == "unknown"
    assert findings_of("gb10-114gb", "accelerator.gpu")[0].state == "ok"


def test_unknown_memory_of_the_machine() -> None:
    finding = next(iter(machine_findings(machine(None, total=8 * GB))))
    assert (finding.check, finding.state) == ("host.memory", "unknown")
    assert finding.figures["limit"].bytes is None


def test_guessed_cores_are_a_warning() -> None:
    host = machine(8 * GB)
    guessed = replace(host, processor=replace(host.processor, note="a guess"))
    cores = next(finding for finding in machine_findings(guessed) if finding.check == "host.cores")
    assert cores.state == "warning"
    assert "a guess" in cores.sentence


def test_lines_for_people_hold_figures_remedies_and_the_sum() -> None:
    findings = (
        Finding("host.memory", "ok", "much", {"total": Figure(2 * GB, "here")}),
        Finding("container.index", "unknown", "nobody knows"),
        Finding("engine.libraries", "failed", "none", remedy="find them"),
    )
    assert list(diagnosis_lines(Diagnosis(machine(8 * GB), findings)))[1:] == [
        "ok        host.memory       much",
        "                            total: 2.00 GB (here)",
        "unknown   container.index   nobody knows",
        "failed    engine.libraries  none",
        "                            to do: find them",
        "1 ok, 0 warning, 1 unknown, 1 failed",
    ]
    assert Diagnosis(machine(8 * GB), findings).state == "failed"


# What an engine's binary tells.

linux = pytest.mark.skipif(sys.platform != "linux", reason="engines are read as ELF files")

VULKAN = "int vkCreateInstance(void); int main(void) { return vkCreateInstance(); }"
NO_CALL = "int main(void) { return 0; }"
LOADED_LATER = 'const char *name = "vkGetInstanceProcAddr"; int main(void) { return !name; }'
CUDA = "int cudaMalloc(void); int main(void) { return cudaMalloc(); }"

CPU_DEVICE = device("llvmpipe", GB, kind="cpu", pool="unified", api="vulkan")
VULKAN_GPU = device("Radeon", GB, api="vulkan")
CUDA_GPU = device("RTX", GB)


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., Path]:
    """Build a program against libraries of these names, which are empty but for two functions."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build programs with")

    def build(source: str, *libraries: str) -> Path:
        (tmp_path / "api.c").write_text(
            "int vkCreateInstance(void) { return 0; } int cudaMalloc(void) { return 0; }"
        )
        (tmp_path / "engine.c").write_text(source)
        for name in libraries:
            shared = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name]
            subprocess.run([compiler, "api.c", *shared], cwd=tmp_path, check=True, timeout=60)
        linked = [f"-l:{name}" for name in libraries]
        options = ["-L.", "-Wl,--no-as-needed", *linked, "-Wl,-rpath,$ORIGIN", "-o", "engine"]
        subprocess.run([compiler, "engine.c", *options], cwd=tmp_path, check=True, timeout=60)
        return tmp_path / "engine"

    return build


def here(accelerators: Iterable[Any] = (), notes: tuple[str, ...] = ()) -> Host:
    return replace(
        machine(8 * GB),
        kind="live",
        architecture=platform.machine().lower(),
        accelerators=tuple(accelerators),
        notes=notes,
    )


def examined(path: Path, host: Host) -> dict[str, Finding]:
    return {finding.check: finding for finding in engine_findings(path, host, {})}


@linux
@pytest.mark.parametrize(
    ("source", "libraries", "devices", "state", "said"),
    [
        (VULKAN, ["libvulkan.so.1"], [VULKAN_GPU, CPU_DEVICE], "ok", "which shows Radeon"),
        (VULKAN, ["libvulkan.so.1"], [CPU_DEVICE], "warning", "only llvmpipe, a CPU device"),
        (VULKAN, ["libvulkan.so.1"], [CUDA_GPU], "warning", "no Vulkan device; there is RTX"),
        (VULKAN, ["libvulkan.so.1"], [], "warning", "this machine has no Vulkan device"),
        (NO_CALL, ["libvulkan.so.1"], [VULKAN_GPU], "warning", "names no function of Vulkan"),
        (LOADED_LATER, [], [VULKAN_GPU], "ok", "built for Vulkan (vkGetInstanceProcAddr)"),
        (CUDA, ["libcudart.so.12"], [CUDA_GPU], "ok", "built for CUDA (libcudart.so.12)"),
        (CUDA, ["libcudart.so.12"], [VULKAN_GPU], "warning", "no CUDA device; there is Radeon"),
        (NO_CALL, [], [VULKAN_GPU], "warning", "built for the CPU alone"),
        (NO_CALL, [], [CPU_DEVICE], "ok", "built for the CPU alone"),
    ],
)
def test_the_backend_is_held_against_the_devices(
    engine: Callable[..., Path], source: str, libraries: list[str], devices: list[Any], state: str, said: str
) -> None:
    found = examined(engine(source, *libraries), here(devices))
    assert found["engine.backend"].state == state, found
    assert said in found["engine.backend"].sentence
    assert (found["engine.binary"].state, found["engine.libraries"].state) == ("ok", "ok")


@linux
def test_why_a_backend_has_no_device_is_what_to_do(engine: Callable[..., Path]) -> None:
    found = examined(engine(CUDA, "libcudart.so.12"), here(notes=("CUDA: no driver", "Metal: only macOS")))
    assert found["engine.backend"].remedy == "CUDA: no driver"


@linux
def test_a_lost_library_fails(engine: Callable[..., Path]) -> None:
    path = engine(CUDA, "libcudart.so.12")
    (path.parent / "libcudart.so.12").unlink()
    libraries = examined(path, here())["engine.libraries"]
    assert libraries.state == "failed"
    assert "libcudart.so.12 (needed by engine)" in libraries.sentence


@linux
def test_a_binary_of_another_machine_fails_and_tells_no_libraries(engine: Callable[..., Path]) -> None:
    found = examined(engine(NO_CALL), replace(here(), architecture="riscv128"))
    assert found["engine.binary"].state == "failed"
    assert found["engine.libraries"].state == "unknown"


@linux
def test_an_unknown_machine_is_not_another(engine: Callable[..., Path]) -> None:
    recorded = emulate_host(find_profile("host-3gb"))
    assert (
        examined(engine(NO_CALL), replace(recorded, architecture="unknown"))["engine.binary"].state
        == "unknown"
    )


@linux
def test_the_libraries_of_a_recorded_machine_are_not_looked_for(engine: Callable[..., Path]) -> None:
    path = engine(VULKAN, "libvulkan.so.1")
    found = examined(path, replace(here([CUDA_GPU]), kind="emulated"))
    assert "engine.libraries" not in found
    assert found["engine.backend"].state == "unknown"
    assert "no recording shows a Vulkan device; there is RTX" in found["engine.backend"].sentence


@linux
def test_a_library_is_no_engine(engine: Callable[..., Path]) -> None:
    library = engine(NO_CALL, "libvulkan.so.1").with_name("libvulkan.so.1")
    assert examined(library, here())["engine.binary"].state == "failed"


def test_a_script_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("#!/bin/sh\n")
    found = examined(tmp_path / "engine", here())
    assert [(finding.check, finding.state) for finding in found.values()] == [("engine.binary", "unknown")]
