"""The command ``pytest-colibri``: look at a machine, profiles and plans, and write models, without a test."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, get_args

import pytest_colibri
from pytest_colibri.errors import ColibriError, HostMismatch, UsageError

if TYPE_CHECKING:
    from pytest_colibri.container.model import Model
    from pytest_colibri.findings import Finding, State
    from pytest_colibri.host.model import Host
    from pytest_colibri.planner.doctor.report import Diagnosis
    from pytest_colibri.planner.plan import Plan, PlanRequest
    from pytest_colibri.profiles.model import Profile
    from pytest_colibri.subjects.planner import PlannerRequest

FAILED, INTERRUPTED, USAGE, NOTHING_SHOWN, HOST_MISMATCH = 1, 2, 4, 6, 7
MAX_COUNT = 2**31


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status (``docs/verdicts.md``)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int | None] = options.run
    from pytest_colibri.planner.plan import DoesNotFit

    if sys.stdout is None:
        return _end(FAILED, "the output cannot be written: standard output is closed")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not fit its encoding
    try:
        status = run(options)
        sys.stdout.flush()
    except (HostMismatch, DoesNotFit) as error:
        return _end(HOST_MISMATCH, str(error))
    except PlannerFailed as error:
        return _end(FAILED, str(error))
    except ColibriError as error:
        return _end(USAGE, str(error))
    except OSError as error:
        if error.filename is not None:
            return _end(USAGE, f"{error.filename}: {error.strerror}")
        with suppress(OSError):  # what is left of the output would fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _end(FAILED, f"the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        return _end(INTERRUPTED, "interrupted")
    return status or 0


def _end(status: int, sentence: str) -> int:
    """Say why a command ends, and return its status."""
    print(f"pytest-colibri: {_printable(sentence)}", file=sys.stderr)
    return status


def _printable(text: str) -> str:
    """Leave nothing in a text that a terminal obeys: names out of files and drivers are shown to people."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


