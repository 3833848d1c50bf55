"""The free space of a file system."""

from __future__ import annotations

import shutil
from pathlib import Path

from pytest_colibri.units import Figure


def free_disk(path: Path) -> Figure:
    """Return what is free where ``path`` lies; unknown, with the reason, when that cannot be read."""
    try:
        return Figure(shutil.disk_usage(path).free, "file system of the model")
    except OSError as error:
        return Figure(None, f"file system of the model: {error.strerror}")
