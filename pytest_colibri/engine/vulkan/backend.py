"""Routed experts that stay on a Vulkan device and are computed there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from pytest_colibri.engine.device import DeviceCounts, ExpertRows, Residency
from pytest_colibri.engine.vulkan.compute import ExpertCompute, Share
from pytest_colibri.engine.vulkan.device import VulkanDevice
from pytest_colibri.engine.vulkan.memory import MAX_ARENA_BYTES, WORD_BYTES, pack_experts
from pytest_colibri.engine.weights import Expert, ExpertKey, ExpertLayout, Floats
from pytest_colibri.host.model import DeviceIdentity


class VulkanExperts:
    """An ExpertDevice; see :func:`pytest_colibri.engine.vulkan.open_vulkan`."""

    def __init__(self, selector: str | None, batch_rows: int, staged: bool) -> None:
        self._device = VulkanDevice(selector)
        self._batch_rows = batch_rows
        self._staged = staged or not self._device.unified
        self._compute: ExpertCompute | None = None
        self._dispatches: Counter[str] = Counter()

    @property
    def identity(self) -> DeviceIdentity:
        """Which device was opened."""
        return self._device.identity

    def fill(
        self,
        ranked: Sequence[tuple[ExpertKey, ExpertLayout]],
        budget_bytes: int,
        read: Callable[[ExpertKey], Expert],
    ) -> Residency:
        """Upload experts in rank order, up to the first that would exceed the budget.

        Raises HostMismatch where the device cannot take a batch as wide as announced, Unavailable where a
        shader is missing.
        """
        arena_bytes = min(MAX_ARENA_BYTES, self._device.limits.maxStorageBufferRange)
        packing = pack_experts(ranked, budget_bytes, arena_bytes)
        if packing.places:
            self._compute = ExpertCompute(self._device, packing, self._batch_rows, self._staged)
            for key in packing.places:
                self._compute.upload(key, read(key))
        return Residency(tuple(packing.places), sum(packing.arena_words) * WORD_BYTES)

    def run_experts(self, batch: Sequence[ExpertRows], rows: Floats) -> list[Floats]:
        """Compute resident experts for their rows of ``rows`` [n, hidden] with one submission.

        Returns [len(share.rows), hidden] for each share of the batch; outputs are not weighted yet.
        """
        assert self._compute is not None
        counts = [len(share.rows) for share in batch]
        starts = [0, *accumulate(counts)]
        shares = [
            Share(expert.key, first_row, count)
            for expert, first_row, count in zip(batch, starts[:-1], counts, strict=True)
        ]
        self._compute.write_inputs(rows[np.concatenate([share.rows for share in batch])])
        self._dispatches += self._compute.run(shares)
        outputs = self._compute.read_outputs(starts[-1], rows.shape[1])
        return np.split(outputs, starts[1:-1])

    def take_counts(self) -> DeviceCounts:
        """Return what was executed since the last call, and start anew."""
        counts = DeviceCounts(dict(self._dispatches), self._device.submits)
        self._dispatches.clear()
        self._device.submits = 0
        return counts

    def close(self) -> None:
        """Give everything back to the driver."""
        self._device.close()
