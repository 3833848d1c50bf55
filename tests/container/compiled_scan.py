"""What tests of the compiled header scan share: asking it alone, and asking the Python code alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pytest_colibri.container import scan
from pytest_colibri.container.safetensors import ContainerError

NOT_BUILT = "the compiled header scan was not built: that takes a C compiler and the headers of Python"
needs_compiled_scan = pytest.mark.skipif(scan.add_up_compiled is None, reason=NOT_BUILT)


class DoNotKnow(Exception):
    """The compiled code leaves the container to the Python code."""


def compiled_outcome(folder: Path) -> Any:
    """The geometry, or the text of the refusal, without the Python code reading a header."""
    with patch.object(scan, "open_container", side_effect=DoNotKnow):
        return _outcome(folder)


def python_outcome(folder: Path) -> Any:
    """The geometry, or the text of the refusal, without the compiled code."""
    with patch.object(scan, "add_up_compiled", None):
        return _outcome(folder)


def _outcome(folder: Path) -> Any:
    try:
        return scan.read_geometry(folder)
    except ContainerError as error:
        return str(error)
