"""Counters within the windows of phases: what is sure, what is possible, and what nobody measured."""

from __future__ import annotations

import pytest

from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.witness import sampling
from pytest_colibri.witness.counters import PROTOCOL_MARKERS
from pytest_colibri.witness.evidence import CounterEvidence, CounterSample, DeviceUse, EngineUse, Window
from pytest_colibri.witness.sampling import PhaseTimes, time_within

CARD = DeviceIdentity("drm", 0, "amdgpu", pci="0000:03:00.0")
WINDOW = Window("decode", 100, 200)


def seen(
    at_us: int, busy_ns: int | None, *, copied_ns: int = 0, bounded: bool = True, ended: int = 0
) -> CounterSample:
    engines = (EngineUse("compute", True, busy_ns, bounded), EngineUse("dma", False, copied_ns))
    return CounterSample(at_us, (DeviceUse(CARD, "amdgpu", engines, at_us, ended),))


def absent(at_us: int) -> CounterSample:
    return CounterSample(at_us, ())


@pytest.mark.parametrize(
    ("samples", "at_least", "at_most"),
    [
        pytest.param([seen(90, 5), seen(110, 6), seen(190, 9), seen(210, 11)], 3, 6, id="between and around"),
        pytest.param([seen(100, 5), seen(200, 9)], 4, 4, id="looks at both ends"),
        pytest.param([seen(90, 5), seen(150, 9), seen(210, 11)], None, 6, id="one look within is no span"),
        pytest.param([seen(110, 5), seen(190, 9)], 4, None, id="no look before"),
        pytest.param([seen(90, 5), seen(110, 6), seen(190, 9)], 3, None, id="no look after"),
        pytest.param([absent(90), absent(110), seen(190, 9), seen(210, 9)], 9, 9, id="opened within"),
        pytest.param(
            [seen(90, None), seen(110, None), seen(190, None), seen(210, None)], None, None, id="none"
        ),
        pytest.param(
            [absent(90), absent(110), seen(190, None), seen(210, None)], None, None, id="then untold"
        ),
        pytest.param(
            [seen(90, 5), seen(110, None), seen(150, 6), seen(190, 7), seen(210, 7)], 1, 2, id="gap"
        ),
        pytest.param(
            [seen(90, 5), seen(110, 5), seen(190, 5), seen(210, 5, ended=1)], 0, None, id="one ended"
        ),
        pytest.param(
            [seen(90, 5), seen(110, 5), seen(190, 5), seen(210, 5, bounded=False)], 0, None, id="ROCm"
        ),
    ],
)
def test_time_within_a_window(
    samples: list[CounterSample], at_least: int | None, at_most: int | None
) -> None:
    (time,) = time_within(CounterEvidence("w", tuple(samples)), WINDOW)
    assert (time.computed_at_least_ns, time.computed_at_most_ns) == (at_least, at_most)


def test_copies_are_no_compute_work() -> None:
    samples = tuple(seen(at_us, 0, copied_ns=at_us) for at_us in (90, 110, 190, 210))
    (time,) = time_within(CounterEvidence("w", samples), WINDOW)
    assert (time.computed_at_least_ns, time.computed_at_most_ns) == (0, 0)
    assert [(e.engine, e.at_least_ns, e.at_most_ns) for e in time.engines if not e.compute] == [
        ("dma", 80, 120)
    ]


def test_memory_is_that_of_looks_within() -> None:
    (time,) = time_within(CounterEvidence("w", (seen(90, 0), seen(150, 0), seen(210, 0))), WINDOW)
    assert time.peak_resident_bytes == 150


def test_a_witness_that_lags_is_sure_of_less_and_bounds_later() -> None:
    """What it shows up to 50 us late may come from before the window, and may still be to come after it."""
    samples = tuple(seen(at_us, at_us) for at_us in range(90, 271, 10))
    (time,) = time_within(CounterEvidence("w", samples, lag_us=50), WINDOW)
    assert (time.computed_at_least_ns, time.computed_at_most_ns) == (50, 150)


def test_a_share_that_reads_as_none_is_in_the_upper_bound() -> None:
    (time,) = time_within(CounterEvidence("w", (seen(0, 0), seen(1000, 0)), unseen_percent=1), WINDOW)
    assert time.computed_at_most_ns == 10_000


def test_without_samples_there_are_no_devices() -> None:
    assert time_within(CounterEvidence("w", ()), WINDOW) == ()


def test_phases_are_windows_once_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 10))
    monkeypatch.setattr(sampling, "monotonic_us", lambda: next(clock))
    phases = PhaseTimes(PROTOCOL_MARKERS)
    for line in (
        '{"event":"phase","phase":"fill","state":"begin"}',
        "anything else",
        '{"event":"phase","phase":"fill","state":"end"}',
        '{"event":"phase","phase":"never begun","state":"end"}',
        '{"event":"phase",',
        '{"event":"phase","phase":"decode","state":"begin"}',
    ):
        phases.note(line)
    assert phases.windows() == (Window("fill", 1, 2),)
