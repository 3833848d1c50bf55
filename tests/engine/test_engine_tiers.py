from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from engine_helpers import reader_of, write_wide_model
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.container.safetensors import Container, open_container
from pytest_colibri.engine.tiers import ExpertTiers, TierCount
from pytest_colibri.engine.weights import ExpertKey

EXPERT_BYTES = 96


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with open_container(write_wide_model(tmp_path_factory.mktemp("wide"), experts=200)) as container:
        yield container


def served(tiers: ExpertTiers, union: Sequence[int]) -> list[str]:
    return [one.tier for one in tiers.serve(0, union)]


def test_a_hit_makes_young_and_an_admission_evicts_the_oldest(wide: Container) -> None:
    tiers = ExpertTiers(*reader_of(wide), slots_per_layer=2)
    assert served(tiers, [1]) == served(tiers, [2]) == ["disk"]
    assert served(tiers, [1]) == ["ram"]
    assert served(tiers, [3]) == ["disk"]
    assert served(tiers, [2]) == ["disk"]
    assert served(tiers, [3, 1]) == ["ram", "disk"]


def test_the_last_misses_of_a_block_are_admitted_in_reverse_order(wide: Container) -> None:
    tiers = ExpertTiers(*reader_of(wide), slots_per_layer=2)
    assert served(tiers, [1, 2, 3]) == ["disk"] * 3
    # 3 entered first and 2 after it, so that 3 is the older one and leaves first.
    assert served(tiers, [9]) == ["disk"]
    assert served(tiers, [2]) == ["ram"]
    assert served(tiers, [3]) == ["disk"]


def test_the_lookups_of_a_block_come_before_its_admissions(wide: Container) -> None:
    tiers = ExpertTiers(*reader_of(wide), slots_per_layer=1)
    served(tiers, [5])
    assert served(tiers, [1, 2, 5]) == ["disk", "disk", "ram"]


def test_a_later_block_finds_what_an_earlier_one_evicted_gone(wide: Container) -> None:
    tiers = ExpertTiers(*reader_of(wide), slots_per_layer=1)
    served(tiers, [150])
    assert served(tiers, [*range(63), 150])[-1] == "ram"
    served(tiers, [150])
    assert served(tiers, [*range(64), 150])[-1] == "disk"


def test_without_slots_everything_comes_from_the_disk(wide: Container) -> None:
    tiers = ExpertTiers(*reader_of(wide), slots_per_layer=0)
    assert served(tiers, [1]) == served(tiers, [1]) == ["disk"]


def test_an_expert_on_the_device_is_counted_there_and_never_takes_a_slot(wide: Container) -> None:
    tiers = ExpertTiers(*reader_of(wide), slots_per_layer=1)
    tiers.keep_on_device([ExpertKey(0, 7)])
    served(tiers, [4])
    assert served(tiers, [7]) == ["vram"]
    assert served(tiers, [4]) == ["ram"]
    assert tiers.take_counts() == {
        "vram": TierCount(1, EXPERT_BYTES),
        "ram": TierCount(1, EXPERT_BYTES),
        "disk": TierCount(1, EXPERT_BYTES),
    }
    assert tiers.take_counts()["vram"] == TierCount(0, 0)


def test_every_tier_serves_the_stored_weights(wide: Container) -> None:
    tiers = ExpertTiers(*reader_of(wide), slots_per_layer=1)
    for _tier in ("disk", "ram"):
        (one,) = tiers.serve(0, [11])
        assert one.weights is not None
        assert one.weights.gate.dense().reshape(-1).tolist() == list(range(24 * 11, 24 * 11 + 8))


def replay_lru(batches: Sequence[Sequence[int]], capacity: int) -> int:
    """Hits of the residency study's ``lru``, written down independently: a list, oldest first."""
    slots: list[int] = []
    hits = 0
    for union in batches:
        for block in (union[begin : begin + 64] for begin in range(0, len(union), 64)):
            misses = []
            for expert in block:
                if expert in slots:
                    hits += 1
                    slots.append(slots.pop(slots.index(expert)))
                else:
                    misses.append(expert)
            admitted = misses[len(misses) - min(capacity, len(misses)) :][::-1]
            slots = (slots + admitted)[-capacity:] if capacity else []
    return hits


@given(
    batches=st.lists(st.lists(st.integers(0, 199), unique=True, max_size=150), max_size=8),
    capacity=st.integers(0, 90),
)
def test_the_cache_replays_as_the_residency_study_does(
    wide: Container, batches: list[list[int]], capacity: int
) -> None:
    tiers = ExpertTiers(*reader_of(wide), slots_per_layer=capacity)
    for union in batches:
        for _served in tiers.serve(0, union):
            pass
    counts = tiers.take_counts()
    assert counts["ram"].hits == replay_lru(batches, capacity)
    assert counts["ram"].hits + counts["disk"].hits == sum(map(len, batches))
