"""The documentation is true: every command that it shows is run, and every table is held to the code.

Commands stand in ``console`` blocks, on lines that begin with ``$``. A command ends with status 0 unless its
line says ``# exit status N``. What follows it is its output: ``...`` stands for any text, on a line of its
own for any lines, and figures with their units are not compared. The commands of a page run in order in one
empty folder, with a model folder ``my-model`` in it. A block after ``<!-- file: PATH -->`` is a file there.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.judge.issues import STATUSES, read_issues
from pytest_colibri.judge.plan_rules import RULES
from pytest_colibri.judge.status import Status
from pytest_colibri.plugin.options import OPTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TITLE_POSITION = {"Verdict": 1, "_judge": 0, "_not_claimed": 0}

FENCE = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
FIGURE = re.compile(r"(?<!\w)\d+(?:\.\d+)*(?: (?:B|kB|MB|GB)\b)?")
STATUS = re.compile(r"\s+# exit status (\d+)$")
TABLE_HEAD = re.compile(r"\s*claim\s+said at\s+advertised\s+witnessed\s+by\s+verdict\s*")


@dataclass(frozen=True)
class Command:
    """A command of a page, the status that the page gives it, and the output that the page quotes."""

    line: str
    status: int
    quoted: tuple[str, ...]


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.M)[1:]:
        line, *quoted = part.splitlines()
        status = STATUS.search(line)
        yield Command(STATUS.sub("", line), int(status[1]) if status else 0, tuple(quoted))


# What sets up a machine is not run here: it would install packages, or run this test again.


def check_bootstrap(line: str) -> None:
    subprocess.run(["bash", "-n", ROOT / "bootstrap"], check=True)
    what = re.fullmatch(r"(?:COLIBRI_PROFILE=\S+ )?\./bootstrap (\w+).*", line)
    assert what
    assert f"\n  {what[1]})\n" in read(ROOT / "bootstrap")


def check_tox(line: str) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tox", "list", "--no-desc"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(line.split(" -- ")[0].split()[2].split(",")) <= set(listed.stdout.split())


def check_packages(line: str) -> None:
    for package in line.split(" install ")[1].split():
        assert package in read(ROOT / "bootstrap")


def check_pip(line: str) -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    what = re.fullmatch(r"\S*pip install '(?:\.|pytest-colibri)\[(\w+)\]'", line)
    assert what
    assert what[1] in project["optional-dependencies"]


def check_nothing(line: str) -> None:
    """Python's own commands for a virtual environment."""


