"""The engine as its own process: against the references, and against its protocol."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from engine_helpers import ROOT, Run, run_engine, tiny_request

from pytest_colibri.claims.engine import read_statement
from pytest_colibri.container.route_trace import read_route_trace
from pytest_colibri.container.usage import write_usage
from pytest_colibri.engine.events import Events

BUDGET = 10**9
EVERY_EXPERT = {(layer, expert): 9 - expert for layer in (3, 4) for expert in range(8)}
FULL, PARTLY, EMPTY = 16, 5, 0


@pytest.fixture(scope="session")
def usage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("usage") / "history"
    write_usage(path, EVERY_EXPERT)
    return path


def reference_request(model: Path, usage: Path, teacher_forcing: bool) -> tuple[dict[str, object], list[int]]:
    """The request of a reference file, and what must come out of it."""
    reference = json.loads((model / "ref_glm.json").read_text())
    prompt = reference["prompt_ids"]
    generated = reference["full_ids"][len(prompt) :]
    request = tiny_request(model, prompt=prompt, new_tokens=len(generated), usage=str(usage))
    if teacher_forcing:
        return {**request, "score": generated, "new_tokens": 0}, reference["tf_pred"]
    return request, generated


def results(run: Run) -> list[int]:
    assert run.status == 0, run.errors
    assert run.events[-1]["event"] == "end"
    return run.tokens or run.of("scores")[0]["ids"]


both_modes = pytest.mark.parametrize("teacher_forcing", [False, True], ids=["greedy", "score"])


@both_modes
def test_the_cpu_agrees_with_the_reference(
    reference_model: Path, usage: Path, tmp_path: Path, teacher_forcing: bool
) -> None:
    request, expected = reference_request(reference_model, usage, teacher_forcing)
    assert results(run_engine(tmp_path, request)) == expected


@pytest.mark.parametrize("hot", [FULL, PARTLY, EMPTY], ids=["full", "partly full", "empty"])
@both_modes
def test_vulkan_agrees_with_the_reference(
    reference_model: Path, usage: Path, tmp_path: Path, vulkan: str, teacher_forcing: bool, hot: int
) -> None:
    request, expected = reference_request(reference_model, usage, teacher_forcing)
    run = run_engine(
        tmp_path,
        {**request, "device": vulkan, "vram_bytes": BUDGET},
        COLI_VULKAN="1",
        COLI_VK_EXPERTS=str(hot),
    )
    assert results(run) == expected
    assert sum(len(claim["experts"]) for claim in run.claims("resident")) == hot
    served = run.telemetry("score" if teacher_forcing else "decode")
    assert {tier for tier, count in served["tiers"].items() if count["hits"]} == {
        FULL: {"vram"},
        PARTLY: {"vram", "disk"} | (set() if teacher_forcing else {"ram"}),
        EMPTY: {"disk"} | (set() if teacher_forcing else {"ram"}),
    }[hot]


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that receives the routing of ``vulkan_run``."""
    return tmp_path_factory.mktemp("run") / "trace"


@pytest.fixture(scope="session")
def vulkan_run(vulkan: str, tiny: Path, trace: Path) -> Run:
    """A greedy run with half of the experts on the device."""
    request = tiny_request(tiny, device=vulkan, vram_bytes=BUDGET, route_trace=str(trace))
    run = run_engine(trace.parent, request, COLI_VULKAN="1", COLI_VK_EXPERTS="8")
    assert run.status == 0, run.errors
    return run


def test_every_line_is_compact_json_that_begins_with_its_event(vulkan_run: Run) -> None:
    for line in vulkan_run.lines:
        event = json.loads(line)
        assert next(iter(event)) == "event"
        assert line == json.dumps(event, separators=(",", ":")).encode()
        if event["event"] == "phase":
            assert line.startswith(b'{"event":"phase",')
    times = [event["at_us"] for event in vulkan_run.events]
    assert times == sorted(times)
    assert all(type(time) is int for time in times)


def test_a_reader_of_the_protocol_understands_every_line(vulkan_run: Run) -> None:
    statement = read_statement([line.decode() for line in vulkan_run.lines], "reference")
    assert statement.unparsed == ()
    assert statement.complete
    assert len(statement.tokens) == 4


def test_phases_come_in_order_and_telemetry_after_their_end(vulkan_run: Run) -> None:
    told = [
        (event["phase"], event.get("state", "telemetry"))
        for event in vulkan_run.events
        if event["event"] in ("phase", "telemetry")
    ]
    phases = ("load", "fill", "prefill", "decode")
    assert told == [(phase, what) for phase in phases for what in ("begin", "end", "telemetry")]


def test_the_first_event_says_what_runs_on_what(vulkan_run: Run) -> None:
    start = vulkan_run.events[0]
    assert (start["event"], start["protocol"], start["engine"], start["backend"]) == (
        "start",
        1,
        "reference",
        "vulkan",
    )


