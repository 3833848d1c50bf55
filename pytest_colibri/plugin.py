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
    from pytest_colibri.judge.model import Settle, Verdict
    from pytest_colibri.judge.trial import Trials
    from pytest_colibri.profiles.model import Profile
    from pytest_colibri.subjects.protocol import EngineSubject
    from pytest_colibri.witness.evidence import Reach

VERDICT_PROPERTY = "colibri.verdict"
TRIALS_KEY = "colibri_trials"
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

    @property
    def flag(self) -> str:
        """The long option, which no other plugin owns."""
        return f"--colibri-{self.name}"

    @property
    def dest(self) -> str:
        """The name under which pytest keeps it, of its ini twin too."""
        return f"colibri_{self.name.replace('-', '_')}"


OPTIONS = (
    Option("profile", "hardware profile: a name, a YAML file, or 'auto'", "NAME", "--profile"),
    Option(
        "emulate", "judge plans on the host that the profile recorded; no engine is run", None, "--emulate"
    ),
    Option("model", "model folder to run instead of the suite's tiny models", "DIR", "--model"),
    Option("checkout", "colibri checkout to judge (refused in this version)", "DIR", "--colibri"),
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
            group.addoption(*names, dest=option.dest, metavar=option.metavar, default=None, help=option.help)
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
    return value or None


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; with a profile, read it and become active. A bad one is a usage error."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if setting(config, "profile") is None:
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
        self.deselected: dict[str, int] = {}
        self.refusal: tuple[int, str] | None = None
        self.conclusion: tuple[int, str] | None = None
        self.auto_reason: str | None = None
        self.trials: Trials | None = None
        self._read_options()
        name = str(setting(config, "profile"))
        self.profile_or_auto: Profile | None = None if name == "auto" else _find_profile(name)

    def _read_options(self) -> None:
        from pytest_colibri.subjects.program import program_engine, reference_engine

        if setting(self.config, "checkout"):
            raise UsageError(
                "--colibri: this version judges the embedded engine and programs that speak the engine "
                "protocol (--colibri-engine); a colibri checkout cannot be judged yet"
            )
        model = setting(self.config, "model")
        if model:
            _check_model(Path(str(model)))
        if self.emulated and setting(self.config, "profile") == "auto":
            raise UsageError("--emulate needs a named profile; 'auto' looks at the machine that is here")
        self.evidence = Path(str(setting(self.config, "evidence") or EVIDENCE_FILE))
        if not os.access(self.evidence.parent, os.W_OK) or self.evidence.is_dir():
            raise UsageError(
                f"--colibri-evidence={self.evidence}: cannot be written; give a file in a folder"
            )
        floor = setting(self.config, "memory-floor")
        self.floor_bytes = None if floor is None else _parse_size("--colibri-memory-floor", str(floor))
        self.timeout_s = _parse_seconds(str(setting(self.config, "timeout") or DEFAULT_TIMEOUT_S))
        engine = setting(self.config, "engine")
        shaders = setting(self.config, "shaders")
        if shaders and not engine:
            raise UsageError("--colibri-shaders belongs to --colibri-engine: give both, or none")
        self.subject: EngineSubject = (
            program_engine(str(engine), Path(str(shaders)) if shaders else None)
            if engine
            else reference_engine()
        )

    @cached_property
    def profile(self) -> Profile:
        """The profile of this session; 'auto' looks at the host for the one that fits best."""
        if self.profile_or_auto is not None:
            return self.profile_or_auto
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

    @cached_property
    def redact(self) -> Callable[[object], object]:
        """What every report passes through, so that nothing private leaves; nothing changes on request."""
        from pytest_colibri.report.privacy import redactor

        if setting(self.config, "identities"):
            return lambda value: value
        return redactor(device.identity.uuid for device in self.host.accelerators)

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

        backend, backends = self.profile.backend, self.subject.backends
        if backends is not None and backend in CHECKOUT_BACKENDS and not self.emulated:
            return Status.NOTHING_SHOWN, CHECKOUT_SENTENCE + CHECKOUT_BACKENDS[backend]
        reasons = mismatches(self.profile, self.host)
        if reasons:
            return Status.HOST_MISMATCH, "; ".join(reasons)
        if backends is not None and backend not in backends and not self.emulated:
            return Status.NOTHING_SHOWN, f"the embedded engine does not compute on {backend} in this version"
        return None

    def pytest_report_header(self) -> list[str]:
        """Say what is judged, on which machine, and who watches."""
        lines = [f"colibri: profile {self.profile_or_auto.name if self.profile_or_auto else 'auto'}"]
        if not self.config.option.collectonly:
            lines = list(self._header())
        chosen = [f"{o.name}={value}" for o in OPTIONS if (value := setting(self.config, o.name)) is not None]
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
        if self.emulated:
            yield "colibri: emulated host: plans are judged, no engine is run"
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
        if self.emulated and item.get_closest_marker("colibri_engine"):
            return "engine checks, since the host is emulated"
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

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take over the trials of a worker that is done."""
        self.trials_seen += getattr(node, "workeroutput", {}).get(TRIALS_KEY, [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Conclude, write the evidence, and set the exit status."""
        from pytest_colibri.report.bundle import trial_to_json

        if self.trials is not None:
            self.trials_seen += [trial_to_json(trial) for trial in self.trials.done]
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[TRIALS_KEY] = self.trials_seen
        elif not self.config.option.collectonly:
            self.conclusion = self.refusal or self._conclude(exitstatus)
            if self.refusal is None:
                self._write_evidence()
            session.exitstatus = self.conclusion[0]

    def _conclude(self, exitstatus: int) -> tuple[int, str]:
        """Return status and sentence of the verdicts, or those of pytest where it did not come to its end."""
        from pytest_colibri.judge.status import conclude

        status, sentence = conclude(self.verdicts, self.profile.backend, plans_only=self.emulated)
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            return exitstatus, "no test of the suite was run, so nothing was shown"
        if exitstatus == pytest.ExitCode.TESTS_FAILED and status != exitstatus:
            return exitstatus, f"a test failed for a reason that is no verdict; of the verdicts: {sentence}"
        if exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
            return exitstatus, f"the run is incomplete; up to its end: {sentence}"
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return exitstatus, f"pytest ended with a status of its own; of the verdicts: {sentence}"
        return status, sentence

    def _write_evidence(self) -> None:
        """Write the evidence file; when that fails, no run ends as if all were well."""
        from pytest_colibri.judge.status import Status
        from pytest_colibri.report.bundle import write_bundle

        assert self.conclusion is not None
        status, sentence = self.conclusion
        try:
            write_bundle(
                self.evidence,
                self.profile,
                self.host,
                () if self.emulated else (self.reach,),
                self.verdicts,
                self.trials_seen,
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
            writer.write_line(f"evidence: {self.evidence}")
        status, sentence = self.conclusion
        writer.write_line(f"{self.profile.name}: {sentence} (exit status {int(status)})", bold=True)


# Backends that the embedded engine does not compute on, and the profile that reaches such a device with it.
CHECKOUT_BACKENDS = {"rocm": "amd-vulkan", "metal": "apple-vulkan"}
CHECKOUT_SENTENCE = (
    "rocm and metal judge a checkout (--colibri), which this version cannot do yet: the embedded engine does "
    "not compute on them. It can be judged on the same device through Vulkan: --profile="
)


def _find_profile(name: str) -> Profile:
    from pytest_colibri.profiles.loader import find_profile

    return find_profile(name)


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


@pytest.fixture
def colibri_settle(request: pytest.FixtureRequest) -> Settle:
    """Return the function that records the verdicts of a case and gives the test its outcome.

    A broken claim fails the test. What was not witnessed or not claimed skips it: it is no pass, and the exit
    status of the session says so.
    """

    def settle(case: object, verdicts: Iterable[Verdict]) -> None:
        from dataclasses import asdict

        session = _session(request.config)
        rows: Any = session.redact([{**asdict(verdict), "case": str(case)} for verdict in verdicts])
        for row in rows:
            request.node.user_properties.append((VERDICT_PROPERTY, json.dumps(row)))
        broken = [_in_words(row) for row in rows if row["state"] == "broken"]
        not_shown = [_in_words(row) for row in rows if row["state"] in ("unwitnessed", "not_claimed")]
        if broken:
            pytest.fail("; ".join(broken), pytrace=False)
        if not_shown:
            pytest.skip("; ".join(not_shown))

    return settle


def _in_words(row: dict[str, str | None]) -> str:
    phase = f", {row['phase']}" if row["phase"] else ""
    return f"{row['state']}: {row['claim']}{phase}: {row['reason']}"
