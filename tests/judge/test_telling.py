"""Figures are recognised in warnings of any wording, and no figure is taken for another."""

from __future__ import annotations

import pytest

from pytest_colibri.judge.plan_rules.telling import names_figures
from pytest_colibri.units import GB, MIB

ASKED, GRANTED = 100 * GB, 59_043_000_000


@pytest.mark.parametrize(
    "line",
    [
        "RAM budget clamped from 100.0 GB to 59.0 GB because the GPU shares physical memory",
        "RAM: 100000000000 B asked, 59043000000 B given",
        "gave 59.04GB (of 100.00GB)",
        "only 59043.0 MB of 100 GB",
    ],
)
def test_both_figures_are_recognised(line):
    assert names_figures([line], ASKED, GRANTED)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "RAM budget was clamped",
        "RAM budget clamped from 100.0 GB to 59.1 GB",
        "RAM budget clamped from 100.0 to 59.0",
        "RAM budget clamped to 59.0 GB",
        "100.0 GB of 159.0 GB",
        "100.0 GBps of 59.0 GB",
        "100000000000 B and 60 GB",
    ],
)
def test_what_names_one_figure_or_none_tells_nothing(line):
    assert not names_figures([line], ASKED, GRANTED)


def test_both_figures_stand_in_one_line():
    assert not names_figures(["100.0 GB were asked for", "59.0 GB are given"], ASKED, GRANTED)


def test_binary_units_are_binary():
    assert names_figures(["256.0 MiB of 8.0 GiB"], 256 * MIB, 8 * 1024 * MIB)
    assert not names_figures(["256.0 MB"], 256 * MIB)
