"""Where the conformance suite and the registry of reports lie."""

from __future__ import annotations

from pathlib import Path


def suite_directory() -> Path:
    """Return the folder of the suite: inside an installed package, else beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "_suite"
    return installed if installed.is_dir() else package.parent / "conformance"


def registry_file() -> Path:
    """Return the registry of public reports, which lies beside the tests that decide them."""
    return suite_directory() / "issues.yaml"
