"""Every check of a model container by itself: what holds, what is broken, and what cannot be told.

A container that is opened is refused at its first fault. Here each check has its own finding. The reader of
shards stays the judge of a shard: where it refuses one, the kind of its fault decides which check fails, and
the checks that it did not come to are unknown for that shard.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from pytest_colibri.container.families import BY_MODEL_TYPE, Family, known_model_types
from pytest_colibri.container.geometry import Geometry
from pytest_colibri.container.model import Model
from pytest_colibri.container.safetensors import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    SHARDS,
    ContainerError,
    Fault,
    list_folder,
    quote,
    read_config,
    read_json_object,
    scan_shard,
)
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.usage import USAGE_FILE, read_usage
from pytest_colibri.errors import UsageError
from pytest_colibri.findings import Finding, few
from pytest_colibri.units import Figure, format_bytes

SCALES = ".qs"
INDEX_FILE = "model.safetensors.index.json"

_OF_TOTAL = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors", re.ASCII)
# Shorter numbers are versions and sizes: glm-5.safetensors is the fifth of nothing.
_COUNTED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,9})\.safetensors", re.ASCII)

_SHARD_CHECKS: Mapping[Fault, tuple[str, str]] = {
    "file": ("container.headers", "every header can be read"),
    "names": ("container.names", "every tensor is named once, within its shard and over all shards"),
    "dtype": ("container.dtypes", "every dtype is one that the format knows"),
    "bounds": ("container.bounds", "every tensor lies within its file"),
    "size": ("container.sizes", "every tensor takes the bytes that its dtype and shape need"),
    "overlap": ("container.overlaps", "no tensor lies over another"),
    "hole": ("container.holes", "no byte of a file belongs to no tensor"),
}
_DOWNLOAD = "convert or download the model again, or only the files that are named"


@dataclass
class _Survey:
    """What the shards of a folder hold: ``home`` maps each tensor to its shard, ``refused`` shards to why.

    ``unlisted`` says why the folder cannot be listed.
    """

    shards: tuple[str, ...] = ()
    has_index: bool = False
    unlisted: ContainerError | None = None
    home: dict[str, str] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    refused: dict[str, ContainerError] = field(default_factory=dict)
    tensor_bytes: int = 0


@dataclass(frozen=True)
class Inspection:
    """What was found of a model folder; ``model`` is None where it is refused."""

    findings: tuple[Finding, ...]
    model: Model | None


def inspect_container(directory: Path) -> Inspection:
    """Check a model folder; payloads are not read, and nothing is written."""
    survey = _survey(directory)
    read = (*_config_findings(directory), *_shard_findings(survey))
    others = (_sequence(survey), _index(directory, survey))
    experts, geometry = _experts(directory, survey, readable=all(found.state == "ok" for found in read))
    history, usage = _usage(directory / USAGE_FILE)
    model = None if geometry is None or usage is None else Model(geometry, usage)
    return Inspection((*read, *others, experts, history), model)


def _survey(directory: Path) -> _Survey:
    try:
        listed = list_folder(directory)
    except ContainerError as error:
        return _Survey(unlisted=error)
    paths = [path for path in listed if path.match(SHARDS)]
    survey = _Survey(tuple(path.name for path in paths), directory / INDEX_FILE in listed)
    for path in paths:
        if len(survey.home) > MAX_TENSORS:
            survey.refused[path.name] = ContainerError(f"{path}: not read, after {MAX_TENSORS} tensors")
            continue
        try:
            tensors = scan_shard(path)
        except ContainerError as error:
            survey.refused[path.name] = error
            continue
        for name, info in tensors.items():
            survey.tensor_bytes += info.nbytes
            if name in survey.home:
                survey.repeated.append(f"{quote(name)} in {survey.home[name]} and {path.name}")
            else:
                survey.home[name] = path.name
    return survey


def _config_findings(directory: Path) -> Iterator[Finding]:
    try:
        model_type = read_config(directory).get("model_type")
    except ContainerError as error:
        yield Finding("container.config", "failed", str(error), remedy=_DOWNLOAD)
        yield Finding("container.family", "unknown", "config.json tells no family")
        return
    yield Finding("container.config", "ok", "config.json is strict JSON")
    if isinstance(model_type, str) and model_type in BY_MODEL_TYPE:
        family = BY_MODEL_TYPE[model_type].name
        yield Finding("container.family", "ok", f"model_type {model_type} is of the family {family}")
    else:
        yield Finding(
            "container.family",
            "failed",
            f"model_type {quote(model_type)} in config.json is of no known family; known: "
            f"{known_model_types()}",
        )


def _sequence(survey: _Survey) -> Finding:
    """Hold the numbers in the names of the shards against each other."""
    check, shards = "container.shards", survey.shards
    if survey.unlisted:
        return Finding(check, "failed", str(survey.unlisted))
    if not shards:
        return Finding(check, "failed", f"there is no {SHARDS} file", remedy=_DOWNLOAD)
    complete = [match for match in map(_OF_TOTAL.fullmatch, shards) if match]
    counted = [match for match in map(_COUNTED.fullmatch, shards) if match]
    if complete:
        faults = list(_faults_of_total(complete))
        totals = {match["stem"]: int(match["total"]) for match in complete}
        numbered = f"{len(complete)} of {sum(totals.values())}"
    elif counted:
        faults = list(_faults_of_count(counted))
        numbered = f"{len(counted)}, whose names do not tell how many there must be"
    elif len(shards) == 1:
        return Finding(check, "ok", f"one shard, {shards[0]}")
    else:
        return Finding(check, "unknown", f"{len(shards)} shards, whose names tell no sequence")
    if faults:
        return Finding(check, "failed", f"shards: {'; '.join(faults)}", remedy=_DOWNLOAD)
    outside = sorted(set(shards) - {match[0] for match in complete or counted})
    if outside:
        sentence = f"shards: {numbered}; outside of the sequence: {few(outside, len(outside))}"
        return Finding(check, "warning", sentence, remedy="see whether they belong to this model")
    return Finding(check, "ok", f"shards: {numbered}")


def _faults_of_total(names: Sequence[re.Match[str]]) -> Iterator[str]:
    """Yield what is wrong with names such as ``model-00001-of-00142.safetensors``."""
    sequences: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for name in names:
        sequences[name["stem"], int(name["total"])].append(int(name["number"]))
    stems = Counter(stem for stem, _ in sequences)
    # Other rows, such as those of multi-token prediction, may come as a sequence of another name.
    said = sorted(f"{stem} of {total}" for stem, total in sequences if stems[stem] > 1)
    if said:
        yield f"their names tell {len(said)} sequences ({few(said, len(said))})"
    for (stem, total), numbers in sequences.items():
        there = set(numbers)
        surplus = sorted(number for number in there if not 1 <= number <= total)
        missing = total - len(there) + len(surplus)
        absent = (f"{number}" for number in range(1, total + 1) if number not in there)
        if missing:
            yield f"{stem}: {missing} of {total} missing: {few(absent, missing)}"
        if surplus:
            yield f"{stem}: {few(map(str, surplus), len(surplus))} beyond the {total} of its name"
        yield from _repeated_numbers(stem, numbers)


def _faults_of_count(names: Sequence[re.Match[str]]) -> Iterator[str]:
    """Yield what is wrong with names such as ``out-00001.safetensors``, which may begin at 0 or 1."""
    sequences: defaultdict[str, list[int]] = defaultdict(list)
    for name in names:
        sequences[name["stem"]].append(int(name["number"]))
    for stem, numbers in sequences.items():
        there = set(numbers)
        first = min(1, min(there))
        missing = max(there) + 1 - first - len(there)
        absent = (f"{number}" for number in range(first, max(there)) if number not in there)
        if missing:
            yield f"{stem}: {missing} missing before {max(there)}: {few(absent, missing)}"
        yield from _repeated_numbers(stem, numbers)


def _repeated_numbers(stem: str, numbers: Sequence[int]) -> Iterator[str]:
    twice = sorted(number for number, times in Counter(numbers).items() if times > 1)
    if twice:
        yield f"{stem}: more than one file is number {few(map(str, twice), len(twice))}"


def _shard_findings(survey: _Survey) -> Iterator[Finding]:
    for fault in get_args(Fault):
        check, holds = _SHARD_CHECKS[fault]
        broken = [str(error) for error in survey.refused.values() if error.fault == fault]
        if fault == "names" and survey.repeated:
            broken.append(f"tensor {few(survey.repeated, len(survey.repeated))}")
        unreached = len(survey.refused) - sum(error.fault == fault for error in survey.refused.values())
        if broken:
            yield Finding(check, "failed", few(broken, len(broken)), remedy=_DOWNLOAD)
        elif not survey.shards:
            yield Finding(check, "unknown", "no shard was found")
        elif unreached and fault != "file":
            refused = [name for name, error in survey.refused.items() if error.fault != fault]
            yield Finding(
                check, "unknown", f"not told of {few(refused, unreached)}, which another check refuses"
            )
        else:
            yield Finding(check, "ok", holds)


def _index(directory: Path, survey: _Survey) -> Finding:
    """Hold the index against the tensors, in both directions."""
    check, path = "container.index", directory / INDEX_FILE
    if not survey.has_index:
        if len(survey.shards) == 1:
            return Finding(check, "ok", "one shard needs no index")
        return Finding(check, "unknown", f"no {INDEX_FILE} was found to hold the shards against")
    try:
        index = read_json_object(path, "index", MAX_HEADER_BYTES)
        weight_map = _weight_map(path, index)
    except ContainerError as error:
        return Finding(check, "failed", str(error), remedy=_DOWNLOAD)
    if faults := list(_index_faults(weight_map, survey)):
        return Finding(check, "failed", f"{INDEX_FILE}: {'; '.join(faults)}", remedy=_DOWNLOAD)
    if survey.refused:
        refused = few(survey.refused, len(survey.refused))
        return Finding(check, "unknown", f"what {INDEX_FILE} says of {refused} cannot be held against them")
    return _index_total(index, len(weight_map), survey.tensor_bytes)


def _weight_map(path: Path, index: Mapping[str, object]) -> Mapping[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ContainerError(f"{path}: weight_map must map names of tensors to names of files")
    return weight_map


def _index_faults(weight_map: Mapping[str, str], survey: _Survey) -> Iterator[str]:
    """Yield how index and shards differ, but for what the shards that cannot be read may hold."""
    absent = sorted(set(weight_map.values()) - set(survey.shards))
    if absent:
        yield f"names {len(absent)} files that are not there: {few(map(quote, absent), len(absent))}"
    told = [name for name, shard in weight_map.items() if shard in survey.shards]
    lost = [n for n in told if n not in survey.home and weight_map[n] not in survey.refused]
    moved = [name for name in told if survey.home.get(name, weight_map[name]) != weight_map[name]]
    untold = [name for name in survey.home if name not in weight_map]
    for names, what in (
        (lost, "are in no shard"),
        (moved, "are in another shard than it says"),
        (untold, "are in a shard and not in it"),
    ):
        if names:
            yield f"{len(names)} tensors {what}: {few(map(quote, names), len(names))}"


def _index_total(index: Mapping[str, object], tensors: int, tensor_bytes: int) -> Finding:
    check, metadata = "container.index", index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = {"tensors": Figure(tensor_bytes, "container headers")}
    if type(stated) is int and stated != tensor_bytes:
        return Finding(
            check,
            "warning",
            f"{INDEX_FILE} places all {tensors} tensors, but gives {quote(stated)} bytes in total, and they "
            f"take {tensor_bytes} ({format_bytes(tensor_bytes)})",
            held,
        )
    return Finding(check, "ok", f"{INDEX_FILE} and the shards agree on {tensors} tensors", held)


def _experts(directory: Path, survey: _Survey, *, readable: bool) -> tuple[Finding, Geometry | None]:
    """Say whether every expert is there, by the reader whose figures plans use, and is whole."""
    check = "container.experts"
    if not readable:
        return Finding(check, "unknown", "the experts of a container that is refused are not counted"), None
    try:
        geometry = read_geometry(directory)
    except ContainerError as error:
        return Finding(check, "failed", str(error), remedy=_DOWNLOAD), None
    if partial := _partial_experts(survey.home, BY_MODEL_TYPE[geometry.family]):
        return Finding(check, "failed", few(partial, len(partial)), remedy=_DOWNLOAD), geometry
    figures = {
        "experts": Figure(geometry.expert_bytes, "container headers"),
        "dense weights": Figure(geometry.dense_bytes, "container headers"),
    }
    found = f"{geometry.expert_count} experts in {len(geometry.layers)} sparse layers, none missing"
    return Finding(check, "ok", found, figures), geometry


def _usage(path: Path) -> tuple[Finding, Mapping[tuple[int, int], int] | None]:
    """Say whether the usage history can be read, which plans rank the experts by; a model needs none."""
    check = "container.usage"
    if not os.path.isfile(path):  # noqa: PTH113 - a folder that cannot be searched is another check's fault
        return Finding(check, "ok", f"there is no {USAGE_FILE}, so no expert is ranked"), {}
    try:
        usage = read_usage(path)
    except UsageError as error:
        return Finding(check, "failed", str(error), remedy="remove it; an engine writes it anew"), None
    return Finding(check, "ok", f"{USAGE_FILE} ranks {len(usage)} experts"), usage


def _partial_experts(names: Iterable[str], family: Family) -> list[str]:
    """Return a sentence for each expert that lacks a tensor which others of its layer have.

    Scales do not count: experts of one layer may be stored in different formats.
    """
    layers: defaultdict[int, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for layer, expert, part in _parts_of_experts(names, family):
        if not part.endswith(SCALES):
            layers[layer][expert].add(part)
    return [
        f"expert {expert} of layer {layer} lacks {quote(min(whole - parts))}"
        for layer, experts in sorted(layers.items())
        for whole in [set().union(*experts.values())]
        for expert, parts in sorted(experts.items())
        if parts != whole
    ]


def _parts_of_experts(names: Iterable[str], family: Family) -> Iterator[tuple[int, int, str]]:
    """Yield layer, expert and the rest of the name of each tensor of a single expert."""
    for name in names if not family.fused else ():
        for pattern in family.expert_names:
            if numbers := pattern.numbers(name):
                layer, expert = numbers
                named = pattern.text.removesuffix("*").format(layer=layer, expert=expert)
                yield layer, expert, name.removeprefix(named)
