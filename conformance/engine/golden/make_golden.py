"""Make the reference tokens of the tiny models with Hugging Face transformers, which shares no code with us.

    pip install torch==2.13.0 "transformers>=5.24" numpy safetensors
    python conformance/engine/golden/make_golden.py

writes ``tiny-*.json`` beside this file. With model folders as arguments it checks instead that the same
procedure gives the tokens of their ``ref_glm.json``, and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from pytest_colibri.container.formats import dequantise, infer_format  # noqa: E402
from pytest_colibri.container.safetensors import Container, open_container  # noqa: E402
from pytest_colibri.container.tiny import write_tiny_model  # noqa: E402

PROMPT = [194, 104, 63, 31, 185, 54, 176, 80, 19, 29, 60, 103]
NEW_TOKENS = 20
CASES: dict[str, dict[str, Any]] = {
    "tiny-f32": {"format": "f32"},
    "tiny-int8-row": {"format": "int8-row"},
    "tiny-int4-row": {"format": "int4-row"},
    "tiny-int4-grouped-32": {"format": "int4-grouped", "group_size": 32},
    "tiny-int4-grouped-64": {"format": "int4-grouped", "group_size": 64},
}


def matrix(container: Container, name: str, outputs: int, inputs: int) -> torch.Tensor:
    """Return a routed expert's weights as f32 [outputs, inputs], whatever its format."""
    payload = container.read(name)
    scales = container.read_f32(f"{name}.qs") if f"{name}.qs" in container.tensors else None
    weight_format = infer_format(payload.size, None if scales is None else scales.size, outputs, inputs)
    return torch.from_numpy(dequantise(payload, scales, outputs, inputs, weight_format))


def load(directory: Path) -> transformers.PreTrainedModel:
    """Build the model of transformers with the dequantised weights of a container."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    with open_container(directory) as container:
        state = {
            name: torch.from_numpy(container.read_f32(name))
            for name in container.tensors
            if ".mlp.experts." not in name
        }
        for layer, kind in enumerate(config.mlp_layer_types):
            if kind != "sparse":
                continue
            prefix = f"model.layers.{layer}.mlp.experts"
            experts = [f"{prefix}.{expert}" for expert in range(config.n_routed_experts)]
            state[f"{prefix}.gate_up_proj"] = torch.stack(
                [
                    torch.cat(
                        [
                            matrix(container, f"{expert}.{part}_proj.weight", inner, hidden)
                            for part in ("gate", "up")
                        ]
                    )
                    for expert in experts
                ]
            )
            state[f"{prefix}.down_proj"] = torch.stack(
                [matrix(container, f"{expert}.down_proj.weight", hidden, inner) for expert in experts]
            )
    model.load_state_dict(state, strict=True)
    return model.eval()


def reference(directory: Path, prompt: list[int], new_tokens: int) -> dict[str, object]:
    """Generate greedily, then score every position of the result in one pass."""
    torch.set_grad_enabled(False)
    model = load(directory)
    ids = list(prompt)
    for _ in range(new_tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        ids.append(int(logits[-1].argmax()))
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    best = logits.topk(2, dim=-1).values
    return {
        "prompt_ids": prompt,
        "full_ids": ids,
        "tf_pred": logits.argmax(dim=-1).tolist(),
        "smallest_margin": round(float((best[:, 0] - best[:, 1]).min()), 4),
    }


def check(directory: Path) -> bool:
    """Say whether this procedure gives the tokens that a model folder already has."""
    known = json.loads((directory / "ref_glm.json").read_text())
    made = reference(directory, known["prompt_ids"], len(known["full_ids"]) - len(known["prompt_ids"]))
    same = all(made[key] == known[key] for key in ("full_ids", "tf_pred"))
    print(f"{directory.name}: {'equal' if same else 'DIFFERENT'}, smallest margin {made['smallest_margin']}")
    return same


def write() -> None:
    """Write the reference of every tiny model beside this file."""
    provenance = (
        f"Hugging Face transformers {transformers.__version__} glm_moe_dsa, torch {torch.__version__}, "
        "float32, CPU, full forward passes without cache, fed with the dequantised weights, by make_golden.py"
    )
    for name, arguments in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            directory = write_tiny_model(Path(folder), **arguments)
            weights = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
            made = reference(directory, PROMPT, NEW_TOKENS)
        golden = {
            "source": f"transformers {transformers.__version__}",
            "provenance": provenance,
            "write_tiny_model": arguments,
            "model_sha256": weights,
            **made,
        }
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items())
        (HERE / f"{name}.json").write_bytes(("{\n" + ",\n".join(lines) + "\n}\n").encode())
        print(f"{name}: smallest margin {made['smallest_margin']}")


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:]]
    if folders:
        sys.exit(0 if all(map(check, folders)) else 1)
    write()
