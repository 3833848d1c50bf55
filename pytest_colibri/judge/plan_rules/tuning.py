"""Rules about the variables that make an engine faster, or slower where they do not belong."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.environment import exported
from pytest_colibri.judge.plan_rules.found import asks_for_gpu, working_devices
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner.plan import PlanRequest

LEAST_HIT_RATE_FOR_DRAFTS = 0.90


def wants_drafts(request: PlanRequest) -> bool:
    """Tell whether the user asks for drafts on CUDA, and leaves their number to the engine."""
    return request.environment.get("COLI_CUDA_MTP") == "1" and "DRAFT" not in request.environment


def leaves_drafts_open(request: PlanRequest) -> bool:
    """Tell whether the user says nothing on drafts."""
    return not wants_drafts(request) and "DRAFT" not in request.environment


def may_use_cuda(request: PlanRequest) -> bool:
    """Tell whether the pipeline of the CUDA and HIP backend is for the planner to choose."""
    cuda = request.backend in ("cuda", "rocm") and asks_for_gpu(request)
    return cuda and "COLI_CUDA_PIPE" not in request.environment


def threads_may_spin(request: PlanRequest) -> bool:
    """Tell whether spinning threads would take bandwidth from a device that shares it, or from staging."""
    chosen = "COLI_NO_OMP_TUNE" in request.environment
    return request.backend in ("metal", "vulkan") and asks_for_gpu(request) and not chosen


@rule("drafts are off where they cost", applies=leaves_drafts_open)
def draft_is_off(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Drafts cost 42 % where computing bounds the run, and 32 % where the disk does at a low hit rate."""
    bottleneck, rate = _bottleneck(statement), _hit_rate(statement, request)
    draft = exported(statement, request, "DRAFT")
    slow = bottleneck == "disk" and rate < LEAST_HIT_RATE_FOR_DRAFTS
    if (bottleneck == "compute" or slow) and draft != "0":
        yield f"DRAFT={draft}, with a run bound by {bottleneck} at a hit rate of {rate}"


def _bottleneck(statement: PlanStatement) -> str:
    """Return what bounds the run by where the experts are, which plans without a word for it state too."""
    if stated(statement.cold_bytes, "the bytes of cold experts") > 0:
        return "disk"
    warm = stated(statement.warm_bytes, "the bytes of warm experts")
    return "mixed" if warm > 0 and working_devices(statement) else "compute"


def _hit_rate(statement: PlanStatement, request: PlanRequest) -> float:
    """Return the share of expert bytes that need no disk, to the 4 digits of plans."""
    experts, cold = request.geometry.expert_bytes, stated(statement.cold_bytes, "the bytes of cold experts")
    return round((experts - cold) / experts, 4) if experts else 1.0


@rule("drafts asked for are left to the engine", applies=wants_drafts)
def draft_is_left_to_engine(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """With COLI_CUDA_MTP=1 the engine chooses their number only where DRAFT is not set."""
    draft = exported(statement, request, "DRAFT")
    if draft is not None:
        yield f"DRAFT={draft} is exported, and the user set COLI_CUDA_MTP=1"


@rule("the CUDA pipeline fits the devices", applies=may_use_cuda)
def cuda_pipe_fits_devices(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """COLI_CUDA_PIPE is 1 for one device that works, 2 for several, and not set without one."""
    working = len(working_devices(statement))
    expected = None if not working else "1" if working == 1 else "2"
    pipe = exported(statement, request, "COLI_CUDA_PIPE")
    if pipe != expected:
        yield f"COLI_CUDA_PIPE={pipe}, and {working} devices work, which takes {expected}"


@rule("reads overlap where the CPU does both")
def reads_overlap(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """PIPE=1 where no device works and the disk bounds the run."""
    bottleneck = _bottleneck(statement)
    pipe = statement.environment.get("PIPE", request.environment.get("PIPE"))
    if bottleneck == "disk" and not working_devices(statement) and pipe is None:
        yield f"PIPE={pipe}, with a run on the CPU that is bound by the {bottleneck}"


@rule("idle threads do not spin", applies=threads_may_spin)
def threads_do_not_spin(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """COLI_NO_OMP_TUNE=1 where a device works: spinning took expert bandwidth from 28 to 5 GB/s."""
    value = exported(statement, request, "COLI_NO_OMP_TUNE")
    if working_devices(statement) and value != "1":
        yield f"COLI_NO_OMP_TUNE={value}, and {working_devices(statement)[0].name} works beside the CPU"


@rule("only what fits is pinned")
def pins_only_what_fits(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """PIN_GB=all only where no expert stays on the disk and no device takes any."""
    if exported(statement, request, "PIN_GB") != "all":
        return
    working = len(working_devices(statement))
    cold = stated(statement.cold_bytes, "the bytes of cold experts")
    if cold or working:
        yield f"PIN_GB=all, with {cold} B of experts on the disk and {working} devices that work"
