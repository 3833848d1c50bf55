"""How long the header scan of a large container takes, and how much memory.

Writes a container of a real one's shape, 142 shards with about 116,000 tensors: 75 sparse layers of 256
experts in int4, whose payloads are holes in sparse files. Scans it in processes of their own, beside

- ``analyze_model`` of the planner in a colibri checkout, without its cache: its figures must be the same;
- the package ``safetensors``, where it can be imported: it lists names, shapes and types of the same headers.

The scan also refuses duplicate names, overlaps, holes, and shapes that do not take the bytes given.

    python benchmarks/container_scan.py --runs 11 --peer-planner CHECKOUT
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from paired import (
    Pairs,
    interleave,
    print_figures,
    print_heading,
    print_machine,
    print_pairs,
    print_target,
    run_program,
)

MOST_TIME_OF_PLANNER = 1 / 5

HIDDEN, MOE_INTERMEDIATE, DENSE_LAYERS, DENSE_TENSORS_PER_LAYER = 6144, 2048, 3, 12

PREPARE = """
import json, resource, sys, time
from pathlib import Path

def peak_mb():
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return kib * 1024 / 1e6
"""
SCAN = """
from pytest_colibri.container.scan import read_geometry
peak_before, began = peak_mb(), time.perf_counter()
geometry = read_geometry(Path(sys.argv[1]))
took_s = time.perf_counter() - began
assert geometry.expert_count == int(sys.argv[2])
figures = {
    "dense bytes": geometry.dense_bytes,
    "expert bytes": geometry.expert_bytes,
    "experts": geometry.expert_count,
    "width by layer": {layer.index: layer.width for layer in geometry.layers},
}
"""
# The cache would lie in a folder that is not there: it is neither read nor written.
PLANNER = """
sys.path.insert(0, sys.argv[3])
import resource_plan
resource_plan._ANALYSIS_CACHE_NAME = "no-such-folder/analysis.json"
peak_before, began = peak_mb(), time.perf_counter()
analysis = resource_plan.analyze_model(sys.argv[1])
took_s = time.perf_counter() - began
figures = {
    "dense bytes": analysis["dense_bytes"],
    "expert bytes": analysis["expert_bytes"],
    "experts": analysis["expert_count"],
    "width by layer": analysis["expert_bytes_by_layer"],
}
"""
PEER = """
from safetensors import safe_open
peak_before, began = peak_mb(), time.perf_counter()
tensors = {}
for shard in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(shard, framework="numpy") as file:
        for name in file.keys():
            entry = file.get_slice(name)
            tensors[name] = entry.get_dtype(), entry.get_shape()
took_s = time.perf_counter() - began
assert len(tensors) > int(sys.argv[2])
figures = None
"""
ANSWER = """
print(json.dumps({"took_s": took_s, "peak_mb": peak_mb(), "peak_before_mb": peak_before, "figures": figures}))
"""


@dataclass(frozen=True)
class Scan:
    """One scan; ``peak_before_mb`` is the peak of the process when its imports were done.

    ``figures`` is what it found, None where it does not add up.
    """

    took_s: float
    peak_mb: float
    peak_before_mb: float
    figures: dict[str, object] | None


@dataclass(frozen=True)
class Shape:
    """How large the container is."""

    shards: int
    sparse_layers: int
    experts: int

    @property
    def tensors(self) -> int:
        """Tensors in all shards: an expert has three matrices, each with its scales."""
        dense = (DENSE_LAYERS + self.sparse_layers) * DENSE_TENSORS_PER_LAYER
        return dense + self.sparse_layers * self.experts * 6


def main() -> None:
    """Write the container, scan it, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--shards", type=int, default=142)
    parser.add_argument("--sparse-layers", type=int, default=75)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--peer-planner", type=Path, metavar="CHECKOUT", help="folder of a colibri checkout")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has safetensors and numpy")
    options = parser.parse_args()
    shape = Shape(options.shards, options.sparse_layers, options.experts)
    with tempfile.TemporaryDirectory() as folder:
        headers_bytes, container_bytes = write_container(Path(folder), shape)
        print_machine(
            shards=shape.shards,
            tensors=shape.tensors,
            headers=f"{headers_bytes / 1e6:.1f} MB",
            container=f"{container_bytes / 1e9:.1f} GB",
            compiled="yes" if _has(sys.executable, "pytest_colibri.container._headers") else "no",
        )
        arguments = (folder, str(shape.sparse_layers * shape.experts))
        if options.peer_planner:
            _report_planner(arguments, options.runs, options.peer_planner)
        _report(arguments, options.runs, options.peer_python)