class _Parser(argparse.ArgumentParser):
    """A parser that ends with the usage status of every other command of this project."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pytest-colibri", description=__doc__)
    parser.add_argument("--version", action="version", version=pytest_colibri.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="check this machine, a model folder and an engine's binary")
    doctor.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL", help="a model folder to check and plan"
    )
    doctor.add_argument("--engine", type=Path, metavar="BINARY", help="an engine to read, never to run")
    doctor.add_argument("--json", action="store_true", help="print JSON (doctor.schema.json)")
    doctor.add_argument(
        "--identities", action="store_true", help="keep UUIDs, home path, host and user names"
    )
    _add_planning_options(doctor)
    doctor.set_defaults(run=_doctor)

    profiles = commands.add_parser("profiles", help="list the hardware profiles, or check and show one")
    profiles.add_argument("profile", nargs="?", metavar="NAME", help="a name or a YAML file")
    profiles.set_defaults(run=_profiles)

    model = commands.add_parser("model", help="write a model to plan or to run, or list the models")
    model.add_argument("name", nargs="?", metavar="NAME", help="one of the list that comes without a name")
    model.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a new or empty folder")
    model.set_defaults(run=_model)

    plan = commands.add_parser("plan", help="plan where the experts of a model go on this machine")
    plan.add_argument("model", type=Path, metavar="MODEL", help="folder with config.json and *.safetensors")
    _add_planning_options(plan)
    plan.add_argument("--explain", action="store_true", help="print the sum, line by line, with its sources")
    others = plan.add_mutually_exclusive_group()
    others.add_argument("--colibri", type=Path, metavar="DIR", help="ask the planner of a colibri checkout")
    others.add_argument("--planner", metavar="COMMAND", help="ask a program (docs/planner-protocol.md)")
    plan.set_defaults(run=_plan)
    return parser


def _add_planning_options(parser: argparse.ArgumentParser) -> None:
    from pytest_colibri.planner.plan import KvType, Policy

    parser.add_argument("--profile", default="auto", metavar="NAME", help="hardware profile (default: auto)")
    parser.add_argument(
        "--emulate", action="store_true", help="plan for the machine that the profile recorded"
    )
    parser.add_argument("--ram", metavar="SIZE", help="RAM budget, such as 100GB")
    parser.add_argument("--vram", metavar="SIZE", help="VRAM budget, such as 16GB")
    parser.add_argument("--context", type=_count, default=4096, metavar="TOKENS", help="default: 4096")
    parser.add_argument(
        "--kv-slots", type=_count, default=1, metavar="COUNT", help="contexts held at the same time (1)"
    )
    parser.add_argument("--kv-type", choices=get_args(KvType), help="type of the KV cache (f32)")
    parser.add_argument(
        "--prompt-width", type=_count, metavar="TOKENS", help="tokens of a prompt computed at once (64)"
    )
    parser.add_argument("--slots", type=_count, metavar="COUNT", help="RAM slots per sparse layer, at most")
    parser.add_argument("--policy", choices=get_args(Policy), help="default: balanced")
    parser.add_argument(
        "--gpu", type=_indices, metavar="INDEX[,INDEX]", help="devices, as the vendor's tool counts them"
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= MAX_COUNT):
        raise argparse.ArgumentTypeError(f"{text!r} is no count from 1 to {MAX_COUNT}")
    return int(text)


def _indices(text: str) -> tuple[int, ...]:
    entries = text.split(",")
    if not all(entry.isascii() and entry.isdecimal() and len(entry) < 10 for entry in entries):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of indices, such as 0 or 0,2")
    return tuple(int(entry) for entry in entries)


def _doctor(options: argparse.Namespace) -> int:
    from pytest_colibri.planner.doctor.report import diagnosis_lines, diagnosis_to_json
    from pytest_colibri.report.privacy import redactor

    diagnosis = _diagnose(options)
    uuids = [device.identity.uuid for device in diagnosis.host.accelerators]
    shown = (lambda value: value) if options.identities else redactor(uuids)
    if options.json:
        print(json.dumps(diagnosis_to_json(diagnosis, shown), indent=1, allow_nan=False))
    else:
        for line in diagnosis_lines(diagnosis):
            print(_printable(str(shown(line)).replace("\n", "?")))
    return _doctor_status(diagnosis.findings)


def _diagnose(options: argparse.Namespace) -> Diagnosis:
    from pytest_colibri.planner.doctor.engine import engine_findings
    from pytest_colibri.planner.doctor.machine import machine_findings
    from pytest_colibri.planner.doctor.report import Diagnosis

    if options.model is not None and not options.model.is_dir():
        what = "not a folder" if options.model.exists() else "no such folder"
        raise UsageError(f"{options.model}: {what}; MODEL is a folder with config.json")
    if options.engine is not None and not options.engine.is_file():
        what = "not a regular file" if options.engine.exists() else "no such file"
        raise UsageError(f"--engine={options.engine}: {what}")
    profile, host, fit = _profile_finding(options)
    findings = [*machine_findings(host), *_witness_findings(host), fit]
    plan = None
    if options.model is not None:
        of_model, plan = _model_findings(options, profile if fit.state == "ok" else None, host)
        findings += of_model
    if options.engine is not None:
        findings += engine_findings(options.engine, host, os.environ)
    return Diagnosis(host, tuple(findings), plan)


def _profile_finding(options: argparse.Namespace) -> tuple[Profile, Host, Finding]:
    from pytest_colibri.findings import Finding
    from pytest_colibri.host.matching import mismatches

    profile, host = _named_profile_and_host(options.profile, emulated=options.emulate)
    if options.profile == "auto":
        return profile, host, Finding("host.profile", "ok", _best_profile(host)[1])
    if reasons := mismatches(profile, host):
        return profile, host, Finding("host.profile", "failed", "; ".join(reasons))
    return (
        profile,
        host,
        Finding("host.profile", "ok", f"it fits the profile {profile.name}: {profile.title}"),
    )


def _witness_findings(host: Host) -> Iterator[Finding]:
    from pytest_colibri.findings import Finding
    from pytest_colibri.judge.trial import dispatch_reach
    from pytest_colibri.witness.drivers import driver_witnesses

    if host.kind != "live":
        return
    reaches = [
        ("witness.dispatch", dispatch_reach("vulkan")),
        *(("witness.counters", witness.reach()) for witness in driver_witnesses()),
    ]
    for check, reach in reaches:
        state: State = "ok" if reach.able else "warning"
        yield Finding(check, state, f"{reach.witness}: {reach.statement}")


def _model_findings(
    options: argparse.Namespace, profile: Profile | None, host: Host
) -> tuple[list[Finding], Plan | None]:
    """Return what is found of a model, and its plan; without a profile that fits, there is none."""
    from pytest_colibri.container.inspection import inspect_container
    from pytest_colibri.planner.doctor.placement import no_placement, placement

    inspection = inspect_container(options.model)
    if inspection.model is None:
        return [*inspection.findings, no_placement("the container is refused")], None
    if profile is None:
        return [*inspection.findings, no_placement("the machine does not fit the profile")], None
    found, plan = placement(_plan_request(options, inspection.model, profile, host))
    return [*inspection.findings, *found], plan


def _doctor_status(findings: Sequence[Finding]) -> int:
    """Return the exit status: what is broken, then what does not fit, then what could not be told."""
    on_fit = ("placement.plan", "host.profile")
    if any(finding.state == "failed" and finding.check not in on_fit for finding in findings):
        return FAILED
    if any(finding.state in ("failed", "unknown") and finding.check in on_fit for finding in findings):
        return HOST_MISMATCH
    if any(finding.state == "unknown" and finding.check.startswith("engine.") for finding in findings):
        return NOTHING_SHOWN
    return 0


def _profiles(options: argparse.Namespace) -> None:
    from pytest_colibri.host.emulated import emulate_host
    from pytest_colibri.profiles.loader import all_profiles, find_profile

    if options.profile is None:
        profiles = sorted(all_profiles(), key=lambda profile: not profile.auto)
        width = max(len(profile.name) for profile in profiles)
        for profile in profiles:
            emulate_host(profile)
            print(f"{profile.name:<{width}} {profile.title}")
        return
    profile = find_profile(options.profile)
    emulate_host(profile)
    print(f"{profile.name}: {profile.title}")
    print(f"backend {profile.backend}, tiers {', '.join(profile.tiers)}, pool {profile.pool or 'none'}")
    for name, value in profile.environment.items():
        print(f"environment {name}={value}")
    for recording in profile.recordings:
        link = f" ({recording.link})" if recording.link else ""
        print(f"recording {recording.tool}: {recording.provenance}{link}")


def _model(options: argparse.Namespace) -> None:
    from pytest_colibri.container.hollow import HOLLOW_MODELS, write_hollow_model
    from pytest_colibri.container.tiny import TINY_MODELS

    tiny = {f"tiny-{name}": name for name in TINY_MODELS}
    if options.name is None:
        for name, what in _model_list():
            print(f"{name:<22} {what}")
        return
    if options.name not in {*tiny, *HOLLOW_MODELS}:
        raise UsageError(f"unknown model {options.name!r}; allowed: {', '.join([*tiny, *HOLLOW_MODELS])}")
    if options.folder is None:
        raise UsageError(f"name a new or empty folder for the model: pytest-colibri model {options.name} DIR")
    _refuse_filled(options.folder)
    if options.name in HOLLOW_MODELS:
        write_hollow_model(options.folder, options.name)
        print(f"{options.folder}: weights are holes in sparse files; for planners only, nothing can run it")
    else:
        _write_tiny(options.folder, tiny[options.name])
        print(f"{options.folder}: complete, with a usage history and the tokens that are right")


def _model_list() -> Iterator[tuple[str, str]]:
    from pytest_colibri.container.hollow import HOLLOW_MODELS
    from pytest_colibri.container.tiny import TINY_MODELS
    from pytest_colibri.units import format_bytes

    for name in TINY_MODELS:
        yield f"tiny-{name}", f"GLM with 5 tiny layers, {name} experts: an engine can run it"
    for name, hollow in HOLLOW_MODELS.items():
        yield name, f"{hollow.title}, {format_bytes(hollow.total_bytes)}: hollow, for planners only"


def _refuse_filled(folder: Path) -> None:
    """Raise UsageError for a folder that holds something: its shards would become part of the model."""
    try:
        filled = any(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; name a new or empty folder") from None
    if filled:
        raise UsageError(f"{folder}: the folder is not empty; name a new or empty one")


def _write_tiny(folder: Path, name: str) -> None:
    """Write a tiny model of the suite, with the reference tokens of the suite as its own."""
    from pytest_colibri.container.tiny import TINY_MODELS, write_tiny_model
    from pytest_colibri.judge.tokens import REFERENCE_FILE
    from pytest_colibri.suite import suite_directory

    stored, group_size = TINY_MODELS[name]
    golden = suite_directory() / "engine" / "golden" / f"tiny-{name}.json"
    try:
        write_tiny_model(folder, stored, group_size=group_size)
        shutil.copyfile(golden, folder / REFERENCE_FILE)
    except OSError as error:
        raise UsageError(f"{folder}: the model cannot be written: {error.strerror}") from None


def _plan(options: argparse.Namespace) -> None:
    from pytest_colibri.container.model import with_history
    from pytest_colibri.container.scan import read_geometry
    from pytest_colibri.planner.exchange import plan_to_json
    from pytest_colibri.planner.explain import explain
    from pytest_colibri.planner.reference import plan

    geometry = read_geometry(options.model)
    profile, host = _profile_and_host(options.profile, emulated=options.emulate)
    if options.colibri or options.planner:
        _ask_planner(options, profile)
        return
    answer = plan(_plan_request(options, with_history(geometry), profile, host))
    print(_printable(explain(answer)) if options.explain else json.dumps(plan_to_json(answer), indent=1))


def _plan_request(options: argparse.Namespace, model: Model, profile: Profile, host: Host) -> PlanRequest:
    """Return what plan and doctor ask, so that neither says of a machine what the other denies."""
    from pytest_colibri.host.matching import matching_accelerators
    from pytest_colibri.subjects.reference_planner import plan_request

    asked = _asked(options, profile)
    devices = matching_accelerators(profile, host)
    known = {device.identity.index: device.identity.name for device in devices}
    for index in asked.gpu_indices or ():
        if index not in known:
            found = ", ".join(f"{number} ({name})" for number, name in sorted(known.items()))
            raise HostMismatch(
                f"--gpu: there is no device {index} that fits the profile {profile.name}; found: {found}"
            )
    request = plan_request(asked, model, host, devices)
    return replace(request, slots_per_layer=options.slots)


def _asked(options: argparse.Namespace, profile: Profile) -> PlannerRequest:
    """Return what can be asked of any planner."""
    from pytest_colibri.planner.environment import engine_variables
    from pytest_colibri.subjects.planner import PlannerRequest

    if options.gpu is not None and profile.backend == "cpu":
        raise UsageError(f"--gpu: the profile {profile.name} plans for the CPU alone")
    return PlannerRequest(
        model=options.model,
        backend=profile.backend,
        ram_bytes=_size("--ram", options.ram),
        vram_bytes=_size("--vram", options.vram),
        context=options.context,
        kv_slots=options.kv_slots,
        kv_type=options.kv_type,
        prompt_width=options.prompt_width,
        gpu_indices=options.gpu,
        policy=options.policy,
        environment={**engine_variables(os.environ), **profile.environment},
    )


def _ask_planner(options: argparse.Namespace, profile: Profile) -> None:
    """Print what another planner answers for this machine, or for the one that the profile recorded."""
    from pytest_colibri.host.stage import Stage
    from pytest_colibri.subjects.checkout import checkout_planner
    from pytest_colibri.subjects.planner_program import planner_program

    if options.explain:
        raise UsageError("--explain: the sum of another planner is not known, only its plan")
    if options.slots is not None:
        raise UsageError("--slots: the planner protocol has no input for it; ask the reference planner")
    planner = checkout_planner(options.colibri) if options.colibri else planner_program(options.planner)
    with TemporaryDirectory(prefix="colibri-stage-") as folder:
        stage = Stage(profile, Path(folder)) if options.emulate else None
        answer = planner.ask(_asked(options, profile), stage)
    if answer.refused is not None:
        raise HostMismatch(f"{planner.name} refuses: {answer.refused}")
    if answer.plan is None:
        raise PlannerFailed(f"{planner.name}: {answer.unsupported or answer.failed}")
    print(json.dumps({"plan": answer.plan, "environment": dict(answer.environment)}, indent=1))


class PlannerFailed(ColibriError):
    """A planner under test gave no answer that can be read, or has no input for what was asked."""


def _profile_and_host(name: str, *, emulated: bool) -> tuple[Profile, Host]:
    """Return the profile and the machine to plan for; HostMismatch when they do not fit."""
    from pytest_colibri.host.matching import mismatches

    profile, host = _named_profile_and_host(name, emulated=emulated)
    if reasons := mismatches(profile, host):
        raise HostMismatch("; ".join(reasons))
    return profile, host


def _named_profile_and_host(name: str, *, emulated: bool) -> tuple[Profile, Host]:
    """Return the profile and the machine, looked at through all interfaces, whether or not they fit."""
    from pytest_colibri.host.emulated import emulate_host
    from pytest_colibri.host.live import ALL_APIS, probe_host
    from pytest_colibri.profiles.loader import find_profile

    if name == "auto":
        if emulated:
            raise UsageError("--emulate needs a named profile; 'auto' looks at the machine that is here")
        host = probe_host(ALL_APIS)
        return _best_profile(host)[0], host
    profile = find_profile(name)
    return profile, emulate_host(profile) if emulated else probe_host(ALL_APIS)


def _best_profile(host: Host) -> tuple[Profile, str]:
    from pytest_colibri.host.matching import best_profile
    from pytest_colibri.profiles.loader import all_profiles
    from pytest_colibri.subjects.program import reference_engine

    return best_profile(all_profiles(), host, reference_engine().backends)


def _size(option: str, text: str | None) -> int | None:
    from pytest_colibri.units import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}={text}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
