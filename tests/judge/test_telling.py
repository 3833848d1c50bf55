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
        "only 59043 MB of 100000 MB",
        "59 GB of 100 GB",
        "59,043,000,000 bytes of 100,000,000,000 bytes",
        "59_043_000_000 B of 100_000_000_000 B",
        "54.98 GiB of 93.13 GiB",
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
        "100000000000 B and 58 GB",
    ],
)
def test_what_names_one_figure_or_none_tells_nothing(line):
    assert not names_figures([line], ASKED, GRANTED)


def test_both_figures_stand_in_one_line():
    assert not names_figures(["100.0 GB were asked for", "59.0 GB are given"], ASKED, GRANTED)


def test_binary_units_are_binary():
    assert names_figures(["256.0 MiB of 8.0 GiB"], 256 * MIB, 8 * 1024 * MIB)
    assert not names_figures(["256.0 MB"], 256 * MIB)


def test_a_figure_may_be_cut_off_as_exported_budgets_are():
    assert names_figures(["RAM 78.598 GB of 100.000 GB"], 78_598_912_345, 100 * GB)
    assert not names_figures(["RAM 78.599 GB"], 78_598_412_345)


def test_a_whole_number_of_a_large_unit_does_not_stand_for_what_is_far_from_it():
    assert not names_figures(["1 GB"], 1_900_000_000)
    assert not names_figures(["0 GB"], 400_000_000)
