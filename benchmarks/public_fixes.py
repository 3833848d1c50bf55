"""Do the checks tell a fault from its fix? Asked of the planner fixes in the engine's public history.

    python benchmarks/public_fixes.py --checkout DIR

DIR is a clone of https://github.com/JustVugg/colibri with its history; it is only read. For each fix, the
planner of the commit and that of the one before are asked on the emulated machine of the report, by
``pytest --profile=all --emulate --issue=ID --colibri=COMMIT``. So are the faults that are open in the last
release. The status is 0 when every fault is reproduced where it is, and not after a fix that mends it.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_colibri.judge.issues import read_issues
from pytest_colibri.suite import registry_file

TIMEOUT_S = 600
BEFORE, AFTER = "reproduced", "not_reproduced"


@dataclass(frozen=True)
class Fix:
    """A fault by its id in ``conformance/issues.yaml``, the commit before its fix, and the fix.

    ``mends`` is False for a fix after which the fault is still there.
    """

    issue: str
    parent: str
    commit: str
    mends: bool = True


FIXES = (
    Fix("325", "bd3efb1", "171aa69"),
    Fix("389", "8f33bd1", "8a9a0fc"),
    Fix("467", "e16ec68", "ac04b37"),
    Fix("487", "766dd07", "a920336"),
    Fix("653", "8d06bd1", "39e5f0c"),
    Fix("662", "2a301ea", "9109961"),
    Fix("759", "8d06bd1", "39e5f0c"),
    Fix("123", "afc259c", "2319b94"),
    Fix("150", "6e9affb", "bf3e890"),
    Fix("184-null-key", "39dcebf", "35ed9bc"),
    Fix("184-code-page", "39dcebf", "35ed9bc"),
    Fix("186", "8395435", "39dcebf", mends=False),
    Fix("275", "3fd47b7", "f72ee65"),
    Fix("279", "f72ee65", "1a243cf"),
    Fix("325-siblings", "e9b3614", "f27a89e"),
    Fix("325-affinity", "f27a89e", "bd3efb1"),
    Fix("332", "bd3efb1", "171aa69"),
    Fix("384", "f8e4dc9", "9c17dc6"),
    Fix("379", "a3d76fc", "04e85d9"),
    Fix("770", "fe308c9", "3e2a261"),
    Fix("805", "7fb1159", "aef8552"),
    Fix("903-efficiency-cores", "8d06bd1", "39e5f0c"),
    Fix("903-widest-expert", "8d06bd1", "39e5f0c"),
    Fix("931", "b5a8bac", "80370ed"),
    Fix("1055", "623f6c1", "d44b096"),
    Fix("1063", "03e8677", "fe3879c"),
    Fix("712", "fc52d73", "9c901b5"),
    Fix("1066-olmoe", "ad79236", "1545fac"),
    Fix("1066-kimi-k3", "849f960", "de99057"),
    Fix("1066-inkling", "de99057", "d7a4890"),
    Fix("1066-deepseek-v4", "d7a4890", "655dde7"),
)


RELEASE, RELEASE_COMMIT = "v1.7.0", "33e67a9"
OPEN = ("186", "open-unified-reserve", "open-mig", "open-gpu-order", "open-cgroup", "open-small-host")


def main() -> int:
    """Ask every planner and print the tables; return 0 when every result is as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="clone of the engine")
    parser.add_argument("--issue", action="append", help="only this fault; may be repeated")
    options = parser.parse_args()
    fixes = [fix for fix in FIXES if options.issue is None or fix.issue in options.issue]
    still_open = [issue for issue in OPEN if options.issue is None or issue in options.issue]
    questions = [(commit, fix.issue) for fix in fixes for commit in (fix.parent, fix.commit)]
    questions += [(RELEASE_COMMIT, issue) for issue in still_open]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.checkout, questions, Path(folder))
    print_table(
        ("parent", "fix", "at the parent", "at the fix"),
        {
            fix.issue: (fix.parent, fix.commit, found[fix.parent, fix.issue], found[fix.commit, fix.issue])
            for fix in fixes
        },
    )
    print_table((f"at {RELEASE}",), {issue: (found[RELEASE_COMMIT, issue],) for issue in still_open})
    expected = {(fix.parent, fix.issue): BEFORE for fix in fixes}
    expected |= {(fix.commit, fix.issue): AFTER if fix.mends else BEFORE for fix in fixes}
    expected |= {(RELEASE_COMMIT, issue): BEFORE for issue in still_open}
    as_expected = sum(found[question] == state for question, state in expected.items())
    print(f"{as_expected} of {len(expected)} results are as expected")
    return 0 if as_expected == len(expected) else 1


def print_table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """Print a table with a row for each fault, which its title and machines in the registry describe."""
    issues = {issue.id: issue for issue in read_issues(registry_file())}
    heading = ("fault", "what is wrong", "machine", *columns)
    print(f"| {' | '.join(heading)} |\n{'|---' * len(heading)}|")
    for name, cells in rows.items():
        issue = issues[name]
        linked = name if issue.link is None else f"[{name}]({issue.link})"
        profiles = dict.fromkeys(question.profile for question in issue.planner)
        print(f"| {' | '.join((linked, issue.title, ', '.join(profiles), *cells))} |")


def measure(
    checkout: Path, questions: Iterable[tuple[str, str]], folder: Path
) -> Mapping[tuple[str, str], str]:
    """Return the result of each (commit, issue); every planner is started once for all of its issues."""
    wanted: dict[str, list[str]] = {}
    for commit, issue in questions:
        wanted.setdefault(commit, []).append(issue)
    found = {}
    for commit, issues in wanted.items():
        extract(checkout, commit, folder / commit)
        for issue, state in ask(folder / commit, issues).items():
            found[commit, issue] = state
    return found


def extract(checkout: Path, commit: str, folder: Path) -> None:
    """Write the engine's folder ``c`` as it was at a commit; nothing is written into the clone."""
    command = ["git", "-C", str(checkout), "archive", commit, "c"]
    packed = subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member)  # None for what is no file
            if file is not None and ".." not in Path(member.name).parts:
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read())


def ask(checkout: Path, issues: Iterable[str]) -> Mapping[str, str]:
    """Run the suite on one planner; return what became of the planner half of each issue."""
    evidence = checkout / "evidence.json"
    options = [f"--issue={issue}" for issue in issues]
    command = [sys.executable, "-m", "pytest", "--profile=all", "--emulate", *options]
    command += [f"--colibri={checkout}", f"--colibri-evidence={evidence}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=checkout, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if not evidence.exists():
        raise SystemExit(f"{' '.join(command)}: no evidence\n{done.stdout}{done.stderr}")
    results = json.loads(evidence.read_text(encoding="utf-8"))["issues"]
    return {result["issue"]: result["state"] for result in results if result["part"] == "planner"}


if __name__ == "__main__":
    sys.exit(main())
