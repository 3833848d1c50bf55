"""What is read of a model folder before anything is planned: where its bytes lie, and its usage history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_colibri.container.geometry import Geometry
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.usage import USAGE_FILE, read_usage


@dataclass(frozen=True)
class Model:
    """The geometry of a model, and how often each (layer, expert) was used; empty without a history."""

    geometry: Geometry
    usage: Mapping[tuple[int, int], int]


def read_model(folder: Path) -> Model:
    """Read headers, ``config.json`` and the usage history of a model folder.

    Raises ContainerError as :func:`read_geometry` does, UsageError for a history that cannot be read.
    """
    return with_history(read_geometry(folder))


def with_history(geometry: Geometry) -> Model:
    """Return the model of a geometry with its usage history; UsageError where that cannot be read."""
    history = geometry.path / USAGE_FILE
    return Model(geometry, read_usage(history) if history.is_file() else {})
