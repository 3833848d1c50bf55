"""A session with a profile: machines, subjects, the choice of tests, verdicts, and the end of it all."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import pytest

from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.usage import USAGE_FILE, read_usage
from pytest_colibri.errors import UsageError
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.live import ALL_APIS, probe_host
from pytest_colibri.host.matching import best_profile, matching_accelerators, mismatches
from pytest_colibri.host.model import Host
from pytest_colibri.judge.issues import (
    Issue,
    IssueResult,
    conclude_issues,
    issue_results,
    read_issues,
    select_issues,
)
from pytest_colibri.judge.model import Verdict
from pytest_colibri.judge.planning import PlanTrials
from pytest_colibri.judge.status import Status, conclude
from pytest_colibri.judge.tokens import REFERENCE_FILE, read_token_reference
from pytest_colibri.judge.trial import Trials, dispatch_reach
from pytest_colibri.plugin.options import EVERY_PROFILE, EVIDENCE_FILE, setting, settings, shown_settings
from pytest_colibri.profiles.loader import all_profiles, find_profile, profile_names
from pytest_colibri.profiles.model import Profile, Tier
from pytest_colibri.report.bundle import plan_trial_to_json, trial_to_json, write_bundle
from pytest_colibri.report.privacy import redactor
from pytest_colibri.report.terminal import explanations, verdict_table
from pytest_colibri.subjects.checkout import checkout_planner
from pytest_colibri.subjects.planner import PlannerSubject
from pytest_colibri.subjects.planner_program import planner_program
from pytest_colibri.subjects.program import program_engine, reference_engine
from pytest_colibri.subjects.protocol import EngineSubject
from pytest_colibri.subjects.reference_planner import ReferencePlanner
from pytest_colibri.suite import registry_file
from pytest_colibri.units import parse_bytes
from pytest_colibri.witness.evidence import Reach

VERDICT_PROPERTY = "colibri.verdict"
NOT_APPLICABLE_PROPERTY = "colibri.not_applicable"
QUESTIONS_PROPERTY = "colibri.questions"
TRIALS_KEY = "colibri_trials"
PLANS_KEY = "colibri_plans"
DEFAULT_TIMEOUT_S = 120
MOST_REASONS = 3  # in the outcome of a test; the summary has all
MAX_TIMEOUT_S = 7 * 24 * 3600

Machine = tuple[Profile, Host]

# Backends that the embedded engine does not compute on, and the profile that reaches such a device with it.
CHECKOUT_BACKENDS = {"rocm": "amd-vulkan", "metal": "apple-vulkan"}
CHECKOUT_SENTENCE = (
    "rocm and metal judge the engine of a checkout (--colibri), which this version cannot run yet: the "
    "embedded engine does not compute on them. It can be judged on the same device through Vulkan: --profile="
)


class ColibriSession:
    """What an active plugin holds: profile, host, subject, witnesses, verdicts, and the end of it all."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.emulated = bool(setting(config, "emulate"))
        self.verdicts: dict[Verdict, None] = {}  # each once, in the order in which they were reached
        self.trials_seen: list[dict[str, object]] = []
        self.plans_seen: list[dict[str, object]] = []
        self.not_applicable: dict[str, str] = {}
        self.unasked: dict[str, int] = {}  # questions of each report that no test has put yet
        self.deselected: dict[str, int] = {}
        self.refusal: tuple[int, str] | None = None
        self.conclusion: tuple[int, str] | None = None
        self.auto_reason: str | None = None
        self.trials: Trials | None = None
        self.plan_trials: PlanTrials | None = None
        self._machines: dict[str, Machine] = {}
        self._read_options()
        self._read_subjects()
        self._read_profile(str(setting(config, "profile")))
        self.issues = _find_issues(settings(config, "issue"))
        if self.issues and setting(config, "model"):
            raise UsageError("--issue asks about the model of the report: leave --model out")

    def _read_options(self) -> None:
        model = setting(self.config, "model")
        if model:
            _check_model(Path(str(model)))
        self.evidence = Path(str(setting(self.config, "evidence") or EVIDENCE_FILE))
        if not os.access(self.evidence.parent, os.W_OK) or self.evidence.is_dir():
            raise UsageError(
                f"--colibri-evidence={self.evidence}: cannot be written; give a file in a folder"
            )
        floor = setting(self.config, "memory-floor")
        self.floor_bytes = None if floor is None else _parse_size("--colibri-memory-floor", str(floor))
        self.timeout_s = _parse_seconds(str(setting(self.config, "timeout") or DEFAULT_TIMEOUT_S))

    def _read_subjects(self) -> None:
        engine, shaders = setting(self.config, "engine"), setting(self.config, "shaders")
        if shaders and not engine:
            raise UsageError("--colibri-shaders belongs to --colibri-engine: give both, or none")
        self.subject: EngineSubject = (
            program_engine(str(engine), Path(str(shaders)) if shaders else None)
            if engine
            else reference_engine()
        )
        checkout, planner = setting(self.config, "checkout"), setting(self.config, "planner")
        if checkout and planner:
            raise UsageError("--colibri and --colibri-planner name two planners: give one")
        if checkout and engine:
            raise UsageError("--colibri and --colibri-engine name two engines: give one")
        self.planner: PlannerSubject = _foreign_planner(checkout, planner) or ReferencePlanner(
            profile=lambda: self.profile
        )
        self.judges_engine = not self.emulated and not checkout and bool(engine or not planner)

    def _read_profile(self, name: str) -> None:
        if name == EVERY_PROFILE and not self.emulated:
            raise UsageError("--profile=all needs --emulate: no machine is all of them")
        if name == "auto" and self.emulated:
            raise UsageError("--emulate needs a named profile; 'auto' looks at the machine that is here")
        self.everything = name == EVERY_PROFILE
        self.profile_or_auto = None if name in (EVERY_PROFILE, "auto") else find_profile(name)

    @property
    def title(self) -> str:
        """How this session is called in reports: its profile, or ``all``."""
        return EVERY_PROFILE if self.everything else self.profile.name

    @cached_property
    def profile(self) -> Profile:
        """The profile of this session; 'auto' looks at the host for the one that fits best."""
        if self.profile_or_auto is not None:
            return self.profile_or_auto
        assert not self.everything, "a session of every profile has no machine of its own"
        profile, self.auto_reason = best_profile(all_profiles(), self.host, self.subject.backends)
        return profile

    @cached_property
    def host(self) -> Host:
        """The machine: probed here, or replayed from the profile's recordings."""
        if self.emulated:
            return emulate_host(self.profile)
        known = self.profile_or_auto
        return probe_host(ALL_APIS if known is None else frozenset({known.backend} - {"cpu"}))

    def machine(self, name: str | None) -> Machine:
        """Return the machine that the profile ``name`` recorded; without a name, that of this session."""
        if name is None:
            return self.profile, self.host
        if name not in self._machines:
            profile = find_profile(name)
            self._machines[name] = profile, emulate_host(profile)
        return self._machines[name]

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """The machines that this session may speak of."""
        names = profile_names() if self.everything else (None,)
        return tuple(map(self.machine, names))

    def why_not_applicable(self, issue: str, profile: Profile, host: Host) -> str | None:
        """Say why a report cannot be confirmed on a machine; None where it can, and without a report."""
        kinds = [known.machine for known in self.issues if known.id == issue]
        return kinds[0].mismatch(profile, host) if kinds else None

    @cached_property
    def redact(self) -> Callable[[object], object]:
        """What every report passes through, so that nothing private leaves; nothing changes on request."""
        if setting(self.config, "identities"):
            return lambda value: value
        hosts = (host for _, host in self.machines)
        return redactor(device.identity.uuid for host in hosts for device in host.accelerators)

    @cached_property
    def reach(self) -> Reach:
        """What the dispatch witness can see of this backend here."""
        return dispatch_reach(self.profile.backend)

    def trials_in(self, directory: Path) -> Trials:
        """Return what plans and runs the cases of this session; its files go to ``directory``."""
        if self.trials is None:
            self.trials = Trials(
                self.profile,
                self.host,
                self.subject,
                directory,
                reach=self.reach,
                floor_bytes=self.floor_bytes,
                timeout_s=self.timeout_s,
            )
        return self.trials

    def plan_trials_in(self, directory: Path) -> PlanTrials:
        """Return what puts questions to the planner of this session; its files go to ``directory``."""
        if self.plan_trials is None:
            self.plan_trials = PlanTrials(self.planner, directory, emulated=self.emulated)
        return self.plan_trials

    def pytest_sessionstart(self) -> None:
        """Find out whether this machine can show anything for the profile, before anything is collected."""
        if self.config.option.collectonly or hasattr(self.config, "workerinput"):
            return
        try:
            self.refusal = self._refusal()
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None

    def _refusal(self) -> tuple[int, str] | None:
        """Return why nothing can be shown here, None when the run may go on."""
        if self.everything:
            return None
        backend, backends = self.profile.backend, self.subject.backends
        uncomputed = self.judges_engine and backends is not None and backend not in backends
        if uncomputed and backend in CHECKOUT_BACKENDS:
            return Status.NOTHING_SHOWN, CHECKOUT_SENTENCE + CHECKOUT_BACKENDS[backend]
        reasons = mismatches(self.profile, self.host)
        if reasons:
            return Status.HOST_MISMATCH, "; ".join(reasons)
        if uncomputed:
            return Status.NOTHING_SHOWN, f"the embedded engine does not compute on {backend} in this version"
        return None

    def pytest_report_header(self) -> list[str]:
        """Say what is judged, on which machine, and who watches."""
        if self.everything:
            lines = [
                f"colibri: every profile, each on the machine that it recorded: {len(profile_names())}",
                f"colibri: planner: {self.planner.name} ({self.planner.origin})",
            ]
        elif self.config.option.collectonly:
            lines = [f"colibri: profile {self.profile_or_auto.name if self.profile_or_auto else 'auto'}"]
        else:
            lines = list(self._header())
        lines += [f"colibri: issue {issue.id}: {issue.title}" for issue in self.issues]
        return [*lines, f"colibri: options: {', '.join(shown_settings(self.config))}"]

    def _header(self) -> Iterator[str]:
        profile, host = self.profile, self.host
        yield f"colibri: profile {profile.name} ({_short(profile.path)}): {profile.title}"
        if self.auto_reason:
            yield f"colibri: chosen by auto: {self.auto_reason}"
        yield (
            f"colibri: host: {host.kind} {host.system} {host.architecture}, "
            f"{host.processor.physical_cores} cores, memory {host.memory.limit}"
        )
        for note in host.notes:
            yield f"colibri: host: {note}"
        if self.refusal is not None:
            return
        yield f"colibri: planner: {self.planner.name} ({self.planner.origin})"
        if self.emulated:
            yield "colibri: emulated host: plans are judged, no engine is run"
        if not self.judges_engine:
            return
        yield f"colibri: subject: {self.subject.name} on {profile.backend}"
        for accelerator in self._accelerators():
            yield f"colibri: device: {accelerator}"
        yield f"colibri: witness: {self.reach.witness}: {self.reach.statement}"
        yield "colibri: witness: memory sampler: process tree and available memory"

    def _accelerators(self) -> list[str]:
        return [device.describe() for device in matching_accelerators(self.profile, self.host)[:1]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool | None:
        """Collect nothing where nothing can be shown."""
        return True if self.refusal else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        """Run nothing where nothing can be shown."""
        return True if self.refusal else None

    @pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what does not apply, count it, and keep the tests of one device on one worker."""
        _count_questions(items)
        kept, dropped = [], []
        for item in items:
            reason = self._why_deselected(item)
            if reason is None:
                kept.append(item)
                if item.get_closest_marker("colibri_engine") and config.pluginmanager.hasplugin("xdist"):
                    item.add_marker(pytest.mark.xdist_group("colibri-device"))
            else:
                dropped.append(item)
                self.deselected[reason] = self.deselected.get(reason, 0) + 1
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    def _why_deselected(self, item: pytest.Item) -> str | None:
        if getattr(item, "callspec", None) is not None and item.name.endswith("[NOTSET]"):
            return "questions to a planner, since none decides these issues"
        if item.get_closest_marker("colibri_engine"):
            if self.emulated:
                return "engine checks, since the host is emulated"
            if not self.judges_engine:
                return "engine checks, since only a planner is judged"
            if self.issues:
                return "engine checks, since they decide none of the issues in this version"
        marker = item.get_closest_marker("colibri_tier")
        if marker is None or (self.profile_or_auto is None and self.config.option.collectonly):
            return None
        tier = _tier_of(item, marker)
        return None if tier in self.profile.tiers else f"checks of the tier {tier}, which the profile has not"

    def settle(self, item: pytest.Item, case: object, verdicts: Iterable[Verdict]) -> None:
        """Record the verdicts of a case, and give the test that asks its outcome."""
        rows: Any = self.redact([{**asdict(verdict), "case": str(case)} for verdict in verdicts])
        for row in rows:
            item.user_properties.append((VERDICT_PROPERTY, json.dumps(row)))
        broken = [_in_words(row) for row in rows if row["state"] == "broken"]
        if broken:
            more = f"; and {len(broken) - MOST_REASONS} more" if len(broken) > MOST_REASONS else ""
            pytest.fail("; ".join(broken[:MOST_REASONS]) + more, pytrace=False)
        states = {row["state"] for row in rows}
        if "unwitnessed" in states or "held" not in states:
            unheld = [_in_words(row) for row in rows if row["state"] != "held"]
            pytest.skip("; ".join(unheld) or "nothing is claimed in this case")

    def skip_not_applicable(self, item: pytest.Item, issue: str, reason: str) -> None:
        """Skip a test that says nothing on this machine; for an issue the reason is kept."""
        if issue:
            item.user_properties.append((NOT_APPLICABLE_PROPERTY, json.dumps({issue: reason})))
        pytest.skip(f"not applicable: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the verdicts of every test, whichever process ran it."""
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == VERDICT_PROPERTY:
                    self.verdicts[Verdict(**json.loads(str(value)))] = None
                elif name == NOT_APPLICABLE_PROPERTY:
                    self.not_applicable.update(json.loads(str(value)))
                elif name == QUESTIONS_PROPERTY:
                    issue, count = json.loads(str(value))
                    self.unasked[issue] = self.unasked.get(issue, count) - 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take over the trials of a worker that is done."""
        output = getattr(node, "workeroutput", {})
        self.trials_seen += output.get(TRIALS_KEY, [])
        self.plans_seen += output.get(PLANS_KEY, [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Conclude, write the evidence, and set the exit status."""
        if self.trials is not None:
            self.trials_seen += [trial_to_json(trial) for trial in self.trials.done]
        if self.plan_trials is not None:
            self.plans_seen += [plan_trial_to_json(trial) for trial in self.plan_trials.done]
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput |= {TRIALS_KEY: self.trials_seen, PLANS_KEY: self.plans_seen}
        elif not self.config.option.collectonly:
            self.conclusion = self.refusal or self._conclude(exitstatus)
            if self.refusal is None:
                self._write_evidence()
            session.exitstatus = self.conclusion[0]

    def _conclude(self, exitstatus: int) -> tuple[int, str]:
        """Return status and sentence of the verdicts, or those of pytest where it did not come to its end."""
        status, sentence = self._conclude_issues() if self.issues else self._conclude_verdicts()
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not self.issues:
            return exitstatus, "no test of the suite was run, so nothing was shown"
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            return status, sentence
        if exitstatus == pytest.ExitCode.TESTS_FAILED and status != exitstatus:
            return exitstatus, f"a test failed for a reason that is no verdict; of the verdicts: {sentence}"
        if exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
            return exitstatus, f"the run is incomplete; up to its end: {sentence}"
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return exitstatus, f"pytest ended with a status of its own; of the verdicts: {sentence}"
        return status, sentence

    def _conclude_verdicts(self) -> tuple[int, str]:
        backend = "cpu" if self.everything else self.profile.backend
        status, sentence = conclude(
            self.verdicts, backend, plans_only=not self.judges_engine, emulated=self.emulated
        )
        if status == Status.HELD and setting(self.config, "checkout") and not self.emulated:
            return Status.NOTHING_SHOWN, f"{sentence}; the engine of a checkout cannot be run in this version"
        return status, sentence

    def _conclude_issues(self) -> tuple[int, str]:
        return conclude_issues(self.issue_results, emulated=self.emulated)

    @cached_property
    def issue_results(self) -> list[IssueResult]:
        """What became of each half of the reports that were asked for, once all tests have run."""
        return [result for issue in self.issues for result in self._results_of(issue)]

    def _results_of(self, issue: Issue) -> Iterator[IssueResult]:
        mismatch = None if self.everything else issue.machine.mismatch(*self.machine(None))
        return issue_results(
            issue,
            self.verdicts,
            mismatch,
            self.not_applicable.get(issue.id),
            unasked=self.unasked.get(issue.id, 0),
            emulated=self.emulated,
        )

    def _write_evidence(self) -> None:
        """Write the evidence file; when that fails, no run ends as if all were well."""
        assert self.conclusion is not None
        status, sentence = self.conclusion
        try:
            write_bundle(
                self.evidence,
                shown_settings(self.config),
                self.planner,
                self.machines,
                (self.reach,) if self.judges_engine else (),
                self.verdicts,
                self.trials_seen,
                self.plans_seen,
                self.issue_results,
                self.conclusion,
                self.redact,
            )
        except UsageError as error:
            self.conclusion = (status or Status.USAGE), f"{sentence}; {error}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table of verdicts, the reasons, the evidence file, and the conclusion."""
        if self.conclusion is None:
            return

        writer = terminalreporter
        writer.section("colibri verdicts")
        if self.verdicts:
            width = self.config.get_terminal_writer().fullwidth
            writer.write(
                verdict_table(
                    list(self.verdicts),
                    width=width,
                    color=writer.hasmarkup,
                    ascii_only=not _can_print("─"),
                    every_case=writer.verbosity > 0,
                )
            )
        for line in explanations(self.verdicts):
            writer.write_line(line)
        for reason, count in self.deselected.items():
            writer.write_line(f"left out: {count} {reason}")
        if self.refusal is None:
            for result in self.issue_results:
                writer.write_line(str(result))
            writer.write_line(f"evidence: {self.evidence}")
        status, sentence = self.conclusion
        writer.write_line(f"{self.title}: {sentence} (exit status {int(status)})", bold=True)


def _find_issues(names: tuple[str, ...]) -> tuple[Issue, ...]:
    if not names:
        return ()
    return select_issues(read_issues(registry_file()), names)


def _foreign_planner(checkout: str | bool | None, command: str | bool | None) -> PlannerSubject | None:
    if checkout:
        return checkout_planner(Path(str(checkout)))
    if command:
        return planner_program(str(command), "--colibri-planner")
    return None


def _check_model(folder: Path) -> None:
    read_geometry(folder)
    if (folder / USAGE_FILE).exists():
        read_usage(folder / USAGE_FILE)
    reference = folder / REFERENCE_FILE
    if reference.is_file():
        read_token_reference(reference)


def _count_questions(items: Iterable[pytest.Item]) -> None:
    """Let each test that puts a question of a report say how many there are, before others leave some out."""
    issues = {item: _issue_of(item) for item in items}
    counts = Counter(issues.values())
    for item, issue in issues.items():
        if issue:
            item.user_properties.append((QUESTIONS_PROPERTY, json.dumps([issue, counts[issue]])))


def _issue_of(item: pytest.Item) -> str:
    """Return the report whose question a test puts, an empty text without one."""
    question = getattr(getattr(item, "callspec", None), "params", {}).get("plan_question")
    return question[1].issue if isinstance(question, tuple) else ""


def _tier_of(item: pytest.Item, marker: pytest.Mark) -> str:
    allowed = get_args(Tier)
    if len(marker.args) != 1 or marker.kwargs or marker.args[0] not in allowed:
        raise pytest.UsageError(f"{item.nodeid}: colibri_tier takes one of {', '.join(allowed)}")
    return str(marker.args[0])


def _parse_size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}={text}: {error}") from None


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise UsageError(f"--colibri-timeout={text}: write seconds, more than 0 and at most {MAX_TIMEOUT_S}")
    return seconds


def _can_print(character: str) -> bool:
    try:
        character.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name


def _in_words(row: dict[str, str | None]) -> str:
    phase = f", {row['phase']}" if row["phase"] else ""
    return f"{row['state']}: {row['claim']}{phase}: {row['reason']}"
