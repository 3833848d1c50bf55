from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_helpers import DATA

from pytest_colibri.container.safetensors import Container, open_container
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.engine.vulkan import open_vulkan
from pytest_colibri.errors import Unavailable


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny int4-grouped model of our own, with a usage history of every expert."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "int4-grouped", group_size=32)


@pytest.fixture(scope="session")
def tiny_container(tiny: Path) -> Iterator[Container]:
    with open_container(tiny) as container:
        yield container


@pytest.fixture(scope="session")
def vulkan() -> str:
    """The selector of the first Vulkan device."""
    try:
        open_vulkan("index:0", batch_rows=1).close()
    except Unavailable as reason:
        pytest.skip(f"no Vulkan here: {reason}")
    return "index:0"


@pytest.fixture(params=["glm_tiny", "glm_tiny_fmt4"])
def reference_model(request: pytest.FixtureRequest) -> Path:
    model = DATA / str(request.param)
    if not model.is_dir():
        pytest.skip(f"the reference models are not here: {model}")
    return model
