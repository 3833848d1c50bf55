"""A planner that speaks the planner protocol, with the fault that its argument names."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

GB = 10**9
DENSE, RUNTIME, EXPERTS = 10_700_000_000, 7_500_000_000, 372_848_459_776


def plan(available: int, ram: int, vram: int) -> dict[str, Any]:
    """Return a plan of version 2 with these budgets for one GB10."""
    device = {"index": 0, "name": "NVIDIA GB10", "unified_memory": True, "usable_bytes": vram}
    cache = max(0, ram - DENSE - RUNTIME)
    return {
        "version": 2,
        "tiers": {
            "disk": {"cold_expert_bytes": EXPERTS - vram - cache},
            "ram": {"available_bytes": available, "budget_bytes": ram, "expert_cache_bytes": cache},
            "vram": {"devices": [device], "budget_bytes": vram, "hot_expert_bytes": vram},
        },
    }


def main(fault: str) -> None:
    """Answer the request on standard input."""
    json.load(sys.stdin)
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    match = re.search(r"MemAvailable: +(\d+) kB", text)
    available = int(match[1]) * 1024 if match else 0
    pool = available * 88 // 100
    if fault == "hangs":
        time.sleep(3600)
    elif fault == "prints garbage":
        print("RAM: plenty")
    elif fault == "crashes":
        raise RuntimeError("no plan today")
    elif fault == "refuses":
        print(json.dumps({"refused": "I would rather not"}))
    else:
        budgets = (pool, pool) if fault == "counts the pool twice" else (pool - 60 * GB, 60 * GB)
        print(json.dumps({"plan": plan(available, *budgets), "environment": {}}))


main(" ".join(sys.argv[1:]))
