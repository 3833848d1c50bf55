"""Cases of public reports: what was planned wrongly, and what is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import GB10, LAVAPIPE, device, full_usage, glm_mixed, machine, small_model, windowed

from pytest_colibri.errors import HostMismatch, UsageError
from pytest_colibri.judge.memory import broken_rules_of
from pytest_colibri.planner.plan import DoesNotFit, Plan, PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB, MIB, Figure, format_bytes

GLM = glm_mixed()


def sound_plan(request: PlanRequest) -> Plan:
    """Plan, and see that every rule holds."""
    planned = plan(request)
    assert broken_rules_of(planned) == {}
    return planned


@pytest.mark.parametrize("usage", [{}, full_usage(GLM)], ids=["no history", "full history"])
def test_issue_653_one_pool_of_gb10_is_counted_once(usage):
    limit = 114_200_000_000
    planned = sound_plan(PlanRequest(GLM, machine(limit), "cuda", (GB10,), usage=usage))
    assert planned.unified
    assert planned.ram_budget_bytes + planned.vram_budget_bytes <= 0.88 * limit
    assert planned.slots_per_layer >= 1
    assert planned.reserve_bytes >= 0.12 * limit


def test_issue_653_history_gives_the_pool_to_the_tier_after_one_slot_per_layer():
    planned = sound_plan(PlanRequest(GLM, machine(114_200_000_000), "cuda", (GB10,), usage=full_usage(GLM)))
    assert planned.slots_per_layer == 1
    assert planned.vram_budget_bytes > 80 * GB
    assert planned.vram_budget_bytes - planned.hot_bytes < GLM.widest


def test_issue_653_without_history_the_ram_cache_gets_the_pool():
    planned = sound_plan(PlanRequest(GLM, machine(114_200_000_000), "cuda", (GB10,)))
    assert planned.vram_budget_bytes == 0
    assert planned.slots_per_layer == 56
    assert any("no usage history" in line for line in planned.warnings)


def test_issue_759_explicit_budgets_are_clamped_with_both_figures():
    planned = sound_plan(
        PlanRequest(GLM, machine(124 * GB), "cuda", (GB10,), ram_bytes=100 * GB, vram_bytes=65 * GB)
    )
    assert planned.vram_budget_bytes == 65 * GB
    assert planned.ram_budget_bytes + planned.vram_budget_bytes <= 0.88 * 124 * GB
    (line,) = [line for line in planned.warnings if line.startswith("RAM budget clamped")]
    assert "100.0 GB (100000000000 B)" in line
    assert f"{planned.ram_budget_bytes} B" in line


def test_unreported_memory_of_gb10_leaves_a_reserve_and_slots():
    limit = 125_700_000_000
    planned = sound_plan(PlanRequest(GLM, machine(limit), "cuda", (GB10,), usage=full_usage(GLM)))
    assert planned.slots_per_layer >= 1
    assert planned.ram_budget_bytes + planned.vram_budget_bytes <= 0.88 * limit
    assert planned.devices[0].accelerator is GB10


def test_three_gigabytes_do_not_fit_and_are_not_raised():
    with pytest.raises(DoesNotFit, match=r"does not fit, by \d+ bytes, because dense weights .* 2\.64 GB"):
        plan(PlanRequest(small_model(), machine(3 * GB), "cpu"))


def test_missing_bytes_are_exactly_what_is_missing():
    model, available = small_model(), 3 * GB
    with pytest.raises(DoesNotFit) as caught:
        plan(PlanRequest(model, machine(100 * GB), "cpu", ram_bytes=available))
    missing = caught.value.missing_bytes
    planned = sound_plan(PlanRequest(model, machine(100 * GB), "cpu", ram_bytes=available + missing))
    assert planned.slots_per_layer == 1
    with pytest.raises(DoesNotFit, match="by 1 bytes"):
        plan(PlanRequest(model, machine(100 * GB), "cpu", ram_bytes=available + missing - 1))


def test_container_limit_bounds_the_budget_of_a_large_host():
    host = machine(250_000_000 * 1024, cgroup=34_359_738_368)
    planned = sound_plan(PlanRequest(small_model(), host, "cpu"))
    assert planned.limit.source == "memory.max"
    assert planned.ram_budget_bytes == 34_359_738_368 * 88 // 100


def test_issue_662_amd_card_gets_its_tier():
    card = device("Radeon RX 6950 XT", 16_090_000_000, total=17_163_091_968, api="rocm")
    planned = sound_plan(PlanRequest(GLM, machine(64 * GB), "rocm", (card,), usage=full_usage(GLM)))
    assert planned.vram_budget_bytes == 14_090_000_000
    assert planned.environment["CUDA_EXPERT_GB"] == "14.090"
    assert not planned.unified


def test_issue_856_one_wide_row_costs_at_most_five_percent_of_the_cap():
    host = machine(256 * GB)
    without = sound_plan(PlanRequest(glm_mixed(mtp_row=False), host, "cpu", ram_bytes=242 * GB))
    with_row = sound_plan(PlanRequest(GLM, host, "cpu", ram_bytes=242 * GB))
    assert without.slots_per_layer == 158
    assert with_row.slots_per_layer >= 0.95 * without.slots_per_layer


def test_issue_389_all_in_ram_on_two_sockets_is_compute_bound():
    planned = sound_plan(PlanRequest(GLM, machine(1000 * GB, cores=64, sockets=2), "cpu"))
    assert planned.bottleneck == "compute"
    assert planned.environment["DRAFT"] == "0"
    assert planned.environment["COLI_NUMA"] == "1"
    assert planned.environment["PIN_GB"] == "all"
    assert "_numactl" in planned.tune
    assert "_numactl" not in planned.environment


def test_issue_467_explicit_cuda_mtp_leaves_draft_unset():
    request = PlanRequest(
        GLM, machine(128 * GB), "cuda", (GB10,), usage=full_usage(GLM), environment={"COLI_CUDA_MTP": "1"}
    )
    assert "DRAFT" not in sound_plan(request).environment


def test_mig_slice_without_figures_is_unknown_and_gets_no_tier():
    card = device("NVIDIA A100-SXM4-80GB", None, pool=None)
    host = machine(1_056_000_000 * 1024)
    planned = sound_plan(PlanRequest(GLM, host, "cuda", (card,), usage=full_usage(GLM)))
    assert planned.vram_budget_bytes == 0
    assert planned.devices[0].usable.bytes is None
    assert "COLI_CUDA" not in planned.environment
    assert any("usable memory unknown" in line for line in planned.warnings)


@pytest.mark.parametrize("pool", ["discrete", "unified"])
def test_free_memory_above_the_total_is_refused(pool):
    card = device("NVIDIA GeForce RTX 5090", 55_372 * 2**20, total=32_106 * 2**20, pool=pool)
    planned = sound_plan(PlanRequest(GLM, machine(128 * GB), "cuda", (card,), usage=full_usage(GLM)))
    assert planned.vram_budget_bytes == 0
    assert any("free 58.1 GB exceeds total 33.7 GB" in line for line in planned.warnings)


def test_device_of_unknown_pool_takes_its_bytes_from_the_ram():
    card = device("card", 60 * GB, pool=None)
    planned = sound_plan(PlanRequest(GLM, machine(100 * GB), "vulkan", (card,), usage=full_usage(GLM)))
    assert planned.unified
    assert planned.ram_budget_bytes + planned.vram_budget_bytes <= 88 * GB
    assert any("whether it shares the RAM is unknown" in line for line in planned.warnings)


def test_one_device_is_used_where_one_suffices():
    model = small_model()
    cards = (device("large", 32 * GB), device("small", 10 * GB, index=1))
    planned = sound_plan(PlanRequest(model, machine(64 * GB), "cuda", cards, usage=full_usage(model)))
    assert [share.budget_bytes for share in planned.devices] == [model.expert_bytes, 0]
    assert planned.environment["COLI_GPU"] == "0"


def test_discrete_device_comes_before_integrated_and_two_pools_are_counted_once_each():
    integrated = device("integrated", 200 * GB, pool="unified", kind="integrated")
    card = device("card", 16 * GB, index=1)
    planned = sound_plan(
        PlanRequest(GLM, machine(100 * GB), "vulkan", (integrated, card), usage=full_usage(GLM))
    )
    first, second = planned.devices
    assert first.accelerator is card
    assert first.budget_bytes == 14 * GB
    assert second.budget_bytes > 0
    assert planned.ram_budget_bytes + second.budget_bytes + second.reserve_bytes <= 88 * GB


def test_heap_of_a_unified_device_bounds_its_share():
    device_with_small_heap = device("integrated", 4 * GB, pool="unified", kind="integrated")
    planned = sound_plan(
        PlanRequest(GLM, machine(100 * GB), "vulkan", (device_with_small_heap,), usage=full_usage(GLM))
    )
    (share,) = planned.devices
    assert share.budget_bytes == 4 * GB - share.reserve_bytes


def test_total_of_a_unified_device_bounds_its_share_where_free_is_unknown():
    integrated = device("integrated", None, total=6 * GB, pool="unified", kind="integrated")
    planned = sound_plan(PlanRequest(GLM, machine(100 * GB), "vulkan", (integrated,), usage=full_usage(GLM)))
    (share,) = planned.devices
    assert share.budget_bytes == 6 * GB - share.reserve_bytes


def test_prompt_width_grows_the_reserve():
    card = device("card", 40 * GB)
    narrow, wide = (
        sound_plan(
            PlanRequest(GLM, machine(100 * GB), "cuda", (card,), usage=full_usage(GLM), prompt_width=width)
        ).devices[0]
        for width in (64, 7_065)
    )
    assert narrow.reserve_bytes == 2 * GB
    assert wide.reserve_bytes == 7_065 * 4 * (4 * 6144 + 2 * 64 * (192 + 64 + 256) + 3 * 8 * 2048)
    assert wide.usable.bytes == 40 * GB - wide.reserve_bytes


def test_cpu_device_is_called_one():
    model = small_model()
    planned = sound_plan(PlanRequest(model, machine(23 * GB), "vulkan", (LAVAPIPE,), usage=full_usage(model)))
    assert planned.environment["COLI_VULKAN"] == "1"
    assert planned.environment["COLI_VK_EXPERTS"] == "16"
    assert planned.environment["COLI_NO_OMP_TUNE"] == "1"
    assert any("llvmpipe is a CPU device, not a GPU" in line for line in planned.warnings)


@pytest.mark.parametrize(
    ("name", "size", "window"),
    [("Radeon RX 580", 8_321_499_136, 268_435_456), ("card of 24 GB", 24_325 * MIB, 214 * MIB)],
    ids=["public report 19", "public report 20"],
)
def test_a_card_without_resizable_bar_is_staged_and_both_figures_are_told(name, size, window):
    planned = sound_plan(
        PlanRequest(GLM, machine(64 * GB), "vulkan", (windowed(name, size, window),), usage=full_usage(GLM))
    )
    assert planned.vram_budget_bytes == size - 2 * GB
    (line,) = [line for line in planned.warnings if "no Resizable BAR" in line]
    assert f"{format_bytes(window)} of {format_bytes(size)} device memory are host-visible" in line


def test_heaps_of_a_card_are_not_summed():
    card = windowed("card", 8 * GB, GB, free=9 * GB)
    card = replace(card, total=Figure(9 * GB, "all device-local heaps"))
    planned = sound_plan(PlanRequest(GLM, machine(64 * GB), "vulkan", (card,), usage=full_usage(GLM)))
    assert planned.vram_budget_bytes == 6 * GB


def test_a_card_that_the_cpu_can_write_needs_no_staging():
    card = windowed("card", 8 * GB, 8 * GB)
    planned = sound_plan(PlanRequest(GLM, machine(64 * GB), "vulkan", (card,), usage=full_usage(GLM)))
    assert not any("Resizable BAR" in line for line in planned.warnings)


@pytest.mark.parametrize(
    ("free", "total", "told"), [(16 * GB, 24 * GB, True), (24 * GB, 24 * GB, False)], ids=["busy", "idle"]
)
def test_memory_that_others_use_is_told(free, total, told):
    model = small_model()
    request = PlanRequest(model, machine(64 * GB), "cuda", (device("card", free, total=total),))
    assert any("in use by others" in line for line in sound_plan(request).warnings) is told


def test_history_shorter_than_the_budget_says_why_the_tier_is_small():
    model = small_model()
    request = PlanRequest(model, machine(64 * GB), "cuda", (device("card", 16 * GB),), usage={(3, 0): 5})
    planned = sound_plan(request)
    assert planned.hot_experts == ((3, 0),)
    assert any("90.0 MB of its budget are idle" in line for line in planned.warnings)


def test_history_of_another_model_is_not_taken_for_one():
    model = small_model()
    request = PlanRequest(model, machine(64 * GB), "cuda", (device("card", 16 * GB),), usage={(99, 0): 5})
    planned = sound_plan(request)
    assert planned.hot_experts == ()
    assert any("no expert of the usage history is of this model" in line for line in planned.warnings)


def test_unknown_memory_drives_no_plan():
    with pytest.raises(HostMismatch, match=r"available memory is unknown .*state the RAM budget"):
        plan(PlanRequest(small_model(), machine(None), "cpu"))


def test_unknown_memory_with_a_stated_budget_plans_and_says_so():
    model = small_model()
    host = machine(None, total=32 * GB)
    request = PlanRequest(
        model, host, "vulkan", (LAVAPIPE,), ram_bytes=16 * GB, vram_bytes=GB, usage=full_usage(model)
    )
    planned = sound_plan(request)
    assert planned.ram_budget_bytes == 16 * GB
    assert planned.limit.bytes is None
    assert planned.vram_budget_bytes == 0
    assert any("is taken as asked for" in line for line in planned.warnings)


def test_stated_budget_above_the_total_memory_does_not_fit():
    with pytest.raises(DoesNotFit, match="exceeds the total memory"):
        plan(PlanRequest(small_model(), machine(None, total=8 * GB), "cpu", ram_bytes=16 * GB))


def test_explicit_ram_budget_within_the_limit_is_kept_and_its_reserve_told():
    planned = sound_plan(PlanRequest(small_model(), machine(100 * GB), "cpu", ram_bytes=95 * GB))
    assert planned.ram_budget_bytes == 95 * GB
    assert planned.reserve_bytes == 5 * GB
    assert any("leaves 5.00 GB" in line for line in planned.warnings)


def test_explicit_ram_budget_comes_before_an_automatic_tier():
    planned = sound_plan(
        PlanRequest(GLM, machine(100 * GB), "cuda", (GB10,), ram_bytes=60 * GB, usage=full_usage(GLM))
    )
    assert planned.ram_budget_bytes == 60 * GB
    assert 27 * GB < planned.vram_budget_bytes <= 28 * GB


def test_slots_asked_for_bound_the_cache():
    model = small_model()
    planned = sound_plan(PlanRequest(model, machine(23 * GB), "cpu", slots_per_layer=2))
    assert planned.slots_per_layer == 2
    assert planned.warm_bytes == planned.cache_bytes == 2 * model.bytes_per_slot
    assert planned.cold_bytes == model.expert_bytes - 2 * model.bytes_per_slot


def test_more_slots_than_experts_are_clamped_aloud():
    planned = sound_plan(PlanRequest(small_model(), machine(23 * GB), "cpu", slots_per_layer=20))
    assert planned.slots_per_layer == 8
    assert any("slots per layer clamped from 20 to 8" in line for line in planned.warnings)


def test_model_without_experts_plans_without_slots():
    planned = sound_plan(PlanRequest(small_model(widths=()), machine(23 * GB), "cpu"))
    assert (planned.slots_per_layer, planned.hit_rate, planned.bottleneck) == (0, 1.0, "compute")


def test_backend_without_device_says_so_in_neutral_words():
    planned = sound_plan(PlanRequest(small_model(), machine(23 * GB), "vulkan"))
    assert any("no supported GPU for the vulkan backend" in line for line in planned.warnings)
    assert "COLI_VULKAN" not in planned.environment


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"context": 0}, "context must be at least 1, and is 0"),
        ({"ram_bytes": -1}, "ram_bytes must be at least 1"),
        ({"slots_per_layer": 0}, "slots_per_layer must be at least 1"),
        ({"accelerators": (LAVAPIPE,)}, "the cpu backend takes no device, and llvmpipe"),
    ],
)
def test_bad_requests_are_refused(change, sentence):
    with pytest.raises(UsageError, match=sentence):
        plan(PlanRequest(small_model(), machine(23 * GB), "cpu", **change))
