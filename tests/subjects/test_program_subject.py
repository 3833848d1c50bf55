"""Programs as subjects: found before they are run, started without a shell, named by what they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_colibri.errors import UsageError
from pytest_colibri.subjects.program import program_engine, reference_engine, shaders_in


def test_reference_engine_ships_its_shaders() -> None:
    engine = reference_engine()
    assert {shader.piece for shader in engine.shaders} == {"gate_up", "down"}
    assert len({shader.sha256 for shader in engine.shaders}) == len(engine.shaders) == 6


def test_command_line_is_split_and_files_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my engine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    engine = program_engine(f"{sys.executable} 'my engine.py' --fast", None)
    assert engine.command[1:] == (str(tmp_path / "my engine.py"), "--fast")
    assert engine.name == "my engine.py"
    assert engine.backends is None


@pytest.mark.parametrize("line", ["", "no-such-program-here", "'unclosed"])
def test_program_that_is_not_there(line: str) -> None:
    with pytest.raises(UsageError, match="--colibri-engine"):
        program_engine(line, None)


def test_shader_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--colibri-shaders"):
        program_engine(sys.executable, tmp_path / "none")


def test_shader_of_no_known_piece(tmp_path: Path) -> None:
    (tmp_path / "rmsnorm.spv").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    assert [(s.name, s.piece) for s in shaders_in(tmp_path)] == [("rmsnorm.spv", "other")]
