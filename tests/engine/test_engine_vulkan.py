from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from engine_helpers import F32, exact_expert, make_expert

from pytest_colibri.container.formats import WeightFormat
from pytest_colibri.engine import shaders
from pytest_colibri.engine.device import ExpertRows, Residency
from pytest_colibri.engine.vulkan import open_vulkan
from pytest_colibri.engine.weights import Expert, ExpertKey
from pytest_colibri.errors import HostMismatch, Unavailable

if TYPE_CHECKING:
    from pytest_colibri.engine.vulkan.backend import VulkanExperts

INT8, INT4 = WeightFormat("int8-row"), WeightFormat("int4-row")
GROUPS_OF_32, GROUPS_OF_64 = WeightFormat("int4-grouped", 32), WeightFormat("int4-grouped", 64)
FORMATS = [F32, INT8, INT4, WeightFormat("int4-grouped", 16), GROUPS_OF_32, GROUPS_OF_64]
# Hidden and expert widths: whole words, ragged last groups, ragged words, fewer outputs than a workgroup.
SIZES = [(128, 64), (100, 70), (83, 37), (65, 3)]
BUDGET = 10**9

OpenDevice = Callable[..., "VulkanExperts"]


@pytest.fixture
def open_device(vulkan: str) -> Iterator[OpenDevice]:
    """Open devices that are closed after the test."""
    opened: list[VulkanExperts] = []

    def open_one(staged: bool = False, batch_rows: int = 64) -> VulkanExperts:
        opened.append(open_vulkan(vulkan, batch_rows, staged))
        return opened[-1]

    yield open_one
    for device in opened:
        device.close()


def fill(device: VulkanExperts, experts: Sequence[Expert], budget_bytes: int = BUDGET) -> Residency:
    keyed = {ExpertKey(0, index): expert for index, expert in enumerate(experts)}
    ranked = [(key, expert.layout) for key, expert in keyed.items()]
    return device.fill(ranked, budget_bytes, keyed.__getitem__)


def rows_for(expert: int, *rows: int) -> ExpertRows:
    return ExpertRows(ExpertKey(0, expert), np.array(rows), np.ones(len(rows), np.float32))


