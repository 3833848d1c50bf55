"""``pytest-colibri model``: models to plan and to run, for people who have none at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_colibri.cli import main
from pytest_colibri.container.hollow import HOLLOW_MODELS
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import TINY_MODELS
from pytest_colibri.container.usage import read_usage
from pytest_colibri.judge.tokens import read_token_reference

TINY = [f"tiny-{name}" for name in TINY_MODELS]


def test_the_list_names_every_model_and_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*TINY, *HOLLOW_MODELS]
    assert all(line.endswith("an engine can run it") for line in lines[: len(TINY)])
    assert all(line.endswith("hollow, for planners only") for line in lines[len(TINY) :])


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_comes_with_history_and_right_tokens(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "model"
    assert main(["model", name, str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert read_geometry(folder).expert_count == len(read_usage(folder / ".coli_usage")) == 16
    golden = json.loads((folder / "ref_glm.json").read_text())
    assert golden["write_tiny_model"]["format"] in name
    assert len(read_token_reference(folder / "ref_glm.json").generated) == 20


def test_a_hollow_model_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "glm-mixed", str(tmp_path)]) == 0
    assert "for planners only" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--profile=h200", "--emulate"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["model_bytes"] == HOLLOW_MODELS["glm-mixed"].total_bytes
    assert plan["tiers"]["vram"]["hot_expert_bytes"] > 100 * 10**9


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["glm", "new"], "unknown model 'glm'; allowed: tiny-f32, "),
        (["glm-mixed"], "pytest-colibri model glm-mixed DIR"),
        (["glm-mixed", "filled"], "filled: the folder is not empty"),
        (["tiny-f32", "filled"], "filled: the folder is not empty"),
        (["tiny-f32", "filled/file"], "file: Not a directory"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "file").write_bytes(b"kept")
    assert main(["model", *arguments]) == 4
    assert what in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["filled", "file"]
