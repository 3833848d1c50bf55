"""Writes checkouts of made-up planners with the signatures that a planner had over time.

Their planner does nothing but look at the machine as real ones do, and puts what it saw into its plan.
"""

from __future__ import annotations

from pathlib import Path

SIGNATURES = {
    "oldest": "model, ram_gb=0, context=4096, gpu_indices=None, vram_gb=0, available_memory=None, gpus=None",
    "middle": "model, ram_gb=0, context=4096, gpu_indices=None, vram_gb=0, available_memory=None,"
    " available_disk=None, gpus=None, policy='quality', physical_cpus=None, cpu_sockets=None",
    "newest": "model, ram_gb=0, context=4096, gpu_indices=None, vram_gb=0, available_memory=None,"
    " available_disk=None, gpus=None, policy='quality', physical_cpus=None, cpu_sockets=None, kv_slots=1",
}
ENVIRONMENT_SIGNATURES = {"oldest": "plan, env=None", "middle": "plan, env=None, cuda_enabled=True"}

LOOK = """
import os
import subprocess
import sys
from pathlib import Path

_ANALYSIS_CACHE_NAME = ".cache.json"
print("noise on standard output")

def tool(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return type(error).__name__

def build_plan({signature}):
    given = {{name: value for name, value in locals().items() if name != "model"}}
    (Path(model) / _ANALYSIS_CACHE_NAME).write_text("{{}}")
    return {{
        "version": 2,
        "given": given,
        "meminfo": Path("/proc/meminfo").read_text(),
        "group": open("/sys/fs/cgroup/memory.max").read(),
        "gpus": tool("nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader,nounits"),
        "amd": tool("rocm-smi", "--showmeminfo", "vram", "--csv"),
        "cores": tool("lscpu", "-p=core,socket"),
        "platform": sys.platform,
        "processors": os.cpu_count(),
        "variables": {{name: value for name, value in os.environ.items() if name.startswith("COLI")}},
    }}

def environment_for_plan({environment_signature}):
    return {{**env, "GIVEN": str(sorted(set(locals()) - {{"plan", "env"}}))}}
"""


def write_checkout(folder: Path, version: str) -> Path:
    """Write the checkout of a planner of this version (a key of SIGNATURES); return its top folder."""
    environment_signature = ENVIRONMENT_SIGNATURES.get(version, ENVIRONMENT_SIGNATURES["middle"])
    return write_planner(
        folder, LOOK.format(signature=SIGNATURES[version], environment_signature=environment_signature)
    )


def write_planner(folder: Path, code: str) -> Path:
    """Write a checkout whose planner is ``code``; return its top folder."""
    (folder / "c").mkdir(parents=True)
    (folder / "c" / "resource_plan.py").write_text(code, encoding="utf-8")
    return folder
