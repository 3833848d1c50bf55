"""The pytest plugin: options, markers, fixtures, the choice of tests, header, summary and exit status.

Without a profile it registers options and markers and does nothing else. Everything heavy is imported where
it is used, so that a pytest start without a profile pays nothing for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

from pytest_colibri.errors import UsageError

if TYPE_CHECKING:
    from pytest_colibri.host.model import Host
    from pytest_colibri.judge.issues import Issue, IssueResult
    from pytest_colibri.judge.model import Settle, Verdict
    from pytest_colibri.judge.planning import PlanTrials
    from pytest_colibri.judge.trial import Trials
    from pytest_colibri.profiles.model import Profile
    from pytest_colibri.subjects.planner import PlannerSubject
    from pytest_colibri.subjects.protocol import EngineSubject
    from pytest_colibri.witness.evidence import Reach

    Machine = tuple[Profile, Host]

VERDICT_PROPERTY = "colibri.verdict"
NOT_APPLICABLE_PROPERTY = "colibri.not_applicable"
TRIALS_KEY = "colibri_trials"
PLANS_KEY = "colibri_plans"
EVERY_PROFILE = "all"
EVIDENCE_FILE = "colibri-evidence.json"
DEFAULT_TIMEOUT_S = 120
MAX_TIMEOUT_S = 7 * 24 * 3600
SWITCHES = {"1": True, "true": True, "yes": True, "on": True} | dict.fromkeys(
    ("", "0", "false", "no", "off"), False
)


@dataclass(frozen=True)
class Option:
    """A setting with its long option, ini twin ``colibri_NAME`` and environment twin ``COLIBRI_NAME``."""

    name: str
    help: str
    metavar: str | None = None
    alias: str | None = None
    repeatable: bool = False

    @property
    def flag(self) -> str:
        """The long option, which no other plugin owns."""
        return f"--colibri-{self.name}"

    @property
    def dest(self) -> str:
        """The name under which pytest keeps it, of its ini twin too."""
        return f"colibri_{self.name.replace('-', '_')}"


OPTIONS = (
    Option("profile", "hardware profile: a name, a YAML file, 'auto', or 'all'", "NAME", "--profile"),
    Option(
        "emulate", "judge plans on the host that the profile recorded; no engine is run", None, "--emulate"
    ),
    Option("model", "model folder to run instead of the suite's tiny models", "DIR", "--model"),
    Option("issue", "public report to confirm (may be repeated; see docs/issues.md)", "ID", "--issue", True),
    Option("checkout", "colibri checkout whose planner is judged", "DIR", "--colibri"),
    Option("planner", "planner to judge: a command that speaks the planner protocol", "COMMAND"),
    Option("engine", "engine to judge: a command that speaks the engine protocol", "COMMAND"),
    Option("shaders", "folder with the SPIR-V files of that engine, to tell its pieces apart", "DIR"),
    Option("evidence", f"file that receives the evidence (default: {EVIDENCE_FILE})", "FILE"),
    Option("timeout", "seconds that one run of an engine may take (default: 120)", "SECONDS"),
    Option("memory-floor", "stop an engine when less than this is available, such as 2GB", "SIZE"),
    Option("identities", "keep UUIDs, host and user names in the evidence"),
)

# Who else registers one of our aliases, by distribution and by the name of its pytest11 entry point. A second
# registration makes pytest abort, and catching that is too late: so look before registering.
ALIAS_OWNERS = {"--profile": {"pytest-profiling": "profiling", "pytest-profiles": "pytest_profiles"}}

MARKERS = (
    "colibri_engine: runs an engine; deselected on an emulated host",
    "colibri_tier(name): judges a tier ('vram', 'ram' or 'disk'); deselected where the profile claims none",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register every option in one group, with its twins; aliases only where nobody else owns them."""
    group = parser.getgroup("colibri", "hardware conformance (pytest-colibri)")
    for option in OPTIONS:
        names = [option.flag]
        if option.alias and not _is_owned(option.alias, pluginmanager):
            names.append(option.alias)
        if option.metavar is None:
            group.addoption(*names, dest=option.dest, action="store_true", default=None, help=option.help)
            parser.addini(option.dest, option.help, type="bool", default=None)
        else:
            action = "append" if option.repeatable else "store"
            group.addoption(
                *names,
                dest=option.dest,
                metavar=option.metavar,
                action=action,
                default=None,
                help=option.help,
            )
            parser.addini(option.dest, option.help, default=None)


def _is_owned(alias: str, pluginmanager: pytest.PytestPluginManager) -> bool:
    autoload = "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ
    for distribution, entry_point in ALIAS_OWNERS.get(alias, {}).items():
        if pluginmanager.is_blocked(entry_point):
            continue
        try:
            metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            continue
        if autoload or pluginmanager.has_plugin(entry_point):
            return True
    return False


