"""Reports: what a person sees, and what does not leave the machine."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.report.bundle import to_json
from pytest_colibri.report.privacy import redactor
from pytest_colibri.report.terminal import explanations, verdict_table
from pytest_colibri.units import Figure, format_bytes, parse_bytes, smallest
from pytest_colibri.witness.evidence import Reach

HELD = Verdict("held", "expert tier", "stdout:3", "on a GPU", "76", "tracer", "decode", case="f32-full")
BROKEN = Verdict(
    "broken", "expert tier", "stdout:3", "on a GPU", "0", "tracer", "decode", "nothing seen", "f32-part"
)


def test_alike_is_one_row_and_what_broke_has_its_own() -> None:
    table = verdict_table(
        [HELD, replace(HELD, case="f32-part"), BROKEN, BROKEN],
        width=100,
        color=False,
        ascii_only=False,
        every_case=False,
    )
    assert table.count("held") == 1
    assert "(2 cases)" in table
    assert table.count("broken") == 2
    assert table.index("held") < table.index("broken"), "the worst comes last, where a terminal shows it"


def plan_check(state: State, claim: str, case: str) -> Verdict:
    return Verdict(state, claim, "plan", "RAM 1 GB", "available 2 GB", "live host", reason="why", case=case)


def test_checks_of_plans_are_one_row_but_for_what_broke() -> None:
    claims = ("reserve is kept", "one pool is counted once")
    held = [plan_check("held", claim, case) for claim in claims for case in ("a", "b")]
    table = verdict_table(
        [HELD, *held, plan_check("broken", "slots fit the cache", "a")],
        width=100,
        color=False,
        ascii_only=False,
        every_case=False,
    )
    assert "4 checks of plans" in table
    assert table.count("held") == 2
    assert "slots fit the cache" in table


def test_a_reason_names_a_few_cases_and_counts_the_rest() -> None:
    verdicts = [plan_check("broken", "reserve is kept", case) for case in "abcde"]
    assert explanations(verdicts) == ["broken: reserve is kept [a, b, c, 2 more]: why"]


def test_every_case_on_request() -> None:
    assert (
        verdict_table([HELD, HELD], width=100, color=False, ascii_only=False, every_case=True).count("held")
        == 2
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_table_keeps_to_the_width(width: int) -> None:
    table = verdict_table([HELD, BROKEN], width=width, color=False, ascii_only=False, every_case=False)
    assert max(map(len, table.splitlines())) <= width


def test_words_stay_whole_where_the_width_allows_it() -> None:
    verdict = Verdict(
        "held",
        "own counters",
        "stdout:37",
        "gate_up_f32.spv 76, 38 submits",
        "one pool: 24.7 GB (meminfo MemAvailable), reserve 2.96 GB",
        "transformers 5.24.0",
        "prefill",
        case="int4-grouped-64-full-score",
    )
    table = verdict_table([verdict], width=80, color=False, ascii_only=False, every_case=False)
    words = f"{verdict.advertised} {verdict.witnessed} {verdict.witness} counters, stdout:37".split()
    assert [word for word in words if word not in table] == []
    narrow = verdict_table([verdict], width=44, color=False, ascii_only=False, every_case=False)
    assert "MemAvailable" not in narrow, "longer than its column, it is folded"
    assert max(map(len, narrow.splitlines())) <= 44


def test_plain_characters_where_the_terminal_has_no_others() -> None:
    assert verdict_table([HELD], width=80, color=False, ascii_only=True, every_case=False).isascii()


def test_markup_in_what_an_engine_says_is_text() -> None:
    evil = Verdict("held", "[red]x[/red]", "p", "[link=file:///]y[/link]", "", "")
    table = verdict_table([evil], width=120, color=False, ascii_only=False, every_case=True)
    assert "[red]x[/red]" in table


def test_a_reason_is_given_once() -> None:
    assert explanations([HELD, BROKEN, BROKEN]) == ["broken: expert tier, decode [f32-part]: nothing seen"]


def test_private_words_are_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "kitchen-pc")
    monkeypatch.setenv("LOGNAME", "alexandra")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alexandra"))
    redact = redactor(["0" * 31 + "a", None])
    assert redact({"path": "/home/alexandra/models/a", "note": "on kitchen-pc by alexandra"}) == {
        "path": "~/models/a",
        "note": "on (host) by (user)",
    }
    assert redact(["GPU-12345678-1234-1234-1234-123456789abc"]) == ["(uuid)"]
    assert redact({"uuid": "ab" * 16, "serial": None}) == {"uuid": "(withheld)", "serial": None}
    assert redact(f"x:{'0' * 31}A") == "x:(uuid)"
    assert redact("/tmp/pytest-of-alexandra/0") == "/tmp/pytest-of-(user)/0"
    assert redact({"count": 7, "alexandra_count": 1}) == {"count": 7, "alexandra_count": 1}


def test_values_become_json() -> None:
    assert to_json((Reach("w", True, "s"), {1: Path("/a")}, None)) == [
        {"witness": "w", "able": True, "statement": "s"},
        {"1": "/a"},
        None,
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("9007199254740993", 2**53 + 1),
        ("2GB", 2 * 10**9),
        ("2 GiB", 2**31),
        ("1.5MB", 1_500_000),
        ("4G", 4 * 10**9),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "GB", "8589934592.1GiB"])
def test_sizes_that_no_machine_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too large; at most"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "-1", "2TBs", "GB", "1e3", "0x10", "nan", "٣"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"), [(None, "unknown"), (0, "0 B"), (114_200_000_000, "114.2 GB"), (2_446_400, "2.4 MB")]
)
def test_sizes_are_written(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


def test_unknown_is_not_the_smallest() -> None:
    unknown = Figure(None, "no source")
    assert smallest(unknown, Figure(5, "a"), Figure(3, "b")) == Figure(3, "b")
    assert smallest(unknown).bytes is None
