"""Compiles the header scan when a wheel is built; where that fails, the wheel is the one in pure Python."""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

MODULE = "pytest_colibri.container._headers"
SOURCE = "pytest_colibri/container/_headers.c"


class CompiledHeaderScan(BuildHookInterface[Any]):
    """Adds the module to a wheel; for an editable installation it lies beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, before hatchling collects the files of the wheel."""
        if (
            sys.implementation.name != "cpython"
        ):  # no other has the stable interface that the wheel is tagged with
            return
        if version == "editable":
            compile_module(Path(self.root), Path(self.root))
            return
        self._folder = tempfile.TemporaryDirectory()
        compiled = compile_module(Path(self.root), Path(self._folder.name))
        if compiled is None:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["force_include"][str(compiled)] = f"{Path(SOURCE).parent.as_posix()}/{compiled.name}"


def compile_module(root: Path, into: Path) -> Path | None:
    """Compile for every CPython from 3.11 on; None where that fails, and setuptools prints why."""
    extension = Extension(MODULE, [str(root / SOURCE)], py_limited_api=True, optional=True)
    command = build_ext(Distribution({"ext_modules": [extension]}))
    command.build_lib = str(into)
    with tempfile.TemporaryDirectory() as command.build_temp:
        command.ensure_finalized()
        compiled = Path(command.get_outputs()[0])
        compiled.unlink(missing_ok=True)  # one of an older source must not stand in for one that fails
        command.run()
    return compiled if compiled.is_file() else None
