"""Stands for an engine whose driver counts its engine time: it writes entries as in /proc.

Arguments: the folder for them, then for each phase ``NAME:MILLISECONDS`` of work for each device, such as
``fill:0,90``. A phase takes 0.3 s, with a pause after it. With ``child:`` before the name a process of its
own does the phase.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

STEPS = 10


def publish(proc: Path, busy_ns: list[int]) -> None:
    for device, spent in enumerate(busy_ns):
        descriptor = str(10 + device)
        for folder in ("fd", "fdinfo"):
            (proc / str(os.getpid()) / folder).mkdir(parents=True, exist_ok=True)
        link = proc / str(os.getpid()) / "fd" / descriptor
        if not link.is_symlink():
            link.symlink_to(f"/dev/dri/renderD{128 + device}")
        file = proc / str(os.getpid()) / "fdinfo" / descriptor
        new = file.with_name(f"{descriptor}.new")
        new.write_text(
            f"drm-driver:\tamdgpu\ndrm-client-id:\t{100 * os.getpid() + device}\n"
            f"drm-pdev:\t0000:0{3 + device}:00.0\n"
            f"drm-memory-vram:\t14062500 KiB\ndrm-engine-compute:\t{spent} ns\n"
        )
        new.replace(file)


def work(proc: Path, busy_ns: list[int], shares_ms: list[int]) -> None:
    for _ in range(STEPS):
        time.sleep(0.3 / STEPS)
        for device, share in enumerate(shares_ms):
            busy_ns[device] += share * 1_000_000 // STEPS
        publish(proc, busy_ns)


def mark(phase: str, state: str) -> None:
    print(f'{{"event":"phase","phase":"{phase}","state":"{state}"}}', flush=True)


def main(proc: Path, phases: list[str]) -> None:
    busy_ns = [0] * len(phases[0].split(","))
    publish(proc, busy_ns)
    for spec in phases:
        phase, _, shares = spec.removeprefix("child:").partition(":")
        mark(phase, "begin")
        if spec.startswith("child:"):
            subprocess.run([sys.executable, __file__, str(proc), f"quietly:{shares}"], check=True, stdout=-3)
        else:
            work(proc, busy_ns, [int(share) for share in shares.split(",")])
        mark(phase, "end")
        time.sleep(0.15)
    shutil.rmtree(proc / str(os.getpid()))


main(Path(sys.argv[1]), sys.argv[2:])