SETS_UP = {
    r"(COLIBRI_PROFILE=\S+ )?\./bootstrap ": check_bootstrap,
    r"tox -e ": check_tox,
    r"sudo apt install ": check_packages,
    r"\S*pip install ": check_pip,
    r"python3 -m venv |\. \.venv/bin/activate": check_nothing,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_do_what_the_page_says(page: Path, tmp_path: Path) -> None:
    text = read(page)
    if "my-model" in text:
        write_model(tmp_path / "my-model")
    for block in FENCE.finditer(text):
        if block["file"]:
            file = tmp_path / block["file"]
            file.parent.mkdir(exist_ok=True)
            file.write_text(block["text"], encoding="utf-8")
        elif block["kind"] == "console":
            for command in commands(block["text"]):
                check_command(command, tmp_path)


def write_model(folder: Path) -> None:
    write_tiny_model(folder, "int4-grouped", group_size=64)
    golden = ROOT / "conformance" / "engine" / "golden" / "tiny-int4-grouped-64.json"
    shutil.copy(golden, folder / "ref_glm.json")


def check_command(command: Command, folder: Path) -> None:
    check = next((check for begin, check in SETS_UP.items() if re.match(begin, command.line)), None)
    if check is not None:
        check(command.line)
        return
    process = run(command.line, folder)
    shown = f"{command.line}\n{process.stdout}"
    assert process.returncode == command.status, shown
    assert "Traceback" not in process.stdout, shown
    missing = missing_lines(command.quoted, process.stdout)
    assert not missing, f"not printed, or not in this place: {missing}\n{shown}"


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("COLIBRI_", "PYTEST_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**own, "PATH": path, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )


def missing_lines(quoted: tuple[str, ...], output: str) -> list[str]:
    """Return the table rows that the output lacks, and the first line that it lacks or has elsewhere."""
    lines, rows = split_table(quoted)
    printed, printed_rows = split_table(tuple(output.splitlines()))
    missing = [" | ".join(row) for row in rows if row not in printed_rows]
    at, anywhere = 0, False
    for line in lines:
        if line == "...":
            anywhere = True
            continue
        reachable = printed[at:] if anywhere else printed[at : at + 1]
        found = next(
            (n for n, p in enumerate(reachable) if re.fullmatch(pattern(line), figures_out(p))), None
        )
        if found is None:
            return [*missing, line]
        at, anywhere = at + found + 1, False
    if lines and not anywhere and at < len(printed):
        missing.append(f"the end, instead of {printed[at]}")
    return missing


def figures_out(line: str) -> str:
    return " ".join(FIGURE.sub("#", line).split())


def pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in figures_out(line).split("..."))


def split_table(lines: tuple[str, ...]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Part the lines from the rows of a verdict table among them, whose cells are joined without spaces."""
    plain: list[str] = []
    rows: list[tuple[str, ...]] = []
    starts: list[int] = []
    for line in lines:
        if TABLE_HEAD.fullmatch(line):
            heads = ("claim", "said at", "advertised", "witnessed", "by ", "verdict")
            starts = [line.index(head) for head in heads]
        elif starts and line.strip(" ─"):
            if line == "..." or not line.startswith(" "):
                starts = []
                plain.append(line)
                continue
            cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
            if cells[-1]:
                rows.append(tuple(cells))
            else:
                rows[-1] = tuple(above + " " + cell for above, cell in zip(rows[-1], cells, strict=True))
        elif not starts and line.strip():
            plain.append(line)
    return plain, [tuple(FIGURE.sub("#", cell).replace(" ", "") for cell in row) for row in rows]


@pytest.mark.parametrize(
    ("quoted", "output", "missing"),
    [
        (("a 1.5 GB b",), "a 20 MB b", []),
        (("a", "b"), "a\nx\nb", ["b"]),
        (("a", "...", "b"), "a\nx\nb", []),
        (("b",), "a\nb", ["b"]),
        (("...", "b"), "a\nb\nc", ["the end, instead of c"]),
        (("...", "b", "...", "a"), "a\nb", ["a"]),
        (("it is ... here",), "it is not anywhere but here", []),
        (("held f32",), "held f16", ["held f32"]),
        ((), "anything", []),
    ],
)
def test_quoted_lines_are_compared(quoted: tuple[str, ...], output: str, missing: list[str]) -> None:
    assert missing_lines(quoted, output) == missing


def test_tables_are_compared_by_row() -> None:
    head = " claim      said at  advertised  witnessed  by      verdict "
    row = " tier       plan     11 of it    11         tracer  held    "
    folded = " (2 cases)           and more                              "
    other = row.replace("held", "lost")
    assert missing_lines((head, row, folded), "\n".join((head, other, folded, row, folded))) == []
    assert missing_lines((head, row, folded), "\n".join((head, other, folded)))
    assert missing_lines((head, row), "\n".join((head, row, folded)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_stand_where_they_are_run(page: Path) -> None:
    """No command hides in a block of another kind, or in an indented one."""
    text = read(page)
    rest = FENCE.sub("", text)
    others = [block["text"] for block in FENCE.finditer(text) if block["kind"] not in ("console", "")]
    begins = r"^(\$ |(    )(\./bootstrap|pytest|pytest-colibri|pip|tox|python3?) )"
    assert not re.search(begins, rest, re.M)
    assert not re.search(r"^\$ ", "\n".join(others), re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(read(file)), target


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def rows(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is ``head``, without the marks of code."""
    found = re.search(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M)
    assert found, head
    return [
        [cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")]
        for line in found[1].splitlines()
    ]


def test_options_table_is_that_of_the_plugin() -> None:
    wanted = [[o.flag, o.alias or "", o.dest, o.dest.upper()] for o in OPTIONS]
    shown = [[cell.split("=")[0] for cell in row[:4]] for row in rows(read(DOCS / "commands.md"), "option")]
    assert shown == wanted


def test_status_table_is_that_of_the_judge() -> None:
    ours = {row[0] for row in rows(read(DOCS / "verdicts.md"), "status") if "pytest" not in row[1]}
    assert ours == {str(int(status)) for status in Status}


def test_every_verdict_has_its_section() -> None:
    heads = re.findall(r"^### (.*)$", read(DOCS / "verdicts.md"), re.M)
    assert sorted(heads) == sorted(verdict_titles())


def verdict_titles() -> set[str]:
    """The titles that the judge and the suite give to verdicts, from their source."""
    sources = [*(ROOT / "pytest_colibri" / "judge").glob("*.py"), *(ROOT / "conformance").rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(read(source)))]
    return {
        value.value
        for node in nodes
        for value in possible_titles(node)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def possible_titles(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        position = TITLE_POSITION.get(node.func.id)
        if position is not None:
            yield from node.args[position : position + 1]
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "title")
    elif isinstance(node, ast.FunctionDef):
        for argument, default in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False):
            if argument.arg == "title":
                yield default
    elif isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
        pairs = (
            zip(target.elts, value.elts, strict=True)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            else [(target, value)]
        )
        for name, given in pairs:
            if isinstance(name, ast.Name) and name.id.lower() == "title":
                yield given


def test_every_seeded_fault_is_named() -> None:
    faults = set(re.findall(r"@fault\ndef (\w+)", read(ROOT / "tests" / "faults" / "engine.py")))
    assert {row[0] for row in rows(read(DOCS / "verdicts.md"), "fault")} == faults


def test_every_rule_for_plans_is_in_the_table() -> None:
    wanted = [[rule.name, rule.title] for rule in RULES.values()]
    assert [[row[0], row[2]] for row in rows(read(DOCS / "plan-checks.md"), "check")] == wanted


def test_every_report_is_in_the_table() -> None:
    issues = read_issues(ROOT / "conformance" / "issues.yaml")
    shown = rows(read(DOCS / "issues.md"), "report")
    assert [row[1] for row in shown] == [issue.title for issue in issues]
    assert [row[0].split("](")[0].strip("[") for row in shown] == [issue.id for issue in issues]


def test_every_result_of_a_report_has_its_status() -> None:
    shown = {row[0]: row[2] for row in rows(read(DOCS / "issues.md"), "result")}
    assert shown == {state: str(int(status)) for state, status in STATUSES.items()}


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", read(DOCS / "index.md")))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"index.md"}


def test_every_profile_that_comes_along_is_in_the_table() -> None:
    shipped = {path.stem for path in (ROOT / "hardware_profiles").glob("*.yaml")}
    named = set(re.findall(r"`([a-z0-9-]+)`", "".join(row_text(DOCS / "reporters.md", "your machine"))))
    assert shipped <= named


def row_text(page: Path, head: str) -> list[str]:
    found = re.search(rf"^\| {head} \|.*\n((?:\|.*\n)+)", read(page), re.M)
    assert found
    return [found[1]]


def test_evidence_keys_are_those_of_a_trial() -> None:
    source = read(ROOT / "pytest_colibri" / "report" / "bundle.py")
    page = read(DOCS / "maintainers.md")
    for function, after, head in (
        ("trial_to_json", "plan_trial_to_json", "key of a trial"),
        ("plan_trial_to_json", "write_bundle", "key of a plan"),
    ):
        body = source[source.index(f"def {function}(") : source.index(f"def {after}(")]
        assert [row[0] for row in rows(page, head)] == re.findall(r'^        "(\w+)":', body, re.M)