def _report_planner(arguments: Sequence[str], runs: int, checkout: Path) -> None:
    planners, scans = interleave(
        lambda: _scan(sys.executable, PLANNER, (*arguments, str(checkout / "c"))),
        lambda: _scan(sys.executable, SCAN, arguments),
        runs,
    )
    pairs = Pairs(tuple(scan.took_s for scan in planners), tuple(scan.took_s for scan in scans), "s")
    print_pairs("time of the header analysis", pairs, "the planner's analyze_model", "our scan")
    ratio = median(pairs.ratios)
    print_target("median ratio", ratio, MOST_TIME_OF_PLANNER)
    print(f"  our scan is {1 / ratio:.1f} times as fast")
    _compare_figures(planners[0].figures, scans[0].figures)


def _compare_figures(planner: dict[str, object] | None, ours: dict[str, object] | None) -> None:
    assert planner
    assert ours
    for name, figure in planner.items():
        if figure != ours[name]:
            raise SystemExit(f"{name} differ: the planner's {figure}, ours {ours[name]}")
    print(f"  equal figures: {', '.join(planner)}")


def _report(arguments: Sequence[str], runs: int, peer_python: str) -> None:
    def ours() -> Scan:
        return _scan(sys.executable, SCAN, arguments)

    if not _has(peer_python, "safetensors", "numpy"):
        print(f"no comparison: {peer_python} cannot import safetensors (see --peer-python)")
        scans = [ours() for _ in range(runs)]
        print_heading(f"header scan ({runs} runs)")
        print_figures("time", [scan.took_s for scan in scans], "s")
    else:
        peers, scans = interleave(lambda: _scan(peer_python, PEER, arguments), ours, runs)
        for title, unit, figures in (
            ("time of the header scan", "s", lambda scan: scan.took_s),
            ("peak memory of the process", "MB", lambda scan: scan.peak_mb),
        ):
            pairs = Pairs(tuple(map(figures, peers)), tuple(map(figures, scans)), unit)
            print_pairs(title, pairs, "safetensors", "our scan")
    print_heading("memory of our scan")
    print_figures("peak of the process", [scan.peak_mb for scan in scans], "MB")
    print_figures("its peak before the scan", [scan.peak_before_mb for scan in scans], "MB")


def _has(python: str, *modules: str) -> bool:
    test = f"import importlib.util as u; print(all(map(u.find_spec, {modules})))"
    return run_program((python, "-c", test)).strip() == "True"


def _scan(python: str, program: str, arguments: Sequence[str]) -> Scan:
    # On Linux a new process inherits the peak of the one that started it, so this one must stay small.
    output = run_program((python, "-B", "-c", PREPARE + program + ANSWER, *arguments))
    return Scan(**json.loads(output))


def write_container(folder: Path, shape: Shape) -> tuple[int, int]:
    """Write the headers of a container with ``shape``; return their bytes, and those of all its files."""
    config = {"model_type": "glm_moe_dsa", "n_routed_experts": shape.experts}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _tensors(shape)
    headers_bytes = container_bytes = 0
    for shard in range(shape.shards):
        begin, end = (shape.tensors * place // shape.shards for place in (shard, shard + 1))
        path = folder / f"model-{shard + 1:05}-of-{shape.shards:05}.safetensors"
        header, payload_bytes = _header(islice(tensors, end - begin))
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + payload_bytes)
        headers_bytes += len(header)
        container_bytes += 8 + len(header) + payload_bytes
    return headers_bytes, container_bytes


def _tensors(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Give name, type, shape and bytes of every tensor."""
    for layer in range(DENSE_LAYERS + shape.sparse_layers):
        for index in range(DENSE_TENSORS_PER_LAYER):
            yield f"model.layers.{layer}.self_attn.{index}.weight", "F32", (HIDDEN, 512), 4 * HIDDEN * 512
    for layer in range(DENSE_LAYERS, DENSE_LAYERS + shape.sparse_layers):
        for expert in range(shape.experts):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                outputs, inputs = (HIDDEN, MOE_INTERMEDIATE)[:: 1 if matrix == "down_proj" else -1]
                name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
                yield name, "U8", (outputs, inputs // 2), outputs * inputs // 2
                yield f"{name}.qs", "F32", (outputs,), 4 * outputs


def _header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[bytes, int]:
    """Return the header of a shard with ``tensors``, and the bytes of its payload."""
    entries, position = {}, 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (position, position + size)}
        position += size
    return json.dumps(entries, separators=(",", ":")).encode(), position


if __name__ == "__main__":
    main()
