"""Expert geometry of a model folder, from headers and ``config.json`` alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pytest_colibri.container.geometry import Geometry, SparseLayer
from pytest_colibri.container.safetensors import Container, ContainerError, open_container, quote

EXPERT_NAME = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.mlp\.experts\.(0|[1-9]\d{0,5})\..+", re.ASCII)
_EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "n_experts")


def read_geometry(directory: Path) -> Geometry:
    """Read where the bytes of a model lie; no payload is read.

    Experts are the tensors ``model.layers.L.mlp.experts.E.*``, their scales included; the rest is dense.
    Raises ContainerError for an invalid or incomplete container, and for a family that names its experts
    otherwise.
    """
    with open_container(directory) as container:
        return geometry_of(container)


def geometry_of(container: Container) -> Geometry:
    """Return the geometry of an opened container; errors as :func:`read_geometry`."""
    layers: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    dense_bytes = 0
    for name, info in container.tensors.items():
        match = EXPERT_NAME.fullmatch(name)
        if match:
            layers[int(match[1])][int(match[2])] += info.nbytes
        else:
            dense_bytes += info.nbytes
    family = _family(container)
    _check_complete(container, family, layers)
    sparse = (
        SparseLayer(index, MappingProxyType(dict(sorted(experts.items()))))
        for index, experts in sorted(layers.items())
    )
    return Geometry(container.path, family, container.config, container.shards, dense_bytes, tuple(sparse))


def _family(container: Container) -> str:
    family = container.config.get("model_type")
    if not isinstance(family, str) or not family:
        raise ContainerError(f"{container.path / 'config.json'}: model_type {quote(family)} is no name")
    return family


def _check_complete(container: Container, family: str, layers: Mapping[int, Mapping[int, int]]) -> None:
    key, expected = _declared_experts(container)
    if expected and not layers:
        raise ContainerError(
            f"{container.path}: config.json says {key} = {expected} for the family {quote(family)}, but no "
            "tensor is named model.layers.L.mlp.experts.E.*; other names of experts are not supported"
        )
    for layer, experts in layers.items():
        surplus = max(experts)
        if expected is not None and surplus >= expected:
            raise ContainerError(
                f"{container.path}: layer {layer} has expert {surplus}; {key} = {expected} in config.json "
                f"allows 0 to {expected - 1}"
            )
        missing = [expert for expert in range(expected or len(experts)) if expert not in experts]
        if missing:
            raise ContainerError(
                f"{container.path}: layer {layer} lacks {len(missing)} experts, the first is {missing[0]}; "
                "is a shard missing?"
            )


def _declared_experts(container: Container) -> tuple[str, int | None]:
    for key in _EXPERT_COUNT_KEYS:
        count = container.config.get(key)
        if count is None:
            continue
        if type(count) is not int or not 0 <= count < 10**6:
            raise ContainerError(
                f"{container.path / 'config.json'}: {key} {quote(count)} is no count of experts"
            )
        return key, count
    return "", None
