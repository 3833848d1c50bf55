"""``docs/planner.md`` names what the planner knows: every family, mask, switch and resident part."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_colibri.container.families import BY_MODEL_TYPE
from pytest_colibri.planner.environment import RESIDENT_PARTS, SWITCHES
from pytest_colibri.planner.masks import CHOICES, MASKS

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def cells(head: str, column: int) -> str:
    """Return the cells of one column of the table with this head."""
    table = PAGE[PAGE.index(f"| {head} |") :].split("\n\n")[0]
    return " ".join(line.split(" | ")[column] for line in table.splitlines()[2:])


def test_every_model_type_is_in_the_table_of_families() -> None:
    assert set(re.findall(r"`(\w+)`", cells("family", 1))) == set(BY_MODEL_TYPE)


def test_every_variable_that_changes_a_plan_is_in_its_table() -> None:
    masks = {name for names in MASKS.values() for name in names}
    parts = {name for names in RESIDENT_PARTS.values() for name in names}
    named = set(re.findall(r"`([A-Z_]+)(?:=\d)?`", cells("variable", 0)))
    assert named == masks | parts | set(CHOICES) | set(SWITCHES.values()) | {"COLI_CUDA_MTP"}
