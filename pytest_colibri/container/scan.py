"""Expert geometry of a model folder, from headers and ``config.json`` alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pytest_colibri.container.families import BY_MODEL_TYPE, NUMBER, Family, known_model_types
from pytest_colibri.container.geometry import Geometry, SparseLayer
from pytest_colibri.container.safetensors import (
    MAX_TENSORS,
    Container,
    ContainerError,
    TensorInfo,
    open_container,
    quote,
)

INDEXER_NAME = re.compile(rf"model\.layers\.{NUMBER}\.self_attn\.indexer\..+", re.ASCII)
MAX_EXPERTS = 10**6


def read_geometry(directory: Path) -> Geometry:
    """Read where the bytes of a model lie; no payload is read.

    Experts are the tensors that the model's family names so, their scales included; the rest is dense.
    Raises ContainerError for an invalid or incomplete container, and for an unknown family.
    """
    with open_container(directory) as container:
        return geometry_of(container)


def geometry_of(container: Container) -> Geometry:
    """Return the geometry of an opened container; errors as :func:`read_geometry`."""
    model_type = _model_type(container)
    family = BY_MODEL_TYPE[model_type]
    config = _text_config(container, family)
    count = _declared_experts(container, family, config)
    layers: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    index_layers: set[int] = set()
    dense_bytes = 0
    for name, info in container.tensors.items():
        match = family.expert_name.fullmatch(name)
        if match is None:
            dense_bytes += info.nbytes
            if indexer := INDEXER_NAME.fullmatch(name):
                index_layers.add(int(indexer[1]))
        elif family.fused:
            experts = layers[int(match[1])]
            slice_bytes = _fused_expert_bytes(info, family, count, len(layers))
            for expert in range(count or 0):
                experts[expert] += slice_bytes
        else:
            layers[int(match[1])][int(match[2])] += info.nbytes
    _check_complete(container, family, model_type, layers, count)
    sparse = (
        SparseLayer(index, MappingProxyType(dict(sorted(experts.items()))))
        for index, experts in sorted(layers.items())
    )
    return Geometry(
        path=container.path,
        family=model_type,
        config=config,
        shards=container.shards,
        dense_bytes=dense_bytes,
        layers=tuple(sparse),
        index_layers=len(index_layers),
    )


def _model_type(container: Container) -> str:
    model_type = container.config.get("model_type")
    where = container.path / "config.json"
    if not isinstance(model_type, str) or not model_type:
        raise ContainerError(f"{where}: model_type {quote(model_type)} is no name")
    if model_type not in BY_MODEL_TYPE:
        raise ContainerError(
            f"{where}: the model family {quote(model_type)} is unknown; known: {known_model_types()}"
        )
    return model_type


def _text_config(container: Container, family: Family) -> Mapping[str, object]:
    """Return the part of ``config.json`` that describes the text model."""
    section = container.config.get(family.section) if family.section else None
    if section is None:
        return container.config
    if not isinstance(section, dict):
        raise ContainerError(
            f"{container.path / 'config.json'}: {family.section} {quote(section)} is no JSON object"
        )
    return MappingProxyType(section)


def _declared_experts(container: Container, family: Family, config: Mapping[str, object]) -> int | None:
    count = config.get(family.count_key)
    if count is not None and (type(count) is not int or not 0 <= count < MAX_EXPERTS):
        raise ContainerError(
            f"{container.path / 'config.json'}: {family.count_key} {quote(count)} is no count of experts"
        )
    return count


def _fused_expert_bytes(info: TensorInfo, family: Family, count: int | None, layers: int) -> int:
    """Return the bytes of one expert in a tensor that holds all of a layer along its first dimension.

    ``layers`` counts the sparse layers so far: few tensors must not stand for endless experts.
    """
    if not count:
        raise ContainerError(
            f"{info.shard}: tensor {quote(info.name)} holds all experts of a layer, and config.json does not "
            f"say in {family.count_key} how many"
        )
    if layers * count > MAX_TENSORS:
        raise ContainerError(f"{info.shard}: more than {MAX_TENSORS} experts")
    # A converter may have flattened [experts, rows, columns]; an expert is still a slice of the first one.
    if not info.shape or info.shape[0] % count or info.nbytes % count:
        raise ContainerError(
            f"{info.shard}: tensor {quote(info.name)} of shape {list(info.shape)} cannot be divided among "
            f"{family.count_key} = {count} experts"
        )
    return info.nbytes // count


def _check_complete(
    container: Container,
    family: Family,
    model_type: str,
    layers: Mapping[int, Mapping[int, int]],
    expected: int | None,
) -> None:
    if expected and not layers:
        raise ContainerError(
            f"{container.path}: config.json says {family.count_key} = {expected} for the family "
            f"{quote(model_type)}, but no tensor is named {family.expert_tensors}"
        )
    for layer, experts in layers.items():
        surplus = max(experts)
        if expected is not None and surplus >= expected:
            raise ContainerError(
                f"{container.path}: layer {layer} has expert {surplus}; {family.count_key} = {expected} in "
                f"config.json allows 0 to {expected - 1}"
            )
        missing = [expert for expert in range(expected or len(experts)) if expert not in experts]
        if missing:
            raise ContainerError(
                f"{container.path}: layer {layer} lacks {len(missing)} experts, the first is {missing[0]}; "
                "is a shard missing?"
            )
