"""The verdicts as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from pytest_colibri.judge.model import State, Verdict

STYLES: dict[State, str] = {
    "held": "green",
    "broken": "bold red",
    "unwitnessed": "yellow",
    "not_claimed": "cyan",
}
ORDER: tuple[State, ...] = ("held", "not_claimed", "unwitnessed", "broken")


def verdict_table(
    verdicts: Sequence[Verdict], *, width: int, color: bool, ascii_only: bool, every_case: bool
) -> str:
    """Return the table of verdicts, worst last, where a terminal shows it.

    What held in several cases is one row, with the figures of the first, and so is what was not claimed,
    unless ``every_case`` is set; every other verdict has its own.
    ``width`` counts characters; ``ascii_only`` draws with characters that every terminal has.
    """
    from rich.box import ASCII, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=ASCII if ascii_only else SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("claim", "said at", "advertised", "witnessed", "by", "verdict"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("said at", "verdict"))
    for verdict, cases in _rows(verdicts, every_case):
        claim = f"{verdict.claim}, {verdict.phase}" if verdict.phase else verdict.claim
        tried = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
        table.add_row(
            Text(f"{claim}\n({tried})"),
            Text(verdict.place),
            Text(verdict.advertised),
            Text(verdict.witnessed),
            Text(verdict.witness),
            Text(verdict.state, style=STYLES[verdict.state]),
        )
    out = StringIO()
    Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None).print(
        table
    )
    return out.getvalue()


def explanations(verdicts: Iterable[Verdict]) -> list[str]:
    """Return a line for each distinct reason of a verdict that did not hold."""
    reasons: dict[tuple[State, str, str | None, str], list[str]] = {}
    for verdict in sorted(verdicts, key=lambda v: ORDER.index(v.state)):
        if verdict.state != "held":
            key = (verdict.state, verdict.claim, verdict.phase, verdict.reason)
            reasons.setdefault(key, []).append(verdict.case)
    return [
        f"{state}: {claim}{f', {phase}' if phase else ''} [{', '.join(dict.fromkeys(cases))}]: {reason}"
        for (state, claim, phase, reason), cases in reasons.items()
    ]


def _rows(verdicts: Sequence[Verdict], every_case: bool) -> list[tuple[Verdict, list[str]]]:
    rows: dict[object, tuple[Verdict, list[str]]] = {}
    for number, verdict in enumerate(verdicts):
        alike = verdict.state in ("held", "not_claimed") and not every_case
        key: object = (verdict.state, verdict.claim, verdict.phase) if alike else number
        rows.setdefault(key, (verdict, []))[1].append(verdict.case)
    return sorted(rows.values(), key=lambda row: ORDER.index(row[0].state))
