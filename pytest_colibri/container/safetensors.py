"""Read safetensors containers: headers first, every figure checked before it is used, then positioned reads.

Format: https://github.com/huggingface/safetensors (README, "Format"). A shard is 8 bytes of header length
(little-endian), a JSON header, and a byte buffer that the tensors fill without overlap and without holes.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_colibri.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_HEADER_BYTES = 100_000_000
MAX_CONFIG_BYTES = 16 * 2**20
MAX_JSON_VALUES = 4_000_000
MAX_TENSORS = 1_000_000
MAX_RANK = 16

SHARDS = "*.safetensors"

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "F4": 4,
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
        **dict.fromkeys(("U32", "I32", "F32"), 32),
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    }
)

_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


Fault = Literal["file", "names", "dtype", "size", "bounds", "overlap", "hole"]


class ContainerError(UsageError):
    """A model container that cannot be used: names the file, the tensor, the fault and what is allowed.

    ``fault`` is its kind; ``file`` is any that leaves nothing to check further.
    """

    def __init__(self, message: str, fault: Fault = "file") -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a shard. ``offset`` counts bytes from the start of the file ``shard``."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class RawHeader(NamedTuple):
    """The header of a shard as it is stored, and where the byte buffer behind it lies."""

    text: bytes
    data_start: int
    buffer_bytes: int


def quote(value: object) -> str:
    """Write a value out of a hostile file for people: escaped, and cut to a line."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def scan_shard(path: Path) -> dict[str, TensorInfo]:
    """Read the header of one safetensors file and check it against the file; no payload is read.

    Raises ContainerError where the file is no regular file, or the header is not what the format allows.
    Holes between tensors, and bytes after the last one, are refused, as the format demands.
    """
    raw = read_header(path)
    header = parse_json_object(raw.text, path, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ContainerError(f"{path}: __metadata__ must map strings to strings")
    tensors = {
        name: _tensor(path, name, entry, raw.data_start, raw.buffer_bytes) for name, entry in header.items()
    }
    _check_layout(path, tensors, raw.data_start, raw.data_start + raw.buffer_bytes)
    return tensors


def read_header(path: Path) -> RawHeader:
    """Read the header of one safetensors file; what it says is not looked at.

    Raises ContainerError where the file is no regular file or too short for the header, and where the
    header's size or the number of its values is beyond the limits.
    """
    with _open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ContainerError(f"{path}: {len(prefix)} bytes are too short for a safetensors file")
        header_bytes = int.from_bytes(prefix, "little")
        allowed = min(MAX_HEADER_BYTES, file_bytes - 8)
        if header_bytes > allowed:
            raise ContainerError(
                f"{path}: the header claims {header_bytes} bytes; at most {allowed} are allowed"
            )
        text = file.read(header_bytes)
    if len(text) < header_bytes:
        raise ContainerError(f"{path}: the header ends after {len(text)} of {header_bytes} bytes")
    _bound_values(text, path, "header")
    return RawHeader(text, 8 + header_bytes, file_bytes - 8 - header_bytes)


def _open_regular(path: Path) -> BufferedReader:
    try:
        # A FIFO or a device would block or never end; links are followed, model caches are made of them.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ContainerError(f"{path}: not a regular file")
        return path.open("rb")
    except OSError as error:
        raise ContainerError(f"{path}: cannot be read: {error.strerror}") from None


def parse_json_object(raw: bytes, path: Path, what: str) -> dict[str, object]:
    """Parse strict JSON: UTF-8, one object, no duplicate keys, no NaN, a bounded number of values."""
    _bound_values(raw, path, what)
    try:
        parsed = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ContainerError(f"{path}: the {what} is nested too deeply") from None
    except _RepeatedKey as error:
        raise ContainerError(f"{path}: the {what} is not valid JSON: {error}", "names") from None
    except ValueError as error:
        raise ContainerError(f"{path}: the {what} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ContainerError(f"{path}: the {what} must be a JSON object, not {type(parsed).__name__}")
    return parsed


class _RepeatedKey(ValueError):
    """One object has a key twice."""


def _bound_values(raw: bytes, path: Path, what: str) -> None:
    # Every JSON value follows a comma or an opening bracket, so this bounds memory before it is allocated.
    if len(raw) > MAX_JSON_VALUES and sum(map(raw.count, (b",", b"{", b"["))) > MAX_JSON_VALUES:
        raise ContainerError(f"{path}: the {what} holds more than {MAX_JSON_VALUES} values")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise _RepeatedKey(f"the key {quote(twice)} appears twice")
    return unique


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _tensor(path: Path, name: str, entry: object, data_start: int, buffer_bytes: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise _refused(path, name, f"must have exactly the keys {', '.join(sorted(_ENTRY_KEYS))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _refused(path, name, f"dtype {quote(dtype)} is not one of {', '.join(DTYPE_BITS)}", "dtype")
    if not _is_counts(shape) or len(shape) > MAX_RANK:
        raise _refused(path, name, f"shape {quote(shape)} is not a list of at most {MAX_RANK} counts", "size")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise _refused(path, name, f"data_offsets {quote(offsets)} are not two counts", "bounds")
    begin, end = offsets
    if not begin <= end <= buffer_bytes:
        raise _refused(
            path, name, f"data_offsets {quote(offsets)} do not lie within 0 and {buffer_bytes}", "bounds"
        )
    if math.prod(shape) * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise _refused(
            path, name, f"{dtype} {quote(shape)} does not take the {end - begin} bytes given", "size"
        )
    return TensorInfo(name, path, dtype, tuple(shape), data_start + begin, end - begin)


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _refused(path: Path, name: str, why: str, fault: Fault = "file") -> ContainerError:
    return ContainerError(f"{path}: tensor {quote(name)}: {why}", fault)


def _check_layout(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int) -> None:
    position, before = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset < position:
            raise _refused(path, tensor.name, f"overlaps {before}", "overlap")
        if tensor.offset > position:
            raise _refused(
                path, tensor.name, f"leaves {tensor.offset - position} unused bytes after {before}", "hole"
            )
        position, before = tensor.offset + tensor.nbytes, f"tensor {quote(tensor.name)}"
    if position < file_bytes:
        raise ContainerError(
            f"{path}: {file_bytes - position} bytes after {before} belong to no tensor", "hole"
        )


class Container:
    """An opened model folder: its configuration, its tensors, and reads at exact positions.

    Shards are opened when they are first read and stay open until ``close``. Reads are thread-safe.
    """

    def __init__(
        self, path: Path, config: Mapping[str, object], tensors: Mapping[str, TensorInfo], shards: int
    ) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors
        self.shards = shards
        self._files: dict[Path, BufferedReader] = {}
        self._lock = threading.Lock()

    def info(self, name: str) -> TensorInfo:
        """Return the tensor called ``name``; ContainerError where the container has none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ContainerError(f"{self.path}: there is no tensor {quote(name)}") from None

    def read(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes of a tensor, flat."""
        import numpy as np

        info = self.info(name)
        payload = np.empty(info.nbytes, dtype=np.uint8)
        self.read_into(info, 0, payload.data)
        return payload

    def read_f32(self, name: str) -> NDArray[np.float32]:
        """Return an F32 tensor in its shape; ContainerError for another dtype."""
        import numpy as np

        info = self.info(name)
        if info.dtype != "F32":
            raise _refused(info.shard, name, f"is {info.dtype}; only F32 can be read as numbers")
        return self.read(name).view(np.dtype("<f4")).astype(np.float32, copy=False).reshape(info.shape)

    def read_at(self, info: TensorInfo, start: int, length: int) -> bytearray:
        """Return ``length`` bytes of a tensor from its byte ``start``."""
        self._check_range(info, start, length)
        piece = bytearray(length)
        self.read_into(info, start, memoryview(piece))
        return piece

    def read_into(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a tensor from its byte ``start``; a short file is an error."""
        target = buffer.cast("B")
        self._check_range(info, start, len(target))
        file = self._file(info.shard)
        position = info.offset + start
        while len(target):
            count = self._read_some(file, position, target)
            if count == 0:
                raise _refused(
                    info.shard, info.name, f"the file ends at byte {position}; it was cut meanwhile"
                )
            position += count
            target = target[count:]

    def _check_range(self, info: TensorInfo, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > info.nbytes:
            raise _refused(
                info.shard, info.name, f"bytes {start} to {start + length} do not lie within {info.nbytes}"
            )

    def _file(self, shard: Path) -> BufferedReader:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = _open_regular(shard)
            return self._files[shard]

    def _read_some(self, file: BufferedReader, position: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [target], position)
        with self._lock:
            file.seek(position)
            return file.readinto(target)

    def close(self) -> None:
        """Close the shards; a later read opens them again."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_container(directory: Path) -> Container:
    """Scan every ``*.safetensors`` of a model folder and its ``config.json``.

    Raises ContainerError for a folder without them, for a bad header, and for a tensor that two shards hold.
    """
    config = read_config(directory)
    shards = find_shards(directory)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in scan_shard(shard).items():
            if name in tensors:
                raise _refused(shard, name, f"lies in {tensors[name].shard.name} too", "names")
            tensors[name] = info
        if len(tensors) > MAX_TENSORS:
            raise ContainerError(f"{directory}: more than {MAX_TENSORS} tensors")
    return Container(directory, MappingProxyType(config), MappingProxyType(tensors), len(shards))


def find_shards(directory: Path) -> list[Path]:
    """List the ``*.safetensors`` files of a model folder by name; ContainerError where there is none."""
    shards = [path for path in list_folder(directory) if path.match(SHARDS)]
    if not shards:
        raise ContainerError(f"{directory}: there is no {SHARDS} file")
    return shards


def list_folder(directory: Path) -> list[Path]:
    """List what is in a model folder by name; ContainerError where it cannot be listed."""
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise ContainerError(f"{directory}: cannot be listed: {error.strerror}") from None


def read_config(directory: Path) -> dict[str, object]:
    """Parse the ``config.json`` of a model folder, at most 16 MiB of strict JSON."""
    return read_json_object(directory / "config.json", "configuration", MAX_CONFIG_BYTES)


def read_json_object(path: Path, what: str, most_bytes: int) -> dict[str, object]:
    """Parse a file of strict JSON; ContainerError where it is no regular file, or too large."""
    with _open_regular(path) as file:
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise ContainerError(f"{path}: more than {most_bytes} bytes")
    return parse_json_object(raw, path, what)