def test_the_claims_name_the_device_the_tier_and_what_lies_in_it(vulkan_run: Run, tiny: Path) -> None:
    (device,) = vulkan_run.claims("device")
    assert device["device"].keys() == {"api", "index", "name", "uuid", "pci"}
    (tier,) = vulkan_run.claims("expert_tier")
    assert (tier["tier"], tier["pieces"], tier["budget_experts"]) == ("vram", ["gate_up", "down"], 8)
    (resident,) = vulkan_run.claims("resident")
    assert tier["device"] == resident["device"] == device["device"]
    lines = [tuple(map(int, line.split())) for line in (tiny / ".coli_usage").read_text().splitlines()]
    hottest = sorted(lines, key=lambda line: (-line[2], line[:2]))[:8]
    assert resident["experts"] == [list(line[:2]) for line in hottest]
    (ram,) = vulkan_run.claims("ram_tier")
    assert ram["slots_per_layer"] == 2


def test_dispatches_and_tiers_are_counted_where_they_happened(vulkan_run: Run) -> None:
    assert vulkan_run.telemetry("load")["dispatches"] == vulkan_run.telemetry("fill")["dispatches"] == {}
    for phase, batches in (("prefill", 2), ("decode", 6)):
        counts = vulkan_run.telemetry(phase)
        hits = counts["tiers"]["vram"]["hits"]
        assert hits > 0
        assert counts["dispatches"] == {"gate_up_int4.spv": hits, "down_int4.spv": hits}
        assert 0 < counts["submits"] <= min(hits, batches)


def test_the_routing_trace_tells_what_the_tiers_served(vulkan_run: Run, trace: Path) -> None:
    batches = list(read_route_trace(trace))
    assert [batch.layer for batch in batches] == [3, 4] * 4
    assert [len(batch.rows) for batch in batches] == [5, 5, *[1] * 6]
    unions = [{expert for row in batch.rows for expert, _gate in row} for batch in batches]
    for phase, own in (("prefill", unions[:2]), ("decode", unions[2:])):
        tiers = vulkan_run.telemetry(phase)["tiers"]
        assert sum(count["hits"] for count in tiers.values()) == sum(map(len, own))
    for batch in batches:
        for row in batch.rows:
            assert sum(gate for _expert, gate in row) == pytest.approx(2.5, rel=1e-5)


def test_without_a_history_the_tier_is_taken_back(tiny: Path, tmp_path: Path, vulkan: str) -> None:
    history = tmp_path / "empty"
    history.write_text("")
    request = tiny_request(tiny, device=vulkan, vram_bytes=BUDGET, usage=str(history))
    run = run_engine(tmp_path, request, COLI_VULKAN="1", COLI_VK_EXPERTS="8")
    assert run.status == 0
    assert run.claims("expert_tier")
    (retraction,) = run.of("retract")
    assert retraction["claim"] == "expert_tier"
    assert "no usage history" in retraction["reason"]
    assert not run.claims("resident")
    assert all(counts["dispatches"] == {} for counts in run.of("telemetry"))


def test_a_budget_below_the_hottest_expert_takes_the_tier_back(
    tiny: Path, tmp_path: Path, vulkan: str
) -> None:
    run = run_engine(tmp_path, tiny_request(tiny, device=vulkan, vram_bytes=1000), COLI_VULKAN="1")
    assert run.claims("expert_tier")[0]["budget_experts"] == 16
    assert run.of("retract")[0]["reason"] == "the hottest expert does not fit into 1000 B"


@pytest.mark.parametrize(("experts", "vram_bytes"), [("0", BUDGET), ("8", 0)])
def test_a_budget_of_nothing_claims_no_tier(
    tiny: Path, tmp_path: Path, vulkan: str, experts: str, vram_bytes: int
) -> None:
    request = tiny_request(tiny, device=vulkan, vram_bytes=vram_bytes)
    run = run_engine(tmp_path, request, COLI_VULKAN="1", COLI_VK_EXPERTS=experts)
    assert run.status == 0
    assert run.claims("device")
    assert not run.claims("expert_tier")
    assert not run.of("retract")


def test_the_cpu_claims_no_device(tiny: Path, tmp_path: Path) -> None:
    run = run_engine(tmp_path, tiny_request(tiny))
    assert run.events[0]["backend"] == "cpu"
    assert [claim["claim"] for claim in run.of("claim")] == ["ram_tier"]


def test_ram_that_just_fits_is_enough(tiny: Path, tmp_path: Path) -> None:
    refusal = run_engine(tmp_path, tiny_request(tiny), RAM_GB="0.0001").refusal
    assert "dense weights" in refusal
    assert "RAM_GB allows 0.1 MB" in refusal
    assert run_engine(tmp_path, tiny_request(tiny), RAM_GB="0.01").status == 0


