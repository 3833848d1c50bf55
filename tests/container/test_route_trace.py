from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.container.route_trace import (
    MAX_LINE_BYTES,
    RouteBatch,
    RouteTraceWriter,
    read_route_trace,
)
from pytest_colibri.errors import UsageError


def test_rows_of_one_call_and_layer_are_one_batch(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(
        b"0 0 3 7:0.5 1:1.5e-1\r\n\r\n0 1 3 2:.25 1:1.\n1 0 4 0:-3 0:+1E2\n\n2 0 3 5:1 6:0\n2 1 3 5:1 6:0\n"
    )
    assert list(read_route_trace(path)) == [
        RouteBatch(0, 3, (((7, 0.5), (1, 0.15)), ((2, 0.25), (1, 1.0)))),
        RouteBatch(1, 4, (((0, -3.0), (0, 100.0)),)),
        RouteBatch(2, 3, (((5, 1.0), (6, 0.0)), ((5, 1.0), (6, 0.0)))),
    ]


gates = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.lists(
    st.lists(st.tuples(st.integers(0, 10**6), gates), min_size=1, max_size=4), min_size=1, max_size=4
)


@given(batches=st.lists(st.tuples(st.integers(0, 100), rows), min_size=1, max_size=6))
def test_what_is_written_is_read(tmp_path_factory, batches):
    path = tmp_path_factory.getbasetemp() / "trace"
    with RouteTraceWriter(path) as writer:
        for layer, choices in batches:
            writer.write(layer, choices)
    for call, (batch, (layer, choices)) in enumerate(zip(read_route_trace(path), batches, strict=True)):
        assert (batch.call, batch.layer) == (call, layer)
        for read, written in zip(batch.rows, choices, strict=True):
            assert [(expert, np.float32(gate)) for expert, gate in read] == [
                (expert, np.float32(gate)) for expert, gate in written
            ]


@pytest.mark.parametrize("batch", [[], [[(1, 0.5)], []]])
def test_an_empty_batch_cannot_be_written(tmp_path, batch):
    with RouteTraceWriter(tmp_path / "trace") as writer, pytest.raises(ValueError, match="at least one"):
        writer.write(3, batch)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 1 3", "3 fields; at least call, row, layer and one expert:gate"),
        ("x 1 3 1:1", "call 'x' is not a count"),
        ("0 -1 3 1:1", "row '-1' is not a count"),
        ("0 1 3.0 1:1", "layer '3.0' is not a count"),
        ("0 1 1_0 1:1", "layer '1_0' is not a count"),
        ("0 1 3 1", "'1' is not expert:gate"),
        ("0 1 3 1:nan", "is not expert:gate"),
        ("0 1 3 1:inf", "is not expert:gate"),
        ("0 1 3 1:1e999", "is not expert:gate"),
        ("0 1 3 1:0x1p3", "is not expert:gate"),
        ("0 1 3 1:1_0", "is not expert:gate"),
        ("0 1 3 -1:1", "is not expert:gate"),
        ("0 1 3 1:1:1", "is not expert:gate"),
        ("0 2 3 1:1", "row 2 where row 1 of the batch is due"),
        ("0 0 3 1:1", "row 0 where row 1 of the batch is due"),
        ("1 1 3 1:1", "row 1 where row 0 of the batch is due"),
        ("0 0 4 1:1", "do not advance by one are not supported"),
        ("2 0 3 1:1", "do not advance by one are not supported"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "trace"
    path.write_text(f"0 0 3 1:1\n\n{line}\n")
    with pytest.raises(UsageError) as refusal:
        list(read_route_trace(path))
    assert str(refusal.value).startswith(f"{path}:3: ")
    assert said in str(refusal.value)


def test_a_batch_that_comes_back_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_text("0 0 3 1:1\n1 0 4 1:1\n0 0 3 1:1\n")
    with pytest.raises(UsageError, match=":3: call 0 after call 1: a batch must not come back"):
        list(read_route_trace(path))


def test_a_trace_starts_at_call_0(tmp_path):
    path = tmp_path / "trace"
    path.write_text("1 0 3 1:1\n")
    with pytest.raises(UsageError, match=":1: the first call is 1"):
        list(read_route_trace(path))


def test_a_truncated_trace_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_text("0 0 3 1:1\n1 0 3 1:1")
    with pytest.raises(UsageError, match=":2: the last line has no end: the trace was truncated"):
        list(read_route_trace(path))


@pytest.mark.parametrize("text", ["", "\n\r\n"])
def test_a_trace_without_events_is_refused(tmp_path, text):
    path = tmp_path / "trace"
    path.write_bytes(text.encode())
    with pytest.raises(UsageError, match="the trace holds no event"):
        list(read_route_trace(path))


def test_an_endless_line_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(b"0 0 3" + b" 1:1" * MAX_LINE_BYTES)
    with pytest.raises(UsageError, match=":1: a line of more than"):
        list(read_route_trace(path))


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_route_trace(tmp_path / "absent"))


def test_batches_come_one_by_one(tmp_path):
    path = tmp_path / "trace"
    path.write_text("0 0 3 1:1\n1 0 3 1:1\nbroken\n")
    batches = read_route_trace(path)
    assert next(batches).call == 0
    with pytest.raises(UsageError, match=":3:"):
        next(batches)
