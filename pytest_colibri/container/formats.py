"""Weight formats: told apart by byte counts, packed and unpacked with numpy.

A matrix is [outputs, inputs], row-major. Packed weights come with f32 scales: one per row, or one per group
of consecutive inputs of a row. Two 4-bit weights share a byte, the even column in the low nibble, stored as
value + 8. A last group that is cut short by the end of the row is a group like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_colibri.container.safetensors import ContainerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal[
    "f32",
    "int8-row",
    "int4-row",
    "int2-row",
    "int4-grouped",
    "int3-g64",
    "e8-iq3",
    "mxfp4",
    "fp8-e4m3-b128",
]

SUPPORTED_KINDS: tuple[Kind, ...] = ("f32", "int8-row", "int4-row", "int4-grouped")

# Among powers of two, no two sizes give the same count of groups unless both exceed the row.
GROUP_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix is stored. ``group_size`` is inputs per scale, None where no scale stands for a group."""

    kind: Kind
    group_size: int | None = None

    @property
    def supported(self) -> bool:
        """Whether this project packs, unpacks and computes with it; the others are only recognised."""
        return self.kind in SUPPORTED_KINDS

    def __str__(self) -> str:
        return f"{self.kind}-{self.group_size}" if self.kind == "int4-grouped" else self.kind

    def payload_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of the weights of an [outputs, inputs] matrix, scales not counted."""
        match self.kind:
            case "f32":
                return outputs * inputs * 4
            case "int8-row" | "fp8-e4m3-b128":
                return outputs * inputs
            case "int4-row" | "int4-grouped" | "mxfp4":
                return outputs * _ceil(inputs, 2)
            case "int2-row":
                return outputs * _ceil(inputs, 4)
            case "int3-g64":
                return outputs * _ceil(inputs, 64) * 24
            case "e8-iq3":
                return outputs * _ceil(inputs, 256) * 98

    def scales_count(self, outputs: int, inputs: int) -> int | None:
        """Return how many scales lie beside the weights; None where the format has no scales tensor."""
        match self.kind:
            case "f32" | "e8-iq3":
                return None
            case "fp8-e4m3-b128":
                return _ceil(outputs, 128) * _ceil(inputs, 128)
            case _:
                return outputs * _ceil(inputs, self.group_size or inputs)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def infer_format(
    weight_nbytes: int, scales_count: int | None, outputs: int, inputs: int, *, scales_dtype: str = "F32"
) -> WeightFormat:
    """Tell the format of an [outputs, inputs] matrix from its bytes and the count of its scales.

    ``scales_dtype`` tells byte-sized scales (mxfp4) from f32 ones. One group per row is the row format.
    Raises ContainerError where no format, or more than one, has these counts.
    """
    if outputs < 1 or inputs < 1:
        raise ContainerError(f"a matrix of [{outputs}, {inputs}] has no weights")
    candidates = [
        WeightFormat("f32"),
        WeightFormat("e8-iq3"),
        *_scaled_formats(inputs, scales_dtype),
    ]
    fitting = [
        candidate
        for candidate in candidates
        if candidate.payload_bytes(outputs, inputs) == weight_nbytes
        and candidate.scales_count(outputs, inputs) == scales_count
    ]
    if len(fitting) == 1:
        return fitting[0]
    scales = "no scales" if scales_count is None else f"{scales_count} {scales_dtype} scales"
    found = f"{weight_nbytes} bytes with {scales} for [{outputs}, {inputs}]"
    if not fitting:
        raise ContainerError(f"{found} is no known weight format")
    raise ContainerError(f"{found} may be {' or '.join(map(str, fitting))}: the format cannot be told")


def _scaled_formats(inputs: int, scales_dtype: str) -> list[WeightFormat]:
    if scales_dtype in ("U8", "F8_E8M0"):
        return [WeightFormat("mxfp4", 32)]
    if scales_dtype != "F32":
        return []
    grouped = [WeightFormat("int4-grouped", size) for size in GROUP_SIZES if size < inputs]
    return [
        WeightFormat("int8-row"),
        WeightFormat("int4-row"),
        WeightFormat("int2-row"),
        *grouped,
        WeightFormat("int3-g64", 64),
        WeightFormat("fp8-e4m3-b128"),
    ]


def quantise(
    matrix: NDArray[np.float32], weight_format: WeightFormat
) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
    """Pack a finite f32 [outputs, inputs] matrix; return its flat bytes, and its flat scales or None.

    A scale is the largest magnitude of its row or group over the largest code (127, or 7), so that the error
    of a weight is at most half a scale.
    """
    import numpy as np

    if not np.isfinite(matrix).all():
        raise ContainerError("only finite weights can be packed")
    if weight_format.kind == "f32":
        return np.ascontiguousarray(matrix, dtype="<f4").view(np.uint8).reshape(-1), None
    largest = _largest_code(weight_format)
    group_size = weight_format.group_size or matrix.shape[1]
    starts = np.arange(0, matrix.shape[1], group_size)
    scales = (np.maximum.reduceat(np.abs(matrix), starts, axis=1) / np.float32(largest)).astype(np.float32)
    divisors = _per_column(np.where(scales == 0, np.float32(1), scales), group_size, matrix.shape[1])
    codes = np.rint(np.clip(matrix / divisors, -largest, largest)).astype(np.int8)
    payload = codes.view(np.uint8) if weight_format.kind == "int8-row" else _pack_nibbles(codes)
    return payload.reshape(-1), scales.reshape(-1)


def dequantise(
    payload: NDArray[np.uint8],
    scales: NDArray[np.float32] | None,
    outputs: int,
    inputs: int,
    weight_format: WeightFormat,
) -> NDArray[np.float32]:
    """Unpack to f32 [outputs, inputs]; ContainerError where the counts do not belong to the format."""
    import numpy as np

    counts = (payload.size, None if scales is None else scales.size)
    expected = (
        weight_format.payload_bytes(outputs, inputs),
        weight_format.scales_count(outputs, inputs),
    )
    if counts != expected:
        raise ContainerError(
            f"{weight_format} of [{outputs}, {inputs}] has {expected[0]} bytes and {expected[1]} scales, not "
            f"{counts[0]} and {counts[1]}"
        )
    if scales is None and weight_format.kind == "f32":
        return payload.view("<f4").astype(np.float32, copy=False).reshape(outputs, inputs)
    _largest_code(weight_format)
    assert scales is not None
    rows = payload.reshape(outputs, -1)
    codes = rows.view(np.int8) if weight_format.kind == "int8-row" else _unpack_nibbles(rows, inputs)
    return codes * _per_column(scales.reshape(outputs, -1), weight_format.group_size or inputs, inputs)


def _largest_code(weight_format: WeightFormat) -> int:
    match weight_format.kind:
        case "int8-row":
            return 127
        case "int4-row" | "int4-grouped":
            return 7
    raise ContainerError(
        f"the weight format {weight_format} is recognised but not supported; supported are "
        f"{', '.join(SUPPORTED_KINDS)}"
    )


def _per_column(per_group: NDArray[np.float32], group_size: int, inputs: int) -> NDArray[np.float32]:
    """Widen [outputs, groups] to [outputs, inputs]."""
    import numpy as np

    return np.repeat(per_group, group_size, axis=1)[:, :inputs]


def _pack_nibbles(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    import numpy as np

    biased = (codes + np.int8(8)).astype(np.uint8)
    if biased.shape[1] % 2:
        biased = np.pad(biased, ((0, 0), (0, 1)), constant_values=8)
    return biased[:, 0::2] | (biased[:, 1::2] << np.uint8(4))


def _unpack_nibbles(rows: NDArray[np.uint8], inputs: int) -> NDArray[np.int8]:
    import numpy as np

    pairs = np.stack((rows & np.uint8(15), rows >> np.uint8(4)), axis=2)
    return (pairs.reshape(len(rows), -1)[:, :inputs].astype(np.int8)) - np.int8(8)
