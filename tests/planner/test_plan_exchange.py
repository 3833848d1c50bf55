"""The plan as JSON and as text."""

from __future__ import annotations

import json
from dataclasses import replace

from machines import device, full_usage, glm_mixed, machine

from pytest_colibri.planner.exchange import plan_to_json
from pytest_colibri.planner.explain import explain
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB

GLM = glm_mixed()
UUID = "0123456789abcdef0123456789abcdef"
CARD = device("card", 24 * GB, total=25 * GB)
CARD = replace(CARD, identity=replace(CARD.identity, uuid=UUID))
PLANNED = plan(PlanRequest(GLM, machine(100 * GB, sockets=2), "cuda", (CARD,), usage=full_usage(GLM)))


def test_json_has_the_shape_that_planners_exchange():
    written = plan_to_json(PLANNED)
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert {name: sorted(part) for name, part in written["tiers"].items()} == {
        "disk": ["available_bytes", "cold_expert_bytes", "model_bytes"],
        "ram": [
            "available_bytes",
            "budget_bytes",
            "cache_slots_per_layer",
            "dense_bytes",
            "expert_cache_bytes",
            "runtime_bytes",
            "warm_expert_bytes",
        ],
        "vram": ["budget_bytes", "devices", "expert_capacity", "hot_expert_bytes", "resident_bytes"],
    }
    assert written["version"] == 2
    assert written["policy"] == {"name": "balanced", "quality_preserving": True}
    assert written["cpu"] == {"physical_cores": 8, "sockets": 2}
    assert written["memory"] == {"unified": False, "available_bytes": 100 * GB}
    assert written["bottleneck_class"] == "disk"
    assert written["tune"]["DRAFT"]["value"] == "0"
    assert written["environment"] == PLANNED.environment


def test_json_describes_model_and_devices():
    written = plan_to_json(PLANNED)
    model = written["model"]
    assert model["path"] == str(GLM.path)
    assert model["expert_layers"] == 76
    assert model["typical_expert_bytes"] == 18_915_328
    assert model["max_expert_bytes"] == model["expert_bytes_by_layer"]["78"] == 37_789_696
    assert model["per_cap_bytes"] == 75 * 18_915_328 + 37_789_696
    assert written["tiers"]["vram"]["devices"] == [
        {
            "index": 0,
            "name": "card",
            "unified_memory": False,
            "total_bytes": 25 * GB,
            "free_bytes": 24 * GB,
            "reserve_bytes": 2 * GB,
            "usable_bytes": 22 * GB,
            "resident_bytes": 0,
            "budget_bytes": 22 * GB,
        }
    ]


def test_unknown_disk_stays_unknown():
    assert plan_to_json(PLANNED)["tiers"]["disk"]["available_bytes"] is None


def test_no_uuid_leaves():
    assert UUID not in json.dumps(plan_to_json(PLANNED))
    assert UUID not in explain(PLANNED)


def test_only_the_experimental_policy_may_change_the_output():
    request = replace(PLANNED.request, policy="experimental-fast")
    assert plan_to_json(plan(request))["policy"]["quality_preserving"] is False


def test_explanation_shows_each_figure_with_its_source():
    lines = [" ".join(line.split()) for line in explain(PLANNED).splitlines()]
    assert "limit 100.0 GB (MemAvailable)" in lines
    assert "RAM budget 88.0 GB (automatic)" in lines
    assert "runtime: experts in flight 2.42 GB (64 x widest expert of 37789696 B)" in lines
    assert "card: usable 22.0 GB (tool, less the reserve)" in lines
    assert "CUDA_EXPERT_GB=22.000" in lines
    assert any(line.startswith("DRAFT=0: disk-bound") for line in lines)


def test_steps_add_up():
    figures = {step.name: step.figure.bytes for step in PLANNED.steps}
    parts = [count for name, count in figures.items() if name.startswith("runtime: ")]
    assert sum(parts) == figures["runtime"]
    assert figures["RAM budget"] == figures["limit"] - figures["reserve"]
    assert figures["expert cache"] == figures["RAM budget"] - figures["dense weights"] - figures["runtime"]
    tiers = ("hot experts, VRAM", "warm experts, RAM", "cold experts, disk")
    assert sum(figures[name] for name in tiers) == figures["experts"]
