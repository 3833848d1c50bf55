from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

WriteShard = Callable[..., Path]


@pytest.fixture
def write_shard(tmp_path: Path) -> WriteShard:
    """Write a shard from a header (an object, or its raw bytes) and the bytes behind it."""

    def write(header: object, payload: bytes = b"", *, name: str = "model.safetensors") -> Path:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + payload)
        return path

    return write


@pytest.fixture(scope="session")
def shared_data() -> Path:
    data = Path(__file__).parents[2].parent / "shared" / "data"
    if not data.is_dir():
        pytest.skip("the test data shared beside the project's root is absent")
    return data
