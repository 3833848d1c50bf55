"""Expert geometry of a model folder, from headers and ``config.json`` alone.

The sums come from ``safetensors.py``, which makes an object of every tensor and says what is wrong with a bad
one. Where ``_headers.c`` could be compiled, it finds the same sums in plain headers many times faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from pytest_colibri.container.families import BY_MODEL_TYPE, Family, NamePattern, known_model_types
from pytest_colibri.container.geometry import Geometry, SparseLayer
from pytest_colibri.container.safetensors import (
    DTYPE_BITS,
    MAX_TENSORS,
    Container,
    ContainerError,
    TensorInfo,
    find_shards,
    open_container,
    quote,
    read_config,
    read_header,
)

try:
    from pytest_colibri.container._headers import add_up as add_up_compiled
except ImportError:  # built without a compiler
    add_up_compiled = None  # type: ignore[assignment]

INDEXER = NamePattern("model.layers.{layer}.self_attn.indexer.*")
MAX_EXPERTS = 10**6

_DTYPES = tuple((name.encode("ascii"), bits) for name, bits in DTYPE_BITS.items())


@dataclass(frozen=True)
class _Model:
    """What ``config.json`` says: ``config`` is its part for the text model, ``experts`` those of a layer."""

    path: Path
    model_type: str
    family: Family
    config: Mapping[str, object]
    experts: int | None


@dataclass
class _Sums:
    """Bytes of the dense tensors and, by layer and expert, of the experts; layers that have an indexer."""

    dense_bytes: int = 0
    layers: defaultdict[int, defaultdict[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    index_layers: set[int] = field(default_factory=set)


def read_geometry(directory: Path) -> Geometry:
    """Read where the bytes of a model lie; no payload is read.

    Experts are the tensors that the model's family names so, their scales included; the rest is dense.
    Raises ContainerError for an invalid or incomplete container, and for an unknown family.
    """
    model = _read_model(directory, read_config(directory))
    shards = find_shards(directory)
    sums = _add_up_headers(model, shards)
    if sums is None:
        with open_container(directory) as container:
            return geometry_of(container)
    return _geometry(model, sums, len(shards))


def geometry_of(container: Container) -> Geometry:
    """Return the geometry of an opened container; errors as :func:`read_geometry`."""
    model = _read_model(container.path, container.config)
    return _geometry(model, _add_up(model, container.tensors.values()), container.shards)


def _add_up_headers(model: _Model, shards: Sequence[Path]) -> _Sums | None:
    """Add up the tensors of shards by compiled code; None where that is absent, or the headers not plain."""
    # Fused tensors are few, and their experts need the shape, which the compiled code does not give.
    if add_up_compiled is None or model.family.fused:
        return None
    patterns = (*model.family.expert_names, INDEXER)
    found = add_up_compiled(_headers(shards), tuple(name.text.encode("ascii") for name in patterns), _DTYPES)
    if found is None or found[0] > MAX_TENSORS:
        return None
    sums = _Sums()
    for pattern, layer, expert, nbytes in found[1]:
        if 0 <= pattern < len(model.family.expert_names):
            sums.layers[layer][expert] += nbytes
            continue
        sums.dense_bytes += nbytes
        if pattern >= 0:
            sums.index_layers.add(layer)
    return sums


def _headers(shards: Iterable[Path]) -> Iterator[tuple[bytes, int]]:
    for shard in shards:
        header = read_header(shard)
        yield header.text, header.buffer_bytes


def _add_up(model: _Model, tensors: Iterable[TensorInfo]) -> _Sums:
    sums = _Sums()
    for tensor in tensors:
        numbers = _expert_numbers(model.family, tensor.name)
        if numbers is None:
            sums.dense_bytes += tensor.nbytes
            if indexer := INDEXER.numbers(tensor.name):
                sums.index_layers.add(indexer[0])
        elif model.family.fused:
            experts = sums.layers[numbers[0]]
            slice_bytes = _fused_expert_bytes(tensor, model, len(sums.layers))
            for expert in range(model.experts or 0):
                experts[expert] += slice_bytes
        else:
            layer, expert = numbers
            sums.layers[layer][expert] += tensor.nbytes
    return sums


def _expert_numbers(family: Family, name: str) -> tuple[int, ...] | None:
    for pattern in family.expert_names:
        if numbers := pattern.numbers(name):
            return numbers
    return None


def _geometry(model: _Model, sums: _Sums, shards: int) -> Geometry:
    _check_complete(model, sums.layers)
    sparse = (
        SparseLayer(index, MappingProxyType(dict(sorted(experts.items()))))
        for index, experts in sorted(sums.layers.items())
    )
    return Geometry(
        path=model.path,
        family=model.model_type,
        config=model.config,
        shards=shards,
        dense_bytes=sums.dense_bytes,
        layers=tuple(sparse),
        index_layers=len(sums.index_layers),
    )


def _read_model(path: Path, config: Mapping[str, object]) -> _Model:
    where = path / "config.json"
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ContainerError(f"{where}: model_type {quote(model_type)} is no name")
    if model_type not in BY_MODEL_TYPE:
        raise ContainerError(
            f"{where}: the model family {quote(model_type)} is unknown; known: {known_model_types()}"
        )
    family = BY_MODEL_TYPE[model_type]
    text_config = _text_config(where, config, family)
    return _Model(path, model_type, family, text_config, _declared_experts(where, text_config, family))


def _text_config(where: Path, config: Mapping[str, object], family: Family) -> Mapping[str, object]:
    """Return the part of ``config.json`` that describes the text model."""
    section = config.get(family.section) if family.section else None
    if section is None:
        return MappingProxyType(config)
    if not isinstance(section, dict):
        raise ContainerError(f"{where}: {family.section} {quote(section)} is no JSON object")
    return MappingProxyType(section)


def _declared_experts(where: Path, config: Mapping[str, object], family: Family) -> int | None:
    count = config.get(family.count_key)
    if count is not None and (type(count) is not int or not 0 <= count < MAX_EXPERTS):
        raise ContainerError(f"{where}: {family.count_key} {quote(count)} is no count of experts")
    return count


def _fused_expert_bytes(info: TensorInfo, model: _Model, layers: int) -> int:
    """Return the bytes of one expert in a tensor that holds all of a layer along its first dimension.

    ``layers`` counts the sparse layers so far: few tensors must not stand for endless experts.
    """
    count, count_key = model.experts, model.family.count_key
    if not count:
        raise ContainerError(
            f"{info.shard}: tensor {quote(info.name)} holds all experts of a layer, and config.json does not "
            f"say in {count_key} how many"
        )
    if layers * count > MAX_TENSORS:
        raise ContainerError(f"{info.shard}: more than {MAX_TENSORS} experts")
    # A converter may have flattened [experts, rows, columns]; an expert is still a slice of the first one.
    if not info.shape or info.shape[0] % count or info.nbytes % count:
        raise ContainerError(
            f"{info.shard}: tensor {quote(info.name)} of shape {list(info.shape)} cannot be divided among "
            f"{count_key} = {count} experts"
        )
    return info.nbytes // count


def _check_complete(model: _Model, layers: Mapping[int, Mapping[int, int]]) -> None:
    expected, count_key = model.experts, model.family.count_key
    if expected and not layers:
        names = " or ".join(name.text for name in model.family.expert_names)
        raise ContainerError(
            f"{model.path}: config.json says {count_key} = {expected} for the family "
            f"{quote(model.model_type)}, but no tensor is named {names}"
        )
    for layer, experts in layers.items():
        surplus = max(experts)
        if expected is not None and surplus >= expected:
            raise ContainerError(
                f"{model.path}: layer {layer} has expert {surplus}; {count_key} = {expected} in "
                f"config.json allows 0 to {expected - 1}"
            )
        missing = [expert for expert in range(expected or len(experts)) if expert not in experts]
        if missing:
            raise ContainerError(
                f"{model.path}: layer {layer} lacks {len(missing)} experts, the first is {missing[0]}; "
                "is a shard missing?"
            )