def test_one_new_token_needs_no_decode(tiny: Path, tmp_path: Path) -> None:
    run = run_engine(tmp_path, tiny_request(tiny, new_tokens=1))
    assert [(token["position"], len(run.tokens)) for token in run.of("token")] == [(5, 1)]
    assert [counts["phase"] for counts in run.of("telemetry")] == ["load", "prefill"]


def test_a_device_that_is_not_there_is_refused(tiny: Path, tmp_path: Path, vulkan: str) -> None:
    assert vulkan
    run = run_engine(tmp_path, tiny_request(tiny, device="name:GeForce 9999"), COLI_VULKAN="1")
    assert "there is no Vulkan device name:GeForce 9999; this machine has index:0" in run.refusal
    assert not run.claims("device")


def test_a_machine_without_a_driver_is_refused(tiny: Path, tmp_path: Path, vulkan: str) -> None:
    assert vulkan
    nowhere = str(tmp_path / "none.json")
    run = run_engine(
        tmp_path,
        tiny_request(tiny, device="index:0"),
        COLI_VULKAN="1",
        VK_ICD_FILENAMES=nowhere,
        VK_DRIVER_FILES=nowhere,
    )
    assert "no Vulkan d" in run.refusal


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("raise OSError('no loader')", "no Vulkan loader on this machine; install libvulkan1"),
        ("raise ImportError", "the python package vulkan is not installed: pip install vulkan"),
    ],
)
def test_a_machine_without_a_loader_is_refused(tiny: Path, tmp_path: Path, body: str, complaint: str) -> None:
    # The real package fails in just this way while it is imported.
    (tmp_path / "vulkan.py").write_text(body)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = run_engine(tmp_path, tiny_request(tiny, device="index:0"), COLI_VULKAN="1", PYTHONPATH=paths)
    assert complaint in run.refusal


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs datagrams between local sockets")
def test_each_event_is_one_write() -> None:
    # A datagram socket keeps the borders between writes, which a pipe does not.
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with reader, writer:
        events = Events(writer.fileno())
        events.emit("phase", phase="decode", state="begin")
        events.emit("scores", ids=list(range(2000)))
        assert reader.recv(2**16).startswith(b'{"event":"phase","phase":"decode","state":"begin","at_us":')
        assert json.loads(reader.recv(2**16))["ids"] == list(range(2000))


VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
VALIDATION = {
    "VK_INSTANCE_LAYERS": VALIDATION_LAYER,
    "VK_LAYER_ENABLES": "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT",
}

LEAVE_A_BUFFER_BEHIND = """
import sys
import vulkan as vk
from pytest_colibri.engine.vulkan.device import VulkanDevice
device = VulkanDevice(sys.argv[1])
create = vk.VkBufferCreateInfo(size=16, usage=vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT)
vk.vkCreateBuffer(device.handle, create, None)
device.close()
"""

RUN_STAGED = """
import sys
from test_engine_vulkan import INT8, fill, make_expert, open_vulkan, random_rows, rows_for
device = open_vulkan(sys.argv[1], 8, staged=True)
fill(device, [make_expert(64, 32, INT8, INT8, seed) for seed in range(2)])
device.run_experts([rows_for(0, 0), rows_for(1, 0)], random_rows(1, 64))
device.close()
"""


def validate(program: str, selector: str) -> str:
    """Run a program under the validation layer and return all that is said."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", program, selector],
        env={**os.environ, **VALIDATION, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.fixture
def validated(vulkan: str) -> str:
    """The selector of a device, where the validation layer is there to watch its use."""
    import vulkan as vk

    if VALIDATION_LAYER not in {layer.layerName for layer in vk.vkEnumerateInstanceLayerProperties()}:
        pytest.skip(f"the layer {VALIDATION_LAYER} is not installed")
    return vulkan


def test_the_validation_layer_complains_of_what_is_left_behind(validated: str) -> None:
    assert "VUID-vkDestroyDevice-device-" in validate(LEAVE_A_BUFFER_BEHIND, validated)


def test_the_validation_layer_has_nothing_to_say_about_staging(validated: str) -> None:
    assert validate(RUN_STAGED, validated) == ""


def test_the_validation_layer_has_nothing_to_say_about_a_run(
    tiny: Path, tmp_path: Path, validated: str
) -> None:
    request = tiny_request(tiny, device=validated, vram_bytes=BUDGET)
    run = run_engine(tmp_path, request, COLI_VULKAN="1", COLI_VK_EXPERTS="12", **VALIDATION)
    assert (run.status, run.errors) == (0, "")
    assert run.telemetry("decode")["submits"] > 0
    assert all(line.startswith(b'{"event":') for line in run.lines)
