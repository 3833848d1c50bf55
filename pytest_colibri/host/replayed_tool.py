"""Prints what a recorded tool would answer to its command line; run as a script in place of the tool.

``replayed_tool.py TOOL RECORDING [ARGUMENT ...]``. Columns, keys and sections that the command line asks for
are taken from the recording. What the recording does not hold is refused with a sentence and a status other
than 0, never made up. It loads the standard library only, since it runs isolated and often.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_REFUSED_STATUS = 2

_NVIDIA_UNITS = {"memory.total": "MiB", "memory.free": "MiB"}
_NVIDIA_UUID = re.compile(r"(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NVIDIA_BUS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_ROCM_MEMORY = re.compile(r"(\w+) Total (?:Used )?Memory \(B\)")


class NotRecorded(Exception):
    """The recording has no answer to what is asked."""


def nvidia_smi(recording: str, arguments: Sequence[str]) -> str:
    """Answer ``--query-gpu=COLUMNS --format=csv[,noheader][,nounits]`` from the six recorded columns."""
    options = _options(arguments, {"--query-gpu", "--format"})
    asked = [column.strip() for column in options.get("--query-gpu", "").split(",")]
    form = [word.strip() for word in options.get("--format", "").split(",")]
    if form[0] != "csv" or not set(form) <= {"csv", "noheader", "nounits"}:
        raise NotRecorded("only --query-gpu=... with --format=csv[,noheader][,nounits] is recorded")
    devices = [_nvidia_columns(line) for line in recording.splitlines() if line.strip()]
    for column in asked:
        if any(column not in device for device in devices):
            raise NotRecorded(f"the column {column!r} is not recorded")
    units = {} if "nounits" in form else _NVIDIA_UNITS
    rows = [[_with_unit(device[column], units.get(column)) for column in asked] for device in devices]
    if "noheader" not in form:
        rows.insert(0, [f"{column} [{units[column]}]" if column in units else column for column in asked])
    return "".join(", ".join(row) + "\n" for row in rows)


def _nvidia_columns(line: str) -> dict[str, str]:
    """Name the columns of a recorded line; UUID and bus may be missing, and a name may hold commas."""
    index, *middle, total, free = (column.strip() for column in line.split(","))
    columns = {"index": index, "memory.total": total, "memory.free": free}
    if len(middle) > 1 and _NVIDIA_BUS.fullmatch(middle[-1]):
        columns["pci.bus_id"] = columns["gpu_bus_id"] = middle.pop()
    if len(middle) > 1 and _NVIDIA_UUID.fullmatch(middle[-1]):
        columns["uuid"] = columns["gpu_uuid"] = middle.pop()
    columns["name"] = columns["gpu_name"] = ", ".join(middle)
    return columns


def _with_unit(value: str, unit: str | None) -> str:
    return f"{value} {unit}" if unit and value.isdigit() else value


def rocm_smi(recording: str, arguments: Sequence[str]) -> str:
    """Answer ``--showmeminfo KIND... --showproductname --showbus --csv``; text around the table stays."""
    kinds, asked = [], set()
    words = list(arguments)
    while words:
        word = words.pop(0)
        asked.add(word)
        while word == "--showmeminfo" and words and not words[0].startswith("-"):
            kinds.append(words.pop(0).upper())
    unknown = asked - {"--showmeminfo", "--showproductname", "--showbus", "--csv"}
    if unknown or "--csv" not in asked:
        raise NotRecorded(f"{' '.join(sorted(unknown)) or 'output without --csv'} is not recorded")
    header = next((line for line in recording.splitlines() if line.startswith("device,")), "device")
    columns = [_rocm_option(column) for column in _cells(header)]
    wanted = {"device", *kinds, *(asked - {"--showmeminfo", "--csv"})}
    missing = wanted - set(columns)
    if missing:
        raise NotRecorded(f"nothing is recorded for {', '.join(sorted(missing))}")
    kept = [place for place, option in enumerate(columns) if option in wanted]
    return "".join(_rocm_line(line, kept, len(columns)) + "\n" for line in recording.splitlines())


def _rocm_option(column: str) -> str:
    """Return what must be asked for to see a column: a kind of memory, or an option."""
    memory = _ROCM_MEMORY.fullmatch(column)
    if memory:
        return memory[1]
    return {"device": "device", "PCI Bus": "--showbus"}.get(column, "--showproductname")


def _rocm_line(line: str, kept: Sequence[int], width: int) -> str:
    cells = _cells(line)
    if not re.match(r"(device|card\d+),", line) or len(cells) != width:
        return line
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow([cells[place] for place in kept])
    return row.getvalue()


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def lscpu(recording: str, arguments: Sequence[str]) -> str:
    """Answer ``-p=COLUMNS`` with recorded columns; a recording without a heading ends with core,socket."""
    asked = next((word.partition("=")[2] for word in arguments if re.match(r"(-p|--parse)=", word)), "")
    if len(arguments) != 1 or not asked:
        raise NotRecorded("only lscpu -p=COLUMNS is recorded")
    lines = recording.splitlines()
    rows = [line.split(",") for line in lines if line.strip() and not line.startswith("#")]
    recorded = ["cpu", "core", "socket"][-max((len(row) for row in rows), default=2) :]
    names = asked.lower().split(",")
    for name in names:
        if name not in recorded:
            raise NotRecorded(f"the column {name!r} is not recorded")
    places = [recorded.index(name) - len(recorded) for name in names]
    answer = ["# " + ",".join(name.upper() if name == "cpu" else name.capitalize() for name in names)]
    answer += [",".join(row[place].strip() for place in places) for row in rows]
    return "".join(line + "\n" for line in answer)


def sysctl(recording: str, arguments: Sequence[str]) -> str:
    """Answer ``[-n] KEY...`` from the ``key: value`` lines of the recording."""
    bare, keys = "-n" in arguments, [word for word in arguments if word != "-n"]
    values = dict(re.findall(r"^([a-z]\w*(?:\.\w+)+): (.*)$", recording, re.MULTILINE))
    for key in keys:
        if key not in values:
            raise NotRecorded(f"{key!r} is not recorded")
    return "".join(f"{values[key]}\n" if bare else f"{key}: {values[key]}\n" for key in keys)


def vm_stat(recording: str, arguments: Sequence[str]) -> str:
    """Answer the bare command: the recording without the ``sysctl`` lines before it."""
    start = recording.find("Mach Virtual Memory Statistics")
    if arguments or start < 0:
        raise NotRecorded("only vm_stat without arguments is recorded" if arguments else "it has no vm_stat")
    return recording[start:]


def system_profiler(recording: str, arguments: Sequence[str]) -> str:
    """Answer ``TYPE... -json`` with the recorded data types."""
    types = [word for word in arguments if word != "-json"]
    if "-json" not in arguments or not types:
        raise NotRecorded("only data types with -json are recorded")
    document = json.loads(recording)
    for data_type in types:
        if data_type not in document:
            raise NotRecorded(f"{data_type!r} is not recorded")
    return json.dumps({data_type: document[data_type] for data_type in types}, indent=1) + "\n"


def hip_info(recording: str, arguments: Sequence[str]) -> str:
    """Answer the bare command."""
    if arguments:
        raise NotRecorded("only hipInfo without arguments is recorded")
    return recording


def _options(arguments: Sequence[str], known: set[str]) -> dict[str, str]:
    pairs = dict(word.partition("=")[::2] for word in arguments)
    unknown = set(pairs) - known
    if unknown:
        raise NotRecorded(f"{', '.join(sorted(unknown))} is not recorded")
    return pairs


ANSWERS: Mapping[str, Callable[[str, Sequence[str]], str]] = {
    "nvidia-smi": nvidia_smi,
    "rocm-smi": rocm_smi,
    "hipInfo": hip_info,
    "lscpu": lscpu,
    "vm_stat": vm_stat,
    "sysctl": sysctl,
    "system_profiler": system_profiler,
}


def main(tool: str, recording: str, *arguments: str) -> None:
    """Print the answer, or say what is not recorded and end with a status other than 0."""
    try:
        answer = ANSWERS[tool](Path(recording).read_text(encoding="utf-8"), arguments)
    except NotRecorded as error:
        print(f"{tool}: {error}", file=sys.stderr)
        sys.exit(_REFUSED_STATUS)
    except ValueError as error:
        print(f"{tool}: the recording cannot be read: {error}", file=sys.stderr)
        sys.exit(_REFUSED_STATUS)
    sys.stdout.write(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