def random_rows(count: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal((count, width)).astype(np.float32)


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_the_device_computes_what_numpy_computes(
    open_device: OpenDevice, weight_format: WeightFormat, hidden: int, width: int, staged: bool
) -> None:
    fitting = weight_format if (weight_format.group_size or 0) < width else INT4
    experts = [make_expert(hidden, width, weight_format, fitting, seed) for seed in range(3)]
    rows = random_rows(9, hidden)
    batch = [rows_for(2, 0), rows_for(0, *range(9)), rows_for(1, 8, 3, 5, 1)]
    device = open_device(staged)
    assert len(fill(device, experts).experts) == 3
    outputs = device.run_experts(batch, rows)
    for share, output in zip(batch, outputs, strict=True):
        exact = exact_expert(experts[share.key.expert], rows[share.rows])
        np.testing.assert_allclose(output, exact, rtol=0, atol=2e-6 * np.abs(exact).max() + 1e-7)


def test_gate_up_and_down_may_differ_in_format(open_device: OpenDevice) -> None:
    expert = make_expert(100, 70, GROUPS_OF_64, INT8)
    device = open_device()
    fill(device, [expert])
    rows = random_rows(2, 100)
    (output,) = device.run_experts([rows_for(0, 1, 0)], rows)
    np.testing.assert_allclose(output, exact_expert(expert, rows[[1, 0]]), atol=1e-5)
    assert device.take_counts().dispatches == {"gate_up_int4.spv": 1, "down_int8.spv": 1}


def test_large_activations_saturate_instead_of_overflowing(open_device: OpenDevice) -> None:
    expert = make_expert(16, 8, F32, F32)
    device = open_device()
    fill(device, [expert])
    (output,) = device.run_experts([rows_for(0, 0)], np.full((1, 16), 1e4, np.float32))
    (on_cpu,) = expert.apply(np.full((1, 16), 1e4, np.float32))
    assert np.isfinite(output).all()
    np.testing.assert_allclose(output[0], on_cpu, rtol=1e-4)


def test_a_batch_is_one_submission_and_a_dispatch_per_expert_and_piece(open_device: OpenDevice) -> None:
    device = open_device()
    fill(device, [make_expert(64, 32, INT4, INT4, seed) for seed in range(2)])
    assert device.take_counts().submits == 0
    device.run_experts([rows_for(0, 0, 1), rows_for(1, 1)], random_rows(2, 64))
    counts = device.take_counts()
    assert (counts.dispatches, counts.submits) == ({"gate_up_int4.spv": 2, "down_int4.spv": 2}, 1)
    assert device.take_counts().dispatches == {}


def test_staged_copies_are_counted_as_submissions(open_device: OpenDevice) -> None:
    device = open_device(staged=True)
    fill(device, [make_expert(64, 32, INT4, INT4, seed) for seed in range(2)])
    assert device.take_counts().submits == 2


def test_an_expert_larger_than_the_staging_buffer_arrives_whole(
    open_device: OpenDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_colibri.engine.vulkan.memory.MAX_STAGING_BYTES", 1000)
    expert = make_expert(64, 32, INT8, INT8)
    device = open_device(staged=True)
    fill(device, [expert])
    rows = random_rows(1, 64)
    (output,) = device.run_experts([rows_for(0, 0)], rows)
    np.testing.assert_allclose(output, exact_expert(expert, rows), atol=1e-5)
    assert device.take_counts().submits > 2


def test_experts_in_several_arenas_are_found(
    open_device: OpenDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = [make_expert(64, 32, F32, F32, seed) for seed in range(3)]
    one = experts[0].layout.nbytes
    monkeypatch.setattr("pytest_colibri.engine.vulkan.backend.MAX_ARENA_BYTES", one)
    device = open_device()
    assert fill(device, experts).bytes == 3 * one
    rows = random_rows(1, 64)
    for index, output in enumerate(device.run_experts([rows_for(index, 0) for index in range(3)], rows)):
        np.testing.assert_allclose(output, exact_expert(experts[index], rows), atol=1e-5)


def test_the_budget_counts_the_padding_of_every_row(open_device: OpenDevice) -> None:
    # 83 int8 weights take 84 bytes a row, and 37 take 40.
    experts = [make_expert(83, 37, INT8, INT8, seed) for seed in range(3)]
    on_device = 2 * (37 * 84 + 37 * 4) + 83 * 40 + 83 * 4
    assert experts[0].layout.nbytes < on_device
    assert fill(open_device(), experts, 2 * on_device - 1) == Residency((ExpertKey(0, 0),), on_device)
    assert fill(open_device(), experts, 2 * on_device).bytes == 2 * on_device
    assert fill(open_device(), experts, on_device - 1) == Residency((), 0)


def test_filling_stops_at_the_first_expert_that_does_not_fit(open_device: OpenDevice) -> None:
    small, large = make_expert(32, 16, INT4, INT4), make_expert(32, 16, F32, F32)
    residency = fill(open_device(), [small, large, small], small.layout.nbytes * 3)
    assert residency.experts == (ExpertKey(0, 0),)


def test_a_batch_too_wide_for_the_device_is_refused(open_device: OpenDevice) -> None:
    with pytest.raises(HostMismatch, match=r"binds at most \d+ bytes; the widest batch needs"):
        fill(open_device(batch_rows=250_000), [make_expert(4096, 8, INT4, F32)])


def test_a_missing_shader_is_named(
    open_device: OpenDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shaders, "FOLDER", tmp_path)
    with pytest.raises(Unavailable, match=r"shader missing: (gate_up|down)_f32\.spv \(No such file"):
        fill(open_device(), [make_expert(16, 8, F32, F32)])


def test_a_device_is_found_by_every_identity(vulkan: str) -> None:
    first = open_vulkan(vulkan, 1)
    identity = first.identity
    first.close()
    selectors = [f"name:{identity.name}", f"uuid:{identity.uuid}", f"uuid:{str(identity.uuid).upper()}"]
    if identity.pci is not None:
        selectors.append(f"pci:{identity.pci.upper()}")
    for selector in selectors:
        device = open_vulkan(selector, 1)
        assert device.identity == identity
        device.close()


@pytest.mark.parametrize("selector", ["index:99", "uuid:00", "pci:ffff:ff:1f.7", "name:GeForce 9999"])
def test_another_device_is_never_taken_instead(vulkan: str, selector: str) -> None:
    device = open_vulkan(vulkan, 1)
    name = device.identity.name
    device.close()
    with pytest.raises(HostMismatch, match="there is no Vulkan device") as refusal:
        open_vulkan(selector, 1)
    assert f"name:{name}" in str(refusal.value)


def test_without_a_name_no_device_is_chosen(vulkan: str) -> None:
    assert vulkan
    with pytest.raises(HostMismatch, match="needs a device by name; this machine has index:0"):
        open_vulkan(None, 1)
