"""The cases that the suite tries: tiny models in every format, or the user's own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pytest_colibri.container.hollow import HOLLOW_MODELS, write_hollow_model
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import TINY_MODELS, write_tiny_model
from pytest_colibri.errors import ColibriError
from pytest_colibri.judge.ending import judge_ending
from pytest_colibri.judge.issues import read_issues, select_issues
from pytest_colibri.judge.model import Settle, Verdict
from pytest_colibri.judge.planning import PlanCase
from pytest_colibri.judge.tokens import REFERENCE_FILE, TokenReference, read_token_reference
from pytest_colibri.judge.trial import Case, Mode, Placement, Trial, Trials
from pytest_colibri.plugin.options import EVERY_PROFILE, setting, settings
from pytest_colibri.plugin.session import ColibriSession
from pytest_colibri.profiles.loader import profile_names
from pytest_colibri.suite import registry_file
from pytest_colibri.units import GB

GOLDEN = Path(__file__).parent / "engine" / "golden"
PLACED_IN_PARTS = "int4-grouped-64"
USER_MODEL = "model"
DEFAULT_PROMPT = (3, 14, 15, 9, 2, 6, 5, 35)


# What any planner is asked on any machine; the other questions come from the registry of public reports.
GENERAL_MODELS = ("glm-mixed", "glm-small")
GENERAL_REQUESTS: Mapping[str, Mapping[str, object]] = {
    "automatic": {},
    "within": {"ram_bytes": 24 * GB, "vram_bytes": 8 * GB},
    "beyond": {"ram_bytes": 2000 * GB, "vram_bytes": 2000 * GB},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "plan_question" in metafunc.fixturenames:
        questions = list(_plan_questions(metafunc.config))
        here = Path(str(setting(metafunc.config, "profile"))).stem
        ids = [f"{profile or here}: {case.name}" for profile, case in questions]
        metafunc.parametrize("plan_question", questions, ids=ids)
    if "case" in metafunc.fixturenames:
        mode: Mode = "score" if "scored" in metafunc.function.__name__ else "generate"
        keys = list(_case_keys(setting(metafunc.config, "model"), mode))
        metafunc.parametrize("case", keys, indirect=True, ids=["-".join(key[:2]) for key in keys])


def _case_keys(user_model: object, mode: Mode) -> Iterator[tuple[str, Placement, Mode]]:
    names = [USER_MODEL] if user_model else list(TINY_MODELS)
    if mode == "score" and user_model and not (Path(str(user_model)) / REFERENCE_FILE).is_file():
        return  # there is no text whose right scores another program has computed
    for name in names:
        yield name, "full", mode
        if name in (PLACED_IN_PARTS, USER_MODEL):
            yield name, "part", mode
            yield name, "empty", mode


def _plan_questions(config: pytest.Config) -> Iterator[tuple[str | None, PlanCase]]:
    """Yield each question with the profile whose recorded machine it is about, None for this session's."""
    profile = setting(config, "profile")
    if profile is None:
        return
    every = profile == EVERY_PROFILE
    asked_for = settings(config, "issue")
    issues = read_issues(registry_file())
    for issue in select_issues(issues, asked_for) if asked_for else issues:
        for question in issue.planner:
            if every or (setting(config, "emulate") and question.profile == profile):
                yield question.profile, question.case
            elif asked_for:
                yield None, question.case
    if not asked_for:
        models = (USER_MODEL,) if setting(config, "model") else GENERAL_MODELS
        for name in profile_names() if every else (None,):
            yield from ((name, case) for case in _general_cases(models))


def _general_cases(models: tuple[str, ...]) -> Iterator[PlanCase]:
    for model in models:
        for name, request in GENERAL_REQUESTS.items():
            yield PlanCase(f"{model} {name}", model, request)


@pytest.fixture(scope="session", autouse=True)
def session_properties(
    colibri_session: ColibriSession, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Name profile and host in the JUnit report."""
    record_testsuite_property("colibri.profile", colibri_session.title)
    if not colibri_session.everything:
        profile, host = colibri_session.machine(None)
        record_testsuite_property("colibri.backend", profile.backend)
        record_testsuite_property("colibri.host", f"{host.kind} {host.system}")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Return the folder of a model by name; tiny ones are written when they are first asked for."""
    written: dict[str, Path] = {}

    def tiny(name: str, folder: Path) -> Path:
        stored, group_size = TINY_MODELS[name]
        return write_tiny_model(folder, stored, group_size=group_size)

    def model(name: str) -> Path:
        if name == USER_MODEL:
            return Path(str(setting(pytestconfig, "model"))).resolve()
        if name not in written:
            folder = tmp_path_factory.mktemp(name)
            written[name] = write_hollow_model(folder, name) if name in HOLLOW_MODELS else tiny(name, folder)
        return written[name]

    return model


@pytest.fixture
def case(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> Case:
    """Return the case of a test: model, placement, and the reference tokens where there are any."""
    name, placement, mode = request.param
    folder = models(name)
    return Case(name, folder, _reference(name, folder), placement, mode)


def _reference(name: str, folder: Path) -> TokenReference:
    if name != USER_MODEL:
        return read_token_reference(GOLDEN / f"tiny-{name}.json")
    if (folder / REFERENCE_FILE).is_file():
        return read_token_reference(folder / REFERENCE_FILE)
    vocabulary = read_geometry(folder).config.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise pytest.UsageError(f"{folder / 'config.json'}: vocab_size must be an integer")
    prompt = tuple(token % vocabulary for token in DEFAULT_PROMPT)
    return TokenReference(prompt, prompt, (), "none")


@pytest.fixture
def trial(case: Case, colibri_trials: Trials, colibri_settle: Settle) -> Trial:
    """Return the trial of a case, run if it was not run before.

    Where nothing can be run (a broken plan, a model that does not fit), that is the verdict.
    """
    try:
        return colibri_trials.run(case)
    except ColibriError as error:
        colibri_settle(
            case, [Verdict("unwitnessed", "run completes", "plan", "", "", "process", reason=str(error))]
        )
        raise


@pytest.fixture
def finished_trial(trial: Trial, colibri_settle: Settle) -> Trial:
    """Return a trial whose run came to its end; any other run gets its verdict here."""
    verdict = judge_ending(trial.statement, trial.output)
    if verdict.state != "held":
        colibri_settle(trial.case, [verdict])
    return trial