def setting(config: pytest.Config, name: str) -> str | bool | None:
    """Return a setting: the command line wins over the environment, and that over the ini file."""
    option = next(option for option in OPTIONS if option.name == name)
    value: str | bool | None = config.getoption(option.dest)
    if value is None:
        value = os.environ.get(option.dest.upper()) or config.getini(option.dest)
    if option.metavar is None and isinstance(value, str):
        if value.lower() not in SWITCHES:
            raise pytest.UsageError(
                f"{option.dest.upper()}={value}: write one of {', '.join(word for word in SWITCHES if word)}"
            )
        return SWITCHES[value.lower()]
    if value == "" and config.getoption(option.dest) is not None:
        raise pytest.UsageError(f"{option.flag}: give a {option.metavar}, or leave the option out")
    return value or None


def settings(config: pytest.Config, name: str) -> tuple[str, ...]:
    """Return the values of an option that may be repeated; its twins hold them with spaces between."""
    option = next(option for option in OPTIONS if option.name == name)
    given: list[str] | None = config.getoption(option.dest)
    if given is not None:
        return tuple(given)
    return tuple(str(os.environ.get(option.dest.upper()) or config.getini(option.dest) or "").split())


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; with a profile, read it and become active. A bad one is a usage error."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if setting(config, "profile") is None:
        if settings(config, "issue"):
            raise pytest.UsageError(
                "--issue needs a machine: give --profile=NAME (of yours; with --emulate of a recorded one)"
            )
        return
    try:
        session = ColibriSession(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(session, "colibri-session")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(suite_directory())]


