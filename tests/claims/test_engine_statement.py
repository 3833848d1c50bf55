"""Reading what an engine says: claims, retractions and counters, and lines that are none of it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.claims.engine import read_statement

DEVICE = {"api": "vulkan", "index": 0, "name": "Some GPU (driver)", "uuid": "ab" * 16, "pci": None}
TIER = {
    "event": "claim",
    "claim": "expert_tier",
    "tier": "vram",
    "device": DEVICE,
    "pieces": ["gate_up", "down"],
}
RETRACT = {"event": "retract", "claim": "expert_tier", "reason": "no usage history"}

KEYS = ("claim", "device", "experts", "pieces", "bytes", "reason", "phase", "tiers", "ids", "id")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
events = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            ["claim", "retract", "telemetry", "token", "scores", "refused", "end", "phase"]
        )
    },
    optional=dict.fromkeys(KEYS, json_values),
)


def lines(*values: object) -> list[str]:
    return [json.dumps(value) for value in values]


def test_claim_knows_where_it_was_said() -> None:
    statement = read_statement(["", *lines({"event": "start"}, TIER)], "engine")
    claim = statement.claim("expert_tier")
    assert claim is not None
    assert str(claim.place) == "stdout:3"
    assert claim.pieces == ("gate_up", "down")
    assert claim.advertised == "gate_up + down on Some GPU"
    assert claim.retracted is None


def test_later_line_takes_a_claim_back() -> None:
    statement = read_statement(lines(TIER, RETRACT), "engine")
    claim = statement.claim("expert_tier")
    assert claim is not None
    assert claim.retracted is not None
    assert claim.retracted.reason == "no usage history"
    assert str(claim.retracted.place) == "stdout:2"


def test_claim_made_again_after_a_retraction_stands() -> None:
    claim = read_statement(lines(TIER, RETRACT, TIER), "engine").claim("expert_tier")
    assert claim is not None
    assert claim.retracted is None


def test_retraction_of_nothing_is_unparsed() -> None:
    assert read_statement(lines(RETRACT), "engine").unparsed == tuple(lines(RETRACT))


def test_tokens_and_end() -> None:
    statement = read_statement(
        lines(
            {"event": "token", "position": 1, "id": 7},
            {"event": "token", "position": 2, "id": 9},
            {"event": "end"},
        ),
        "engine",
    )
    assert statement.tokens == (7, 9)
    assert statement.complete
    assert str(statement.tokens_place) == "stdout:1"


def test_lines_that_are_no_events_are_kept() -> None:
    noise = ["hello", "{", '["event"]', '{"event": 7}', '{"event":"claim","claim":"speed"}', "\x00"]
    statement = read_statement(noise, "engine")
    assert statement.unparsed == tuple(noise)
    assert statement.claims == ()
    assert not statement.complete


def test_boolean_is_no_count() -> None:
    assert read_statement(lines({"event": "token", "id": True, "position": 1}), "engine").tokens == ()


@given(st.lists(events.map(json.dumps) | st.text(max_size=40), max_size=12))
def test_any_output_is_read_without_failing(output: list[str]) -> None:
    statement = read_statement(output, "engine")
    assert len(statement.unparsed) <= len(output)
    assert all(isinstance(token, int) for token in statement.tokens)


def test_positions_follow_each_other() -> None:
    tokens = [{"event": "token", "position": at, "id": 7} for at in (3, 4, 4)]
    statement = read_statement(lines(*tokens), "engine")
    assert statement.tokens == (7, 7)
    assert statement.first_position == 3
    assert [str(place) for place in statement.malformed] == ["stdout:3"]
