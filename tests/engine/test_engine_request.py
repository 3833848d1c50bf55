from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from engine_helpers import run_engine, tiny_request

from pytest_colibri.engine.request import Request, parse_request, read_request
from pytest_colibri.errors import UsageError

GOOD = {"model": "m", "prompt": [1, 2], "new_tokens": 3}


def test_a_short_request_gets_the_documented_defaults() -> None:
    assert parse_request(GOOD) == Request(Path("m"), (1, 2), 3, (), None, 1, 0, None, None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompts": []}, "unknown request key 'prompts'; allowed: model, prompt"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1, -2]}, "'prompt' must be a list of token ids"),
        ({"prompt": [True]}, "'prompt' must be a list of token ids"),
        ({"prompt": [1.0]}, "'prompt' must be a list of token ids"),
        ({"prompt": "12"}, "'prompt' must be a list of token ids"),
        ({"score": None}, "'score' must be a list of token ids"),
        ({"new_tokens": "3"}, "'new_tokens' must be an integer"),
        ({"new_tokens": -1}, "'new_tokens' must be an integer"),
        ({"new_tokens": 10**30}, "'new_tokens' must be an integer"),
        ({"new_tokens": 0}, "nothing is asked for"),
        ({"slots_per_layer": True}, "'slots_per_layer' must be an integer"),
        ({"slots_per_layer": 2**40}, "'slots_per_layer' must be an integer"),
        ({"vram_bytes": 1.5}, "'vram_bytes' must be an integer"),
        ({"device": "llvmpipe"}, "uuid:HEX, pci:ADDRESS, name:NAME, index:N"),
        ({"device": "index:"}, "uuid:HEX, pci:ADDRESS, name:NAME, index:N"),
        ({"device": 0}, "uuid:HEX, pci:ADDRESS, name:NAME, index:N"),
        ({"model": None}, "'model' must be a path"),
        ({"model": "a\0b"}, "'model' must be a path"),
        ({"usage": 3}, "'usage' must be a path"),
        ({"route_trace": ""}, "'route_trace' must be a path"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_request({**GOOD, **changes})


@pytest.mark.parametrize("key", sorted(GOOD))
def test_what_must_be_there_is_missed_by_name(key: str) -> None:
    with pytest.raises(UsageError, match=f"lacks '{key}'"):
        parse_request({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"new_tokens": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"model": "a", "model": "b"}', "stands twice"),
        (b"[]", "a JSON object"),
    ],
)
def test_a_file_that_is_no_request_is_refused(tmp_path: Path, text: bytes, complaint: str) -> None:
    path = tmp_path / "request.json"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=complaint):
        read_request(path)


def test_a_missing_or_endless_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read request none\.json: No such file"):
        read_request(tmp_path / "none.json")
    path = tmp_path / "long.json"
    path.write_bytes(json.dumps(GOOD).encode() + b" " * (16 * 2**20))
    with pytest.raises(UsageError, match="longer than 16777216 bytes"):
        read_request(path)


@pytest.mark.parametrize(
    ("changes", "environment", "complaint"),
    [
        ({"prompt": [3, 256]}, {}, "token id 256 is not in the vocabulary: ids are 0 to 255"),
        ({"score": [99999]}, {}, "token id 99999"),
        ({"new_tokens": 4093}, {}, "needs 4097 positions; the model is computed for 4096"),
        ({"model": "/nonexistent"}, {}, "/nonexistent"),
        ({"usage": "/nonexistent"}, {}, "/nonexistent: no such usage history"),
        ({"route_trace": "/nonexistent/trace"}, {}, "cannot write route_trace"),
        ({"device": "index:0"}, {}, "COLI_VULKAN=1 is not set"),
        ({}, {"COLI_CUDA": "1"}, "COLI_CUDA=1 is asked for; this engine computes on cpu and vulkan"),
        ({}, {"COLI_VULKAN": "yes"}, "COLI_VULKAN must be 0 or 1, not 'yes'"),
        ({}, {"COLI_VK_EXPERTS": "-1"}, "COLI_VK_EXPERTS must be a count"),
        ({}, {"RAM_GB": "lots"}, "RAM_GB must be a number of GB"),
        ({}, {"RAM_GB": "nan"}, "RAM_GB must be a number of GB"),
        ({}, {"RAM_GB": "0.001"}, "need 1.* MB; RAM_GB allows 1.0 MB"),
    ],
)
def test_what_cannot_be_served_as_asked_is_refused(
    tiny: Path,
    tmp_path: Path,
    changes: dict[str, object],
    environment: dict[str, str],
    complaint: str,
) -> None:
    run = run_engine(tmp_path, tiny_request(tiny, **changes), **environment)
    assert re.search(complaint, run.refusal), run.refusal
    assert not run.of("token")


def test_a_hostile_request_ends_without_a_traceback(tmp_path: Path) -> None:
    run = run_engine(tmp_path, b'{"model": [[[[')
    assert "not valid JSON" in run.refusal
    assert [event["event"] for event in run.events] == ["refused"]