def suite_directory() -> Path:
    """Return where the conformance suite is: inside an installed package, else beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "_suite"
    return installed if installed.is_dir() else package.parent / "conformance"


class ColibriSession:
    """What an active plugin holds: profile, host, subject, witnesses, verdicts, and the end of it all."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.emulated = bool(setting(config, "emulate"))
        self.verdicts: dict[Verdict, None] = {}  # each once, in the order in which they were reached
        self.trials_seen: list[dict[str, object]] = []
        self.plans_seen: list[dict[str, object]] = []
        self.not_applicable: dict[str, str] = {}
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
        from pytest_colibri.subjects.program import program_engine, reference_engine

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
        self.foreign_planner = _foreign_planner(checkout, planner)
        self.judges_engine = not self.emulated and not checkout and bool(engine or not planner)

    def _read_profile(self, name: str) -> None:
        if name == EVERY_PROFILE and not self.emulated:
            raise UsageError("--profile=all needs --emulate: no machine is all of them")
        if name == "auto" and self.emulated:
            raise UsageError("--emulate needs a named profile; 'auto' looks at the machine that is here")
        self.everything = name == EVERY_PROFILE
        self.profile_or_auto = None if name in (EVERY_PROFILE, "auto") else _find_profile(name)

    @cached_property
    def planner(self) -> PlannerSubject:
        """The planner under test: the embedded one, where no other is named."""
        from pytest_colibri.subjects.reference_planner import ReferencePlanner

        return self.foreign_planner or ReferencePlanner()

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
        from pytest_colibri.host.matching import best_profile
        from pytest_colibri.profiles.loader import all_profiles

        profile, self.auto_reason = best_profile(all_profiles(), self.host, self.subject.backends)
        return profile

    @cached_property
    def host(self) -> Host:
        """The machine: probed here, or replayed from the profile's recordings."""
        if self.emulated:
            from pytest_colibri.host.emulated import emulate_host

            return emulate_host(self.profile)
        from pytest_colibri.host.live import ALL_APIS, probe_host

        known = self.profile_or_auto
        return probe_host(ALL_APIS if known is None else frozenset({known.backend} - {"cpu"}))

    def machine(self, name: str | None) -> Machine:
        """Return the machine that the profile ``name`` recorded; without a name, that of this session."""
        if name is None:
            return self.profile, self.host
        if name not in self._machines:
            from pytest_colibri.host.emulated import emulate_host

            profile = _find_profile(name)
            self._machines[name] = profile, emulate_host(profile)
        return self._machines[name]

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """The machines that this session may speak of."""
        names = _profile_names() if self.everything else (None,)
        return tuple(map(self.machine, names))

    def why_not_applicable(self, issue: str, profile: Profile, host: Host) -> str | None:
        """Say why a report cannot be confirmed on a machine; None where it can, and without a report."""
        kinds = [known.machine for known in self.issues if known.id == issue]
        return kinds[0].mismatch(profile, host) if kinds else None

    @cached_property
    def redact(self) -> Callable[[object], object]:
        """What every report passes through, so that nothing private leaves; nothing changes on request."""
        from pytest_colibri.report.privacy import redactor

        if setting(self.config, "identities"):
            return lambda value: value
        hosts = (host for _, host in self.machines)
        return redactor(device.identity.uuid for host in hosts for device in host.accelerators)

    @cached_property
    def reach(self) -> Reach:
        """What the dispatch witness can see of this backend here."""
        from pytest_colibri.judge.trial import dispatch_reach

        return dispatch_reach(self.profile.backend)

    def trials_in(self, directory: Path) -> Trials:
        """Return what plans and runs the cases of this session; its files go to ``directory``."""
        from pytest_colibri.judge.trial import Trials

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
        from pytest_colibri.judge.planning import PlanTrials

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
        from pytest_colibri.host.matching import mismatches
        from pytest_colibri.judge.status import Status

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
                f"colibri: every profile, each on the machine that it recorded: {len(_profile_names())}",
                f"colibri: planner: {self.planner.name}",
            ]
        elif self.config.option.collectonly:
            lines = [f"colibri: profile {self.profile_or_auto.name if self.profile_or_auto else 'auto'}"]
        else:
            lines = list(self._header())
        lines += [f"colibri: issue {issue.id}: {issue.title}" for issue in self.issues]
        chosen = [
            f"{o.name}={value}" for o in OPTIONS if (value := _shown_setting(self.config, o)) is not None
        ]
        return [*lines, f"colibri: options: {', '.join(chosen)}"]

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
        yield f"colibri: planner: {self.planner.name}"
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
        from pytest_colibri.host.matching import matching_accelerators

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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the verdicts of every test, whichever process ran it."""
        from pytest_colibri.judge.model import Verdict

        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == VERDICT_PROPERTY:
                    self.verdicts[Verdict(**json.loads(str(value)))] = None
                elif name == NOT_APPLICABLE_PROPERTY:
                    self.not_applicable.update(json.loads(str(value)))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take over the trials of a worker that is done."""
        output = getattr(node, "workeroutput", {})
        self.trials_seen += output.get(TRIALS_KEY, [])
        self.plans_seen += output.get(PLANS_KEY, [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Conclude, write the evidence, and set the exit status."""
        from pytest_colibri.report.bundle import plan_trial_to_json, trial_to_json

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
        from pytest_colibri.judge.status import Status, conclude

        backend = "cpu" if self.everything else self.profile.backend
        status, sentence = conclude(self.verdicts, backend, plans_only=not self.judges_engine)
        if status == Status.HELD and setting(self.config, "checkout") and not self.emulated:
            return Status.NOTHING_SHOWN, f"{sentence}; the engine of a checkout cannot be run in this version"
        return status, sentence

    def _conclude_issues(self) -> tuple[int, str]:
        from pytest_colibri.judge.issues import conclude_issues

        return conclude_issues(self.issue_results, emulated=self.emulated)

    @cached_property
    def issue_results(self) -> list[IssueResult]:
        """What became of each half of the reports that were asked for, once all tests have run."""
        from pytest_colibri.judge.issues import issue_results

        return [
            result
            for issue in self.issues
            for result in issue_results(
                issue, self.verdicts, self.not_applicable.get(issue.id), emulated=self.emulated
            )
        ]

    def _write_evidence(self) -> None:
        """Write the evidence file; when that fails, no run ends as if all were well."""
        from pytest_colibri.judge.status import Status
        from pytest_colibri.report.bundle import write_bundle

        assert self.conclusion is not None
        status, sentence = self.conclusion
        try:
            write_bundle(
                self.evidence,
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
        from pytest_colibri.report.terminal import explanations, verdict_table

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


# Backends that the embedded engine does not compute on, and the profile that reaches such a device with it.
CHECKOUT_BACKENDS = {"rocm": "amd-vulkan", "metal": "apple-vulkan"}
CHECKOUT_SENTENCE = (
    "rocm and metal judge a checkout (--colibri), which this version cannot do yet: the embedded engine does "
    "not compute on them. It can be judged on the same device through Vulkan: --profile="
)


def _find_profile(name: str) -> Profile:
    from pytest_colibri.profiles.loader import find_profile

    return find_profile(name)


def _profile_names() -> tuple[str, ...]:
    from pytest_colibri.profiles.loader import profile_names

    return profile_names()


def _find_issues(names: tuple[str, ...]) -> tuple[Issue, ...]:
    if not names:
        return ()
    from pytest_colibri.judge.issues import read_issues, select_issues

    return select_issues(read_issues(registry_file()), names)


def registry_file() -> Path:
    """Return where the registry of public reports is: beside the tests that decide them."""
    return suite_directory() / "issues.yaml"


def _foreign_planner(checkout: str | bool | None, command: str | bool | None) -> PlannerSubject | None:
    if checkout:
        from pytest_colibri.subjects.checkout import checkout_planner

        return checkout_planner(Path(str(checkout)))
    if command:
        from pytest_colibri.subjects.planner_program import planner_program

        return planner_program(str(command), "--colibri-planner")
    return None


def _shown_setting(config: pytest.Config, option: Option) -> str | bool | None:
    return (
        ",".join(settings(config, option.name)) or None if option.repeatable else setting(config, option.name)
    )


def _check_model(folder: Path) -> None:
    from pytest_colibri.container.scan import read_geometry
    from pytest_colibri.container.usage import USAGE_FILE, read_usage
    from pytest_colibri.judge.tokens import REFERENCE_FILE, read_token_reference

    read_geometry(folder)
    if (folder / USAGE_FILE).exists():
        read_usage(folder / USAGE_FILE)
    reference = folder / REFERENCE_FILE
    if reference.is_file():
        read_token_reference(reference)


def _tier_of(item: pytest.Item, marker: pytest.Mark) -> str:
    from pytest_colibri.profiles.model import Tier

    allowed = get_args(Tier)
    if len(marker.args) != 1 or marker.kwargs or marker.args[0] not in allowed:
        raise pytest.UsageError(f"{item.nodeid}: colibri_tier takes one of {', '.join(allowed)}")
    return str(marker.args[0])


def _parse_size(option: str, text: str) -> int:
    from pytest_colibri.units import parse_bytes

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


def _session(config: pytest.Config) -> ColibriSession:
    session = config.pluginmanager.get_plugin("colibri-session")
    if not isinstance(session, ColibriSession):
        pytest.fail("this test needs a hardware profile: give --profile=NAME (see --help)", pytrace=False)
    return session


@pytest.fixture(scope="session")
def colibri_session(pytestconfig: pytest.Config) -> ColibriSession:
    """Return this session: its machines, its subjects, and the reports that it is to confirm."""
    return _session(pytestconfig)


@pytest.fixture(scope="session")
def colibri_profile(pytestconfig: pytest.Config) -> Profile:
    """Return the hardware profile of this session."""
    return _session(pytestconfig).profile


@pytest.fixture(scope="session")
def colibri_host(pytestconfig: pytest.Config) -> Host:
    """Return the machine: probed, or emulated from the profile's recordings."""
    return _session(pytestconfig).host


@pytest.fixture(scope="session")
def colibri_trials(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Return what plans and runs the cases of this session, each once."""
    return _session(pytestconfig).trials_in(tmp_path_factory.mktemp("colibri"))


@pytest.fixture(scope="session")
def colibri_plan_trials(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> PlanTrials:
    """Return what puts questions to the planner under test, and judges its answers."""
    return _session(pytestconfig).plan_trials_in(tmp_path_factory.mktemp("stages"))


@pytest.fixture
def colibri_settle(request: pytest.FixtureRequest) -> Settle:
    """Return the function that records the verdicts of a case and gives the test its outcome.

    A broken claim fails the test. What was not witnessed, or where nothing was held, skips it: it is no pass,
    and the exit status of the session says so.
    """

    def settle(case: object, verdicts: Iterable[Verdict]) -> None:
        from dataclasses import asdict

        session = _session(request.config)
        rows: Any = session.redact([{**asdict(verdict), "case": str(case)} for verdict in verdicts])
        for row in rows:
            request.node.user_properties.append((VERDICT_PROPERTY, json.dumps(row)))
        broken = [_in_words(row) for row in rows if row["state"] == "broken"]
        if broken:
            pytest.fail("; ".join(broken), pytrace=False)
        states = {row["state"] for row in rows}
        if "unwitnessed" in states or "held" not in states:
            pytest.skip("; ".join(_in_words(row) for row in rows if row["state"] != "held"))

    return settle


@pytest.fixture
def colibri_not_applicable(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return the function that skips a test since it says nothing here: for an issue, with the reason."""

    def skip(issue: str, reason: str) -> None:
        if issue:
            request.node.user_properties.append((NOT_APPLICABLE_PROPERTY, json.dumps({issue: reason})))
        pytest.skip(f"not applicable: {reason}")

    return skip


def _in_words(row: dict[str, str | None]) -> str:
    phase = f", {row['phase']}" if row["phase"] else ""
    return f"{row['state']}: {row['claim']}{phase}: {row['reason']}"
