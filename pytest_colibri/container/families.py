"""Model families: how each names its experts, and which part of ``config.json`` describes them.

A family is known by its ``model_type``. One that is not listed is refused by name: read as another, its
experts would count as dense weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

FamilyName = Literal["glm", "deepseek_v4", "kimi_k3", "inkling", "olmoe", "qwen36"]

NUMBER = r"(0|[1-9]\d{0,5})"


@dataclass(frozen=True)
class NamePattern:
    """Names of tensors, such as ``model.layers.{layer}.mlp.experts.{expert}.*``.

    ``{layer}`` and ``{expert}`` stand for numbers below 10^6, ``*`` at the end for one character or more.
    ``_headers.c`` reads the same text.
    """

    text: str

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        literal = re.escape(self.text).replace(r"\*", ".+")
        return re.compile(literal.replace(r"\{layer\}", NUMBER).replace(r"\{expert\}", NUMBER), re.ASCII)

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Return the numbers in a name; None where it does not match."""
        match = self._regex.fullmatch(name)
        return tuple(map(int, match.groups())) if match else None


@dataclass(frozen=True)
class Family:
    """One model family.

    ``expert_names`` match the tensors of an expert. Where they have no ``{expert}``, one tensor holds all
    experts of a layer along its first dimension. ``count_key`` is the number of experts of a layer, in the
    part ``section`` of ``config.json`` where the family has one.
    """

    name: FamilyName
    model_types: tuple[str, ...]
    expert_names: tuple[NamePattern, ...]
    count_key: str
    section: str | None = None

    @property
    def fused(self) -> bool:
        """Whether one tensor holds all experts of a layer."""
        return "{expert}" not in self.expert_names[0].text


MLP_EXPERT = NamePattern("model.layers.{layer}.mlp.experts.{expert}.*")

FAMILIES = (
    Family("glm", ("glm_moe_dsa", "glm5_moe", "glm"), (MLP_EXPERT,), count_key="n_routed_experts"),
    Family(
        "deepseek_v4",
        ("deepseek_v4",),
        (NamePattern("layers.{layer}.ffn.experts.{expert}.*"),),
        count_key="n_routed_experts",
    ),
    Family(
        "kimi_k3",
        ("kimi_k3",),
        (
            NamePattern("model.layers.{layer}.block_sparse_moe.experts.{expert}.*"),
            NamePattern("language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.*"),
        ),
        count_key="num_experts",
        section="text_config",
    ),
    Family(
        "inkling",
        ("inkling_mm_model", "inkling"),
        (
            NamePattern("model.layers.{layer}.mlp.experts.gate_up_proj"),
            NamePattern("model.layers.{layer}.mlp.experts.gate_up_proj.*"),
            NamePattern("model.layers.{layer}.mlp.experts.down_proj"),
            NamePattern("model.layers.{layer}.mlp.experts.down_proj.*"),
        ),
        count_key="n_routed_experts",
        section="text_config",
    ),
    Family("olmoe", ("olmoe",), (MLP_EXPERT,), count_key="num_experts"),
    Family(
        "qwen36",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        (MLP_EXPERT,),
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
