"""Puts one request to the planner of a colibri checkout; run as a script: ``checkout_driver.py FOLDER``.

FOLDER holds ``resource_plan.py``. The request and the answer are those of ``docs/planner-protocol.md``. Which
arguments this version takes is read from its signatures. On a stage, ``sys.platform`` and ``os.cpu_count()``
are those of the emulated machine, and without mount namespaces ``open`` is redirected for the files of the
stage. For a Windows machine, the calls by which planners ask Windows are answered, and ``open`` reads text as
Windows does. It loads the standard library only, and what the planner prints goes to standard error.
"""

from __future__ import annotations

import builtins
import ctypes  # some of these are loaded before sys.platform changes, by which they choose their code
import importlib
import inspect
import io
import json
import os
import pathlib
import re
import shutil  # noqa: F401
import struct
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import types
from collections.abc import Callable
from typing import Any

_GB = 1e9
_PLAN_VERSION = 2
_CODE_PAGE = "cp1252"
_PROCESSOR_CORE = 0  # RelationProcessorCore
_CUDA_BACKENDS = ("cuda", "rocm")  # one build and one set of variables serve both
_REFUSAL = re.compile(r"memory|\bfits?\b|unknown|unsupported|not supported", re.IGNORECASE)
_REFUSAL_CLASSES = ("PlannerUnsupportedError", "UnknownFamilyError")


class Unsupported(Exception):
    """This version has no argument for what is asked."""


def answer(planner: Any, request: dict[str, Any]) -> dict[str, object]:
    """Return the answer of the planner; an exception that is no refusal is raised as it is."""
    try:
        plan = planner.build_plan(request["model"], **_plan_arguments(planner.build_plan, request))
    except Unsupported as error:
        return {"unsupported": str(error)}
    except (ValueError, SystemExit) as error:
        if not (_REFUSAL.search(str(error)) or type(error).__name__ in _REFUSAL_CLASSES):
            raise
        return {"refused": str(error)}
    if plan["version"] != _PLAN_VERSION:
        return {"unsupported": f"this version of the planner gives plans of version {plan['version']}"}
    given = {"env": request["environment"], "cuda_enabled": request["backend"] in _CUDA_BACKENDS}
    known = inspect.signature(planner.environment_for_plan).parameters
    arguments = {name: value for name, value in given.items() if name in known}
    return {"plan": plan, "environment": planner.environment_for_plan(plan, **arguments)}


def _plan_arguments(build_plan: Callable[..., object], request: dict[str, Any]) -> dict[str, object]:
    """Return the arguments that say something; memory, devices and cores are for the planner to find."""
    none_wanted: list[int] | None = [] if request["backend"] == "cpu" else None
    indices = request["gpu_indices"]
    arguments = {
        "ram_gb": (request["ram_bytes"] or 0) / _GB,
        "vram_gb": (request["vram_bytes"] or 0) / _GB,
        "context": request["context"],
        "policy": request["policy"],
        "gpu_indices": none_wanted if indices is None else indices,
        "physical_cpus": request["physical_cores"],
        "kv_slots": request["kv_slots"] if request["kv_slots"] != 1 else None,
        "kv_type": request["kv_type"],
        "prompt_width": request["prompt_width"],
    }
    asked = {name: value for name, value in arguments.items() if value is not None}
    for name in asked:
        if name not in inspect.signature(build_plan).parameters:
            raise Unsupported(f"this version of the planner has no argument {name}")
    return asked


def load_planner(folder: str) -> Any:
    """Import the planner of the checkout; its cache of headers goes to the working folder.

    In the model folder, where the planner keeps it, it would be taken for true by another version.
    """
    sys.path.insert(0, folder)
    planner = importlib.import_module("resource_plan")
    if hasattr(planner, "_ANALYSIS_CACHE_NAME"):
        vars(planner)["_ANALYSIS_CACHE_NAME"] = str(pathlib.Path.cwd() / "analysis.json")
    return planner


def follow_stage(description: str) -> None:
    """Behave as on the machine of the stage: see the module."""
    stage = json.loads(pathlib.Path(description).read_text(encoding="utf-8"))
    if stage["files"]:
        builtins.open = io.open = _redirected(open, stage["files"])
        os.open = _redirected(os.open, stage["files"])
    if stage["windows"]:
        builtins.open = io.open = _with_code_page(open)
        vars(ctypes)["windll"] = types.SimpleNamespace(kernel32=_kernel32(**stage["windows"]))
    if stage["system"]:
        sys.platform = stage["system"]
    if stage["processors"]:
        os.cpu_count = lambda: stage["processors"]


def _redirected(function: Callable[..., Any], files: dict[str, str]) -> Callable[..., Any]:
    def opened(file: Any, *arguments: Any, **named: Any) -> Any:
        path = os.fsdecode(file) if isinstance(file, (str, bytes, os.PathLike)) else ""
        for target, source in files.items():
            if path == target or path.startswith(target + "/"):
                file = source + path[len(target) :]
        return function(file, *arguments, **named)

    return opened


def _with_code_page(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``open`` as it is on Windows, where text of no stated encoding is in the code page."""

    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *rest: Any, **named: Any
    ) -> Any:
        if "b" not in mode and encoding in (None, "locale"):
            encoding = _CODE_PAGE
        return function(file, mode, buffering, encoding, *rest, **named)

    return opened


def _kernel32(total_bytes: int | None, available_bytes: int | None, cores: int) -> types.SimpleNamespace:
    """Return the calls that tell memory and cores; the names are those of the Windows API.

    Each returns 0 where it has no answer.
    """
    # The header of a record (relationship, size), then flags, efficiency class, and one group of processors.
    core = struct.pack("<IIBB20xH16x", _PROCESSOR_CORE, 48, 0, 0, 1)

    def global_memory_status(status: Any) -> int:
        if total_bytes is None or available_bytes is None:
            return 0
        status._obj.ullTotalPhys, status._obj.ullAvailPhys = total_bytes, available_bytes
        return 1

    def logical_processor_information(relationship: int, buffer: Any, length: Any) -> int:
        if relationship != _PROCESSOR_CORE:
            return 0
        given, length._obj.value = length._obj.value, len(core) * cores
        if buffer is None or given < len(core) * cores:
            return 0
        ctypes.memmove(buffer, core * cores, len(core) * cores)
        return 1

    return types.SimpleNamespace(
        GlobalMemoryStatusEx=global_memory_status,
        GetLogicalProcessorInformationEx=logical_processor_information,
    )


def main(folder: str) -> None:
    """Answer the request on standard input."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        request = json.load(sys.stdin)
        if "COLIBRI_STAGE" in os.environ:
            follow_stage(os.environ.pop("COLIBRI_STAGE"))
        json.dump(answer(load_planner(folder), request), answers, allow_nan=False)


if __name__ == "__main__":
    main(sys.argv[1])
