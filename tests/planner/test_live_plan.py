"""A plan of a real container on the machine that runs this test."""

from __future__ import annotations

import json

import pytest

from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.container.usage import read_usage
from pytest_colibri.host.live import probe_host
from pytest_colibri.judge.memory import broken_rules_of
from pytest_colibri.planner.budgets import automatic_ram_budget
from pytest_colibri.planner.exchange import plan_to_json
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.planner.reference import plan

LEAST_BYTES = 4_000_000_000


@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_tiny_model_is_planned_on_this_machine(tmp_path, backend):
    model = write_tiny_model(tmp_path / "model", "int4-grouped")
    host = probe_host(frozenset({backend}))
    limit = host.memory.limit.bytes
    if limit is None or automatic_ram_budget(limit) < LEAST_BYTES:
        pytest.skip(f"a plan of the smallest model takes 4 GB of RAM, and there are {host.memory.limit}")
    usage = read_usage(model / ".coli_usage")
    request = PlanRequest(read_geometry(model), host, backend, host.accelerators, usage=usage)
    planned = plan(request)
    assert broken_rules_of(planned) == {}
    assert planned.cold_bytes == 0
    assert (len(planned.hot_experts) > 0) == any(share.budget_bytes for share in planned.devices)
    assert json.loads(json.dumps(plan_to_json(planned)))["model"]["path"] == str(model)
