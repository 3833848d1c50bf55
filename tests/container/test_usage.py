from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.container.usage import MAX_USAGE_BYTES, read_usage, write_usage
from pytest_colibri.errors import UsageError


def test_records_of_the_engine_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / ".coli_usage"
    path.write_bytes(b"-1 2 0.5 text\r\n-7\n\n3 0 12\r\n4\t7  9\n")
    assert read_usage(path) == {(3, 0): 12, (4, 7): 9}


@given(
    counts=st.dictionaries(
        st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)), st.integers(0, 10**18 - 1)
    )
)
def test_counts_come_back(tmp_path_factory, counts):
    path = tmp_path_factory.getbasetemp() / "usage"
    write_usage(path, counts)
    assert read_usage(path) == counts
    assert list(read_usage(path)) == sorted(counts)


@pytest.mark.parametrize(
    "line",
    [
        "3 0",
        "3 0 1 2",
        "3 0 1.5",
        "3 -1 4",
        "a b c",
        "3 0 nan",
        "1_0 2 3",
        "٣ 0 1",
        "- 1 2",
        f"1 2 {'9' * 5000}",
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "usage"
    path.write_bytes(f"3 1 5\n\n{line}\n".encode())
    with pytest.raises(UsageError) as refusal:
        read_usage(path)
    assert str(refusal.value).startswith(f"{path}:3: ")
    assert len(str(refusal.value)) < len(str(path)) + 200


def test_an_expert_listed_twice_is_refused(tmp_path):
    path = tmp_path / "usage"
    path.write_text("3 1 5\n3 1 6\n")
    with pytest.raises(UsageError, match=":2: expert 1 of layer 3 is listed twice"):
        read_usage(path)


def test_a_missing_or_huge_history_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such usage history"):
        read_usage(tmp_path / "absent")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_USAGE_BYTES + 1)
    with pytest.raises(UsageError, match="is not read"):
        read_usage(tmp_path / "huge")
