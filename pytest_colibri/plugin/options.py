"""The options of the plugin, each with an ini twin and an environment twin."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata

import pytest

SWITCHES = {"1": True, "true": True, "yes": True, "on": True} | dict.fromkeys(
    ("", "0", "false", "no", "off"), False
)
EVERY_PROFILE = "all"
EVIDENCE_FILE = "colibri-evidence.json"


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


def add_options(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
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


def shown_settings(config: pytest.Config) -> list[str]:
    """Return every setting that was made, as ``name=value``."""
    shown = []
    for option in OPTIONS:
        values = settings(config, option.name) if option.repeatable else (setting(config, option.name),)
        shown += [f"{option.name}={value}" for value in values if value is not None]
    return shown
