"""Model families: how each names its experts, and which part of ``config.json`` describes them.

A family is known by its ``model_type``. One that is not listed is refused by name: read as another, its
experts would count as dense weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FamilyName = Literal["glm", "deepseek_v4", "kimi_k3", "inkling", "olmoe", "qwen36"]

NUMBER = r"(0|[1-9]\d{0,5})"


@dataclass(frozen=True)
class Family:
    """One model family.

    ``expert_name`` matches the tensors of an expert, with the groups layer and expert; where there is no
    group for the expert, one tensor holds all experts of a layer along its first dimension.
    ``expert_tensors`` is the same for people. ``count_key`` is the number of experts of a layer, in the part
    ``section`` of ``config.json`` where the family has one.
    """

    name: FamilyName
    model_types: tuple[str, ...]
    expert_tensors: str
    expert_name: re.Pattern[str]
    count_key: str
    section: str | None = None

    @property
    def fused(self) -> bool:
        """Whether one tensor holds all experts of a layer."""
        return self.expert_name.groups == 1


MLP_EXPERTS = "model.layers.L.mlp.experts.E.*"
MLP_EXPERT_NAME = re.compile(rf"model\.layers\.{NUMBER}\.mlp\.experts\.{NUMBER}\..+", re.ASCII)

FAMILIES = (
    Family(
        "glm", ("glm_moe_dsa", "glm5_moe", "glm"), MLP_EXPERTS, MLP_EXPERT_NAME, count_key="n_routed_experts"
    ),
    Family(
        "deepseek_v4",
        ("deepseek_v4",),
        "layers.L.ffn.experts.E.*",
        re.compile(rf"layers\.{NUMBER}\.ffn\.experts\.{NUMBER}\..+", re.ASCII),
        count_key="n_routed_experts",
    ),
    Family(
        "kimi_k3",
        ("kimi_k3",),
        "[language_model.]model.layers.L.block_sparse_moe.experts.E.*",
        re.compile(
            rf"(?:language_model\.)?model\.layers\.{NUMBER}\.block_sparse_moe\.experts\.{NUMBER}\..+",
            re.ASCII,
        ),
        count_key="num_experts",
        section="text_config",
    ),
    Family(
        "inkling",
        ("inkling_mm_model", "inkling"),
        "model.layers.L.mlp.experts.{gate_up_proj,down_proj}",
        re.compile(rf"model\.layers\.{NUMBER}\.mlp\.experts\.(?:gate_up_proj|down_proj)(?:\..+)?", re.ASCII),
        count_key="n_routed_experts",
        section="text_config",
    ),
    Family("olmoe", ("olmoe",), MLP_EXPERTS, MLP_EXPERT_NAME, count_key="num_experts"),
    Family(
        "qwen36",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        MLP_EXPERTS,
        MLP_EXPERT_NAME,
        count_key="num_experts",
        section="text_config",
    ),
)

BY_MODEL_TYPE: Mapping[str, Family] = {
    model_type: family for family in FAMILIES for model_type in family.model_types
}


def known_model_types() -> str:
    """Write the model types that can be read, for an error."""
    return ", ".join(sorted(BY_MODEL_TYPE))
