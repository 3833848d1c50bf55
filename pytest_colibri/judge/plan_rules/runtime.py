"""Rules about the runtime: what an engine needs beside its weights, whatever it caches.

The sizes follow from ``config.json``, by what the engines of a family allocate and not by a planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.container.families import BY_MODEL_TYPE, FamilyName
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner.explain import IN_FLIGHT, RUNTIME_PART
from pytest_colibri.planner.plan import PlanRequest

FIXED_RUNTIME_BYTES = 3_700_000_000
EXPERTS_IN_FLIGHT = 64
FLOAT_BYTES = 4
KV_BLOCK_VALUES = 32
KV_BLOCK_BYTES = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q4_0": 18}
TOLERATED_PERCENT = 10

Number = Callable[[str], int]


def _glm_values(number: Number) -> int:
    # The row of multi-token prediction has a cache as well.
    return (number("num_hidden_layers") + 1) * (number("kv_lora_rank") + number("qk_rope_head_dim"))


def _olmoe_values(number: Number) -> int:
    heads = number("num_attention_heads")
    return number("num_hidden_layers") * 2 * heads * (number("hidden_size") // heads)


KV_VALUES: Mapping[FamilyName, Callable[[Number], int]] = {"glm": _glm_values, "olmoe": _olmoe_values}
"""How many values a token takes in the cache of one sequence, where that does not depend on the context."""


class _Missing(Exception):
    """The config lacks a number."""


def _number_of(request: PlanRequest) -> Number:
    def number(key: str) -> int:
        value = request.geometry.config.get(key)
        if type(value) is not int or value <= 0:
            raise _Missing(key)
        return value

    return number


def _family(request: PlanRequest) -> FamilyName | None:
    family = BY_MODEL_TYPE.get(request.geometry.family)
    return None if family is None else family.name


def kv_bytes(request: PlanRequest) -> int | None:
    """Return what the KV caches of the request take at least; None where no rule here tells."""
    family = _family(request)
    if family is None or family not in KV_VALUES:
        return None
    try:
        per_token = KV_VALUES[family](_number_of(request))
    except _Missing:
        return None
    values = request.kv_slots * request.context * per_token
    return values * KV_BLOCK_BYTES[request.kv_type] // KV_BLOCK_VALUES


def has_known_kv(request: PlanRequest) -> bool:
    """Tell whether a rule here tells the KV cache of the model."""
    return kv_bytes(request) is not None


def prompt_bytes(request: PlanRequest) -> int:
    """Return what a device holds while it takes a prompt; 0 where no rule here tells.

    For each token: four hidden states, query and value of every head, and what the chosen experts take.
    """
    if _family(request) != "glm":
        return 0
    number = _number_of(request)
    try:
        heads = number("qk_nope_head_dim") + number("qk_rope_head_dim") + number("v_head_dim")
        experts = number("num_experts_per_tok") * number("moe_intermediate_size")
        values = 4 * number("hidden_size") + 2 * number("num_attention_heads") * heads + 3 * experts
    except _Missing:
        return 0
    return request.prompt_width * values * FLOAT_BYTES


def experts_in_flight_bytes(request: PlanRequest) -> int:
    """Return the buffers for experts in flight: one size serves every layer, so the widest sets it."""
    return EXPERTS_IN_FLIGHT * request.geometry.widest


def least_runtime_bytes(request: PlanRequest) -> int:
    """Return what the runtime takes at least: its fixed part, experts in flight, and the KV cache."""
    return FIXED_RUNTIME_BYTES + experts_in_flight_bytes(request) + (kv_bytes(request) or 0)


@rule("runtime holds experts in flight")
def runtime_holds_experts_in_flight(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The runtime has its fixed part, and buffers for 64 experts of the widest layer."""
    runtime = stated(statement.runtime_bytes, "the runtime")
    buffers = experts_in_flight_bytes(request)
    if runtime < FIXED_RUNTIME_BYTES + buffers:
        yield (
            f"runtime of {runtime} B is less than {FIXED_RUNTIME_BYTES + buffers} B, its fixed "
            f"part and {EXPERTS_IN_FLIGHT} of the widest expert"
        )
    part = statement.steps.get(IN_FLIGHT)
    if part is not None and part < buffers:
        yield f"{part} B for {EXPERTS_IN_FLIGHT} experts in flight, which take {buffers} B"


@rule("runtime holds the KV cache", applies=has_known_kv)
def runtime_holds_kv_cache(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The runtime has room for a KV cache of the whole context in every KV slot."""
    runtime, least = stated(statement.runtime_bytes, "the runtime"), least_runtime_bytes(request)
    if runtime < least:
        yield (
            f"runtime of {runtime} B, and with a KV cache of {kv_bytes(request)} B for {request.kv_slots} x "
            f"{request.context} tokens in {request.kv_type} it takes at least {least} B"
        )


def glm_runtime_bytes(request: PlanRequest) -> int | None:
    """Return the whole runtime of a GLM model, None for another family."""
    if _family(request) != "glm" or not has_known_kv(request):
        return None
    number = _number_of(request)
    try:
        indexed = request.geometry.index_layers * number("index_head_dim")
        heads = number("num_attention_heads") * (number("qk_nope_head_dim") + number("v_head_dim"))
    except _Missing:
        return None
    index = request.kv_slots * request.context * indexed * KV_BLOCK_BYTES[request.kv_type] // KV_BLOCK_VALUES
    return least_runtime_bytes(request) + index + request.context * heads * FLOAT_BYTES


def is_glm(request: PlanRequest) -> bool:
    """Tell whether the whole runtime of the model is known here."""
    return glm_runtime_bytes(request) is not None


@rule("runtime is not overstated", applies=is_glm)
def runtime_is_not_overstated(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The runtime is within 10 % of its parts: a cache of narrower values takes less."""
    runtime, known = stated(statement.runtime_bytes, "the runtime"), glm_runtime_bytes(request) or 0
    if runtime > known * (100 + TOLERATED_PERCENT) // 100:
        yield (
            f"runtime of {runtime} B, and for {request.kv_slots} x {request.context} tokens in "
            f"{request.kv_type} its parts take {known} B"
        )


@rule("parts of the runtime add up")
def runtime_parts_add_up(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """The runtime is the sum of the parts that the plan lists."""
    runtime = stated(statement.runtime_bytes, "the runtime")
    parts = [count or 0 for name, count in statement.steps.items() if name.startswith(RUNTIME_PART)]
    total = stated(sum(parts) if parts else None, "the parts of its runtime")
    if total != runtime:
        yield f"runtime of {runtime} B, and its parts are {total} B"
