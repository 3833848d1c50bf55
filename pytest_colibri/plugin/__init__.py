"""The pytest plugin: options, markers, fixtures, the choice of tests, header, summary and exit status.

Without a profile it registers options and markers and does nothing else. Everything heavy is imported where
it is used, so that a pytest start without a profile pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_colibri.errors import UsageError
from pytest_colibri.plugin.options import add_options, setting, settings

if TYPE_CHECKING:
    from pytest_colibri.host.model import Host
    from pytest_colibri.judge.model import Settle, Verdict
    from pytest_colibri.judge.planning import PlanTrials
    from pytest_colibri.judge.trial import Trials
    from pytest_colibri.plugin.session import ColibriSession
    from pytest_colibri.profiles.model import Profile

MARKERS = (
    "colibri_engine: runs an engine; deselected on an emulated host",
    "colibri_tier(name): judges a tier ('vram', 'ram' or 'disk'); deselected where the profile claims none",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register every option in one group, with its twins."""
    add_options(parser, pluginmanager)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; with a profile, read it and become active. A bad one is a usage error."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if setting(config, "profile") is None:
        asked = [name for name in ("emulate", "checkout", "planner", "engine") if setting(config, name)]
        if asked or settings(config, "issue"):
            option = (*asked, "issue")[0]
            raise pytest.UsageError(
                f"--colibri-{option} needs a machine: give --profile=NAME, with --emulate for a recorded one"
            )
        return
    from pytest_colibri.plugin.session import ColibriSession
    from pytest_colibri.suite import suite_directory

    try:
        session = ColibriSession(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(session, "colibri-session")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(suite_directory())]


def _session(config: pytest.Config) -> ColibriSession:
    from pytest_colibri.plugin.session import ColibriSession

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
        _session(request.config).settle(request.node, case, verdicts)

    return settle


@pytest.fixture
def colibri_not_applicable(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return the function that skips a test since it says nothing here: for an issue, with the reason."""

    def skip(issue: str, reason: str) -> None:
        _session(request.config).skip_not_applicable(request.node, issue, reason)

    return skip
