"""The witness by the I/O Registry: its property list, doctored ones, and what adds up over a run."""

from __future__ import annotations

import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import recording

from pytest_colibri.errors import UsageError
from pytest_colibri.witness import ioreg
from pytest_colibri.witness.ioreg import IoregSession, IoregWitness, parse_ioreg

APPLE = recording("apple.ioreg.plist")


def times(text: str) -> list[tuple[int, int]]:
    return [(client.pid, client.busy_ns) for client in parse_ioreg(text)]


def test_each_user_of_a_gpu_has_its_time() -> None:
    assert sorted(times(APPLE)) == [(533, 9_000_000_000), (4242, 500_000_000), (4242, 1_234_000_000)]
    assert {client.gpu.name for client in parse_ioreg(APPLE)} == {"AGXAcceleratorG13X"}
    assert times(recording("intel-mac.ioreg.plist")) == [(77, 2_500_000_000)]


def test_the_users_of_one_process_add_up_and_keep_their_time_when_they_go() -> None:
    session = IoregSession()
    assert session.take(parse_ioreg(APPLE), [1]) == ()
    (use,) = session.take(parse_ioreg(APPLE), [4242, 4243])
    assert (use.engines[0].busy_ns, use.engines[0].compute, use.ended_clients) == (1_734_000_000, True, 0)
    assert use.resident_bytes is None
    fallen = APPLE.replace("1200000000", "1100000000")
    (use,) = session.take(parse_ioreg(fallen), [4242])
    assert use.engines[0].busy_ns == 1_734_000_000
    (use,) = session.take((), [4242])
    assert (use.engines[0].busy_ns, use.ended_clients) == (1_734_000_000, 2)


def test_gpus_of_one_name_stand_apart() -> None:
    body = APPLE[APPLE.index("<array>\n") + 8 : APPLE.rindex("</array>")]
    twice = APPLE.replace(body, body + body)
    session = IoregSession()
    assert [use.device.index for use in session.take(parse_ioreg(twice), [4242])] == [0, 1]


@pytest.mark.parametrize("figure", ["-1", "9223372036854775808", "0x8000000000000000"])
def test_a_time_that_cannot_be_is_unmeasured(figure: str) -> None:
    text = APPLE.replace("<integer>9000000000</integer>", f"<integer>{figure}</integer>")
    assert 533 not in dict(times(text))


@pytest.mark.parametrize("creator", ["", "pid", "pid x, y", "pid -5, y", "pid 99999999999, y"])
def test_a_user_without_a_process_is_left_out(creator: str) -> None:
    assert len(times(APPLE.replace("pid 533, WindowServer", creator))) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "+-o AGXAcceleratorG13X  <class AGXAcceleratorG13X>\n",
        APPLE[: len(APPLE) // 2],
        APPLE.replace("9000000000", "many"),
        APPLE.replace("<array>\n", "<dict>\n", 1).replace("</array>\n</plist>", "</dict>\n</plist>"),
        '<plist version="1.0"><array><string>x</string></array></plist>',
        '<plist version="1.0"><dict/></plist>',
        '<!DOCTYPE plist [<!ENTITY a "aaaa">]><plist version="1.0"><string>&a;</string></plist>',
        "x" * (4 * 2**20 + 1),
    ],
)
def test_text_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="ioreg"):
        parse_ioreg(text)


def test_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ioreg, "MAX_ENTRIES", 3)
    with pytest.raises(UsageError, match="more than 3"):
        parse_ioreg(APPLE)


@given(st.text(max_size=200), st.integers(0, len(APPLE)))
def test_no_text_breaks_the_parser_otherwise(text: str, cut: int) -> None:
    for doctored in (text, APPLE[:cut] + text, APPLE[:cut] + text + APPLE[cut:]):
        with suppress(UsageError):
            parse_ioreg(doctored)


@pytest.mark.skipif(sys.platform == "darwin", reason="this machine has the registry")
def test_elsewhere_it_reaches_nothing_and_says_so() -> None:
    reach = IoregWitness().reach()
    assert (reach.able, reach.statement) == (False, "only macOS has it")


@pytest.mark.skipif(sys.platform != "darwin", reason="only macOS has ioreg")
def test_on_a_mac_it_reaches_a_gpu_or_says_why() -> None:
    reach = IoregWitness().reach()
    assert reach.able or "registry" in reach.statement, reach.statement
