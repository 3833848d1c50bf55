"""The verdicts as a table for a terminal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from io import StringIO
from itertools import chain, islice
from textwrap import TextWrapper

from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.judge.planning import CLAIMS

STYLES: dict[State, str] = {
    "held": "green",
    "broken": "bold red",
    "unwitnessed": "yellow",
    "not_claimed": "cyan",
}
ORDER: tuple[State, ...] = ("held", "not_claimed", "unwitnessed", "broken")
HEADINGS = ("claim", "said at", "advertised", "witnessed", "by", "verdict")
CHECKS_OF_PLANS = "checks of plans"
MOST_CASES = 3  # of those for which a reason is given
BREAK = re.compile(r"(\s+)|(?<=\w-)(?=\w)")


def verdict_table(
    verdicts: Sequence[Verdict], *, width: int, color: bool, ascii_only: bool, every_case: bool
) -> str:
    """Return the table of verdicts, worst last, where a terminal shows it.

    What held in several cases is one row, with the figures of the first, and so is what was not claimed;
    all checks of plans together are one. What is broken or unwitnessed has a row for each case, but for
    checks of plans, which have one for each check. With ``every_case`` every verdict has its own.
    ``width`` counts characters; ``ascii_only`` draws with characters that every terminal has.
    """
    from rich.box import ASCII, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [(verdict.state, _cells(verdict, cases)) for verdict, cases in _rows(verdicts, every_case)]
    widths = _column_widths([HEADINGS, *(cells for _, cells in rows)], width - 2 * len(HEADINGS) - 1)
    table = Table(box=ASCII if ascii_only else SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, column in zip(HEADINGS, widths, strict=True):
        table.add_column(heading, width=column, overflow="fold")
    for state, cells in rows:
        *texts, last = (_wrapped(cell, column) for cell, column in zip(cells, widths, strict=True))
        table.add_row(*map(Text, texts), Text(last, style=STYLES[state]))
    out = StringIO()
    Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None).print(
        table
    )
    return out.getvalue()


def _cells(verdict: Verdict, cases: Sequence[str]) -> tuple[str, ...]:
    claim = f"{verdict.claim}, {verdict.phase}" if verdict.phase else verdict.claim
    tried = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
    named = f"{claim}\n({tried})"
    return named, verdict.place, verdict.advertised, verdict.witnessed, verdict.witness, verdict.state


def _column_widths(rows: Sequence[Sequence[str]], available: int) -> list[int]:
    """Return the widths of the columns, together at most ``available`` where that is possible.

    The widest columns give way first, down to their longest word, and words only where nothing else is left.
    """
    columns = [[line for cell in column for line in cell.splitlines()] for column in zip(*rows, strict=True)]
    lines = [max(map(len, column)) for column in columns]
    words = [max(len(word) for line in column for word in BREAK.split(line) if word) for column in columns]
    limits = range(max(lines), 0, -1)
    wrapped = (
        [min(line, max(word, limit)) for line, word in zip(lines, words, strict=True)] for limit in limits
    )
    folded = ([min(word, limit) for word in words] for limit in limits)
    fitting = (widths for widths in chain(wrapped, folded) if sum(widths) <= available)
    return next(fitting, [1] * len(columns))


class _Wrapper(TextWrapper):
    """Wraps between words, and after a hyphen, which the names of cases have."""

    wordsep_re = BREAK


def _wrapped(text: str, width: int) -> str:
    wrapper = _Wrapper(width, break_long_words=False)  # the table folds them, each from a line of its own
    return "\n".join(part for line in text.splitlines() for part in wrapper.wrap(line))


def explanations(verdicts: Iterable[Verdict]) -> list[str]:
    """Return a line for each distinct reason of a verdict that did not hold.

    The reasons of one check of plans have one line, with the first of them.
    """
    reasons: dict[tuple[State, str, str | None, str | None], list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda v: ORDER.index(v.state)):
        if verdict.state != "held":
            reason = None if verdict.claim in CLAIMS else verdict.reason
            reasons.setdefault((verdict.state, verdict.claim, verdict.phase, reason), []).append(verdict)
    return [
        f"{state}: {claim}{f', {phase}' if phase else ''} "
        f"[{_few(dict.fromkeys(verdict.case for verdict in alike))}]: {alike[0].reason}"
        for (state, claim, phase, _), alike in reasons.items()
    ]


def _few(cases: Collection[str]) -> str:
    more = len(cases) - MOST_CASES
    return ", ".join([*islice(cases, MOST_CASES), *([f"{more} more"] if more > 0 else [])])


def _rows(verdicts: Sequence[Verdict], every_case: bool) -> list[tuple[Verdict, list[str]]]:
    alike: dict[object, list[Verdict]] = {}
    for number, verdict in enumerate(verdicts):
        agrees, of_plan = verdict.state in ("held", "not_claimed"), verdict.claim in CLAIMS
        claim = CHECKS_OF_PLANS if agrees and of_plan else verdict.claim
        together = not every_case and (agrees or of_plan)
        alike.setdefault((verdict.state, claim, verdict.phase) if together else number, []).append(verdict)
    rows = [(_representative(group), list(dict.fromkeys(v.case for v in group))) for group in alike.values()]
    return sorted(rows, key=lambda row: ORDER.index(row[0].state))


def _representative(group: Sequence[Verdict]) -> Verdict:
    """Return what stands for all verdicts of a row: the first, or the number of checks of plans."""
    first = group[0]
    if len({verdict.claim for verdict in group}) == 1:
        return first
    return Verdict(first.state, f"{len(group)} {CHECKS_OF_PLANS}", first.place, "", "", first.witness)
