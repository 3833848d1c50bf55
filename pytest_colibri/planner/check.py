"""What holds for every plan, whoever made it: computed from its figures, its request and its host alone.

Nothing here asks the planner again, so that a rule which the planner breaks is not broken here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from pytest_colibri.planner.explain import IN_FLIGHT, RUNTIME_PART
from pytest_colibri.planner.plan import DeviceShare, Plan
from pytest_colibri.units import GB, Figure, format_bytes, smallest

RESERVE_PERCENT = 12
FIXED_RUNTIME_BYTES = 3_700_000_000
EXPERTS_IN_FLIGHT = 64
DEVICE_RESERVE_BYTES = 2 * GB
HIT_RATE_STEP = 0.0001
AFFINITY = ("OMP_PROC_BIND", "OMP_PLACES")
MASKS = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
CUDA_RESIDENTS = {"CUDA_DENSE": "dense", "COLI_CUDA_ATTN": "attention"}
RESIDENTS = {
    "vulkan": {"COLI_VK_DENSE": "dense", "COLI_VK_ATTN": "attention"},
    "cuda": CUDA_RESIDENTS,
    "rocm": CUDA_RESIDENTS,
}
GPU_VARIABLES = frozenset(
    {
        "COLI_CUDA",
        "COLI_GPU",
        "COLI_GPUS",
        "COLI_METAL",
        "COLI_VULKAN",
        "COLI_VK_EXPERTS",
        "CUDA_DEVICE_ORDER",
        "CUDA_EXPERT_GB",
    }
)


def plan_violations(plan: Plan) -> tuple[str, ...]:
    """Return a sentence with both figures for each rule that the plan breaks; empty for a sound plan."""
    return tuple(broken_rules(plan).values())


def broken_rules(plan: Plan) -> Mapping[str, str]:
    """Map the name of each broken rule to the sentence that says how."""
    return {name: "; ".join(faults) for name, rule in RULES.items() if (faults := list(rule(plan)))}


def limit_is_physical(plan: Plan) -> Iterator[str]:
    """The limit is no more than the host, or the control group, leaves."""
    physical = plan.request.host.memory.limit
    if physical.bytes is None:
        if plan.limit.bytes is not None:
            yield f"limit of {plan.limit} where the host's is unknown: {physical.source}"
    elif plan.limit.bytes is None or plan.limit.bytes > physical.bytes:
        yield f"limit of {plan.limit} exceeds {physical}"


def reserve_is_kept(plan: Plan) -> Iterator[str]:
    """The plan leaves 12 % of the limit; only an explicit RAM budget, with no shared device, takes of it."""
    limit = plan.request.host.memory.limit.bytes
    may_shrink = plan.request.ram_bytes is not None and not _shared(plan)
    least = 0 if limit is None or may_shrink else limit * RESERVE_PERCENT // 100
    if plan.reserve_bytes < least:
        yield f"reserve of {plan.reserve_bytes} B is less than {least} B of the limit of {plan.limit}"


def pool_is_counted_once(plan: Plan) -> Iterator[str]:
    """The RAM budget and what devices take from the same memory stay within limit less reserve."""
    limit = plan.request.host.memory.limit.bytes
    if limit is None:
        return
    taken = plan.ram_budget_bytes + sum(
        share.taken_bytes + share.reserve_bytes for share in _shared(plan) if share.taken_bytes
    )
    room = limit - plan.reserve_bytes
    if taken > room:
        yield (
            f"RAM and VRAM budgets take {taken} B ({format_bytes(taken)}) of one pool that has "
            f"{room} B ({format_bytes(room)}): limit {limit} B less reserve {plan.reserve_bytes} B"
        )


def unknown_drives_no_tier(plan: Plan) -> Iterator[str]:
    """A device whose usable memory is unknown takes nothing; nor does one in a pool of unknown size."""
    for share in plan.devices:
        name = share.accelerator.identity.name
        if share.usable.bytes is None and share.taken_bytes:
            yield f"{name} takes {share.taken_bytes} B, and its usable memory is unknown"
        free = share.accelerator.free.bytes
        if free is None and share.accelerator.pool != "unified" and share.usable.bytes is not None:
            yield f"{name} has {share.usable.bytes} B usable, and its free memory is unknown"
    if plan.request.host.memory.limit.bytes is None:
        for share in _shared(plan):
            if share.taken_bytes:
                name = share.accelerator.identity.name
                yield f"{name} takes {share.taken_bytes} B from a pool of unknown size"


def devices_keep_their_reserve(plan: Plan) -> Iterator[str]:
    """Usable is at most free - reserve, of one heap; a device with memory of its own keeps at least 2 GB."""
    for share in plan.devices:
        name = share.accelerator.identity.name
        free = smallest(share.accelerator.free, share.accelerator.total, _largest_heap(share)).bytes
        if share.accelerator.pool != "unified" and share.reserve_bytes < DEVICE_RESERVE_BYTES:
            yield f"{name} reserves {share.reserve_bytes} B, less than {DEVICE_RESERVE_BYTES} B"
        if free is not None and share.usable.bytes is not None:
            room = max(0, free - share.reserve_bytes)
            if share.usable.bytes > room:
                yield f"{name} has {share.usable.bytes} B usable, more than free less reserve, {room} B"


def staging_is_told(plan: Plan) -> Iterator[str]:
    """Where the CPU can write a part only of a card's own memory, a warning names both figures."""
    for share in plan.devices:
        device, local = share.accelerator, _largest_heap(share).bytes
        if local is None or not device.memory_types:
            continue
        windows = {kind.heap for kind in device.memory_types if kind.device_local and kind.host_visible}
        direct = max((heap.size_bytes for heap in device.heaps if heap.index in windows), default=0)
        figures = format_bytes(direct), format_bytes(local)
        told = any(all(figure in line for figure in figures) for line in plan.warnings)
        if direct < local and not told:
            yield f"{device.identity.name}: {figures[0]} of {figures[1]} are host-visible, untold"


def devices_were_asked_for(plan: Plan) -> Iterator[str]:
    """Only devices of the request give memory, each once."""
    asked = list(plan.request.accelerators)
    for share in plan.devices:
        if share.accelerator in asked:
            asked.remove(share.accelerator)
        else:
            allowed = ", ".join(device.identity.name for device in plan.request.accelerators) or "none"
            yield f"{share.accelerator.identity.name} plans, and the devices asked for are: {allowed}"


def devices_are_visible(plan: Plan) -> Iterator[str]:
    """Under a mask, the engine's number of a device is the place of the device in that mask."""
    request = plan.request
    names = MASKS.get(request.backend, ())
    mask = next((request.environment[name] for name in names if name in request.environment), None)
    for share in plan.devices:
        identity = share.accelerator.identity
        if mask is None:
            if share.number != identity.index:
                yield f"{identity.name} has index {identity.index}, and the plan calls it {share.number}"
            continue
        entries = [entry.strip().lower() for entry in mask.split(",")]
        entry = entries[share.number] if 0 <= share.number < len(entries) else ""
        start = entry.removeprefix("gpu-").replace("-", "")
        by_uuid = identity.uuid is not None and start != "" and identity.uuid.startswith(start)
        if entry != str(identity.index) and not by_uuid:
            yield f"{identity.name} is number {share.number} of the plan, and the mask is {mask!r}"


def budgets_fit_devices(plan: Plan) -> Iterator[str]:
    """What a device takes is at most its usable memory; the budgets together are the VRAM budget."""
    for share in plan.devices:
        if share.usable.bytes is not None and share.taken_bytes > share.usable.bytes:
            name = share.accelerator.identity.name
            yield f"{name} takes {share.taken_bytes} B, and has {share.usable.bytes} B usable"
    total = sum(share.budget_bytes for share in plan.devices)
    if total != plan.vram_budget_bytes:
        yield f"VRAM budget of {plan.vram_budget_bytes} B, and the devices give {total} B"


def residents_are_charged(plan: Plan) -> Iterator[str]:
    """Dense weights and attention that the user puts on the devices are charged there, and nothing else."""
    asked = {
        part
        for name, part in RESIDENTS.get(plan.request.backend, {}).items()
        if plan.request.environment.get(name, "").strip() not in ("", "0")
    }
    steps = {step.name: step.figure.bytes or 0 for step in plan.steps}
    sizes = {
        "dense": plan.request.geometry.dense_bytes,
        "attention": steps.get(f"{RUNTIME_PART}KV cache", 0)
        + steps.get(f"{RUNTIME_PART}attention workspace", 0),
    }
    needed = sum(sizes[part] for part in asked) if plan.devices else 0
    if plan.resident_bytes != needed:
        parts = " and ".join(sorted(asked)) or "nothing"
        yield f"{parts} goes to the devices, {needed} B, and {plan.resident_bytes} B are charged"


def explicit_budgets_hold(plan: Plan) -> Iterator[str]:
    """An explicit budget is never exceeded; one that is not met has a warning that names both figures."""
    pairs = {
        "RAM": (plan.request.ram_bytes, plan.ram_budget_bytes),
        "VRAM": (plan.request.vram_bytes, plan.vram_budget_bytes + plan.resident_bytes),
    }
    for name, (asked, granted) in pairs.items():
        if asked is None:
            continue
        if granted > asked:
            yield f"{name} budget of {granted} B exceeds the {asked} B asked for"
        told = any(f"{asked} B" in line and f"{granted} B" in line for line in plan.warnings)
        if granted < asked and not told:
            yield f"{name} budget of {granted} B instead of {asked} B, and no warning names both"
    slots = plan.request.slots_per_layer
    if slots is not None and plan.slots_per_layer > slots:
        yield f"{plan.slots_per_layer} slots per layer exceed the {slots} asked for"


def ram_budget_holds_its_parts(plan: Plan) -> Iterator[str]:
    """Dense weights, runtime and cache fit the RAM budget."""
    parts = plan.dense_bytes + plan.runtime_bytes + plan.cache_bytes
    if parts > plan.ram_budget_bytes:
        yield f"dense weights, runtime and cache take {parts} B of a RAM budget of {plan.ram_budget_bytes} B"
    dense = plan.request.geometry.dense_bytes
    if plan.dense_bytes != dense:
        yield f"dense weights counted as {plan.dense_bytes} B, and the container has {dense} B"


def runtime_holds_experts_in_flight(plan: Plan) -> Iterator[str]:
    """The runtime has its fixed part, and buffers for 64 experts of the widest layer."""
    buffers = EXPERTS_IN_FLIGHT * plan.request.geometry.widest
    if plan.runtime_bytes < FIXED_RUNTIME_BYTES + buffers:
        yield (
            f"runtime of {plan.runtime_bytes} B is less than {FIXED_RUNTIME_BYTES + buffers} B, its fixed "
            f"part and {EXPERTS_IN_FLIGHT} of the widest expert"
        )
    for step in plan.steps:
        if step.name == IN_FLIGHT and (step.figure.bytes or 0) < buffers:
            yield f"{step.figure.bytes} B for {EXPERTS_IN_FLIGHT} experts in flight, which take {buffers} B"


def runtime_parts_add_up(plan: Plan) -> Iterator[str]:
    """The runtime is the sum of the parts that the plan lists, if it lists any."""
    parts = [step.figure.bytes or 0 for step in plan.steps if step.name.startswith(RUNTIME_PART)]
    if parts and sum(parts) != plan.runtime_bytes:
        yield f"runtime of {plan.runtime_bytes} B, and its parts are {sum(parts)} B"


def slots_fit_cache(plan: Plan) -> Iterator[str]:
    """The slots of all sparse layers, each as wide as its layer, fit the cache."""
    geometry = plan.request.geometry
    needed = plan.slots_per_layer * geometry.bytes_per_slot
    if needed > plan.cache_bytes:
        yield f"{plan.slots_per_layer} slots per layer need {needed} B of a cache of {plan.cache_bytes} B"
    most = max((len(layer.expert_bytes) for layer in geometry.layers), default=0)
    if plan.slots_per_layer > most:
        yield f"{plan.slots_per_layer} slots per layer, and the largest layer has {most} experts"


def every_layer_has_a_slot(plan: Plan) -> Iterator[str]:
    """A model with sparse layers cannot run without one slot in each."""
    layers = len(plan.request.geometry.layers)
    if layers and plan.slots_per_layer < 1:
        yield f"{plan.slots_per_layer} slots per layer, and {layers} sparse layers need at least 1"


def hot_experts_exist(plan: Plan) -> Iterator[str]:
    """Hot experts are experts of the model, each once, with exactly the bytes that the plan counts."""
    sizes = {
        (layer.index, expert): size
        for layer in plan.request.geometry.layers
        for expert, size in layer.expert_bytes.items()
    }
    known = set(plan.hot_experts) & sizes.keys()
    if len(known) != len(plan.hot_experts):
        yield f"{len(plan.hot_experts)} hot experts, of which {len(known)} are different ones of the model"
    total = sum(sizes[expert] for expert in known)
    if total != plan.hot_bytes:
        yield f"hot experts counted as {plan.hot_bytes} B, and they have {total} B"


def hot_experts_are_ranked(plan: Plan) -> Iterator[str]:
    """The tier holds the most used experts, in rank order."""
    usage = plan.request.usage
    keys = [(-usage.get(expert, 0), expert) for expert in plan.hot_experts]
    for earlier, later in pairwise(keys):
        if earlier > later:
            yield (
                f"expert {later[1]} with {-later[0]} uses is ranked after "
                f"{earlier[1]} with {-earlier[0]} uses"
            )
            return


def hot_experts_fit(plan: Plan) -> Iterator[str]:
    """The hot experts fit the VRAM budget."""
    if plan.hot_bytes > plan.vram_budget_bytes:
        yield f"hot experts of {plan.hot_bytes} B exceed the VRAM budget of {plan.vram_budget_bytes} B"


def residency_is_complete(plan: Plan) -> Iterator[str]:
    """Hot, warm and cold bytes are the expert bytes; warm ones fit the cache; none is negative."""
    parts = {"hot": plan.hot_bytes, "warm": plan.warm_bytes, "cold": plan.cold_bytes}
    total, experts = sum(parts.values()), plan.request.geometry.expert_bytes
    if total != experts:
        yield f"hot, warm and cold experts are {total} B, and the model has {experts} B"
    if plan.warm_bytes > plan.cache_bytes:
        yield f"warm experts of {plan.warm_bytes} B exceed the cache of {plan.cache_bytes} B"
    for name, count in parts.items():
        if count < 0:
            yield f"{name} experts are {count} B, less than 0 B"


def hit_rate_matches(plan: Plan) -> Iterator[str]:
    """The hit rate is the share of hot and warm bytes, 1.0 without experts."""
    experts = plan.request.geometry.expert_bytes
    expected = (plan.hot_bytes + plan.warm_bytes) / experts if experts else 1.0
    if not 0.0 <= plan.hit_rate <= 1.0 or abs(plan.hit_rate - expected) > HIT_RATE_STEP:
        yield f"hit rate of {plan.hit_rate}, and hot and warm experts are {expected:.4f} of all"


def bottleneck_matches(plan: Plan) -> Iterator[str]:
    """A plan with cold experts is bound by the disk, and no other is."""
    if (plan.cold_bytes > 0) != (plan.bottleneck == "disk"):
        yield f"limited by {plan.bottleneck}, with {plan.cold_bytes} B of experts on the disk"


def environment_keeps_budgets(plan: Plan) -> Iterator[str]:
    """What is exported is no more than what is planned; the user's own values are his."""
    user, exported = plan.request.environment, plan.environment
    bounds = {"RAM_GB": plan.ram_budget_bytes, "CUDA_EXPERT_GB": plan.vram_budget_bytes}
    for name, budget in bounds.items():
        if name in exported and name not in user and not _within(exported[name], budget):
            yield f"{name}={exported[name]} is no figure within the budget of {budget} B"
    experts = exported.get("COLI_VK_EXPERTS")
    if experts is not None and "COLI_VK_EXPERTS" not in user and experts != str(len(plan.hot_experts)):
        yield f"COLI_VK_EXPERTS={experts}, and {len(plan.hot_experts)} hot experts are planned"


def environment_keeps_threads(plan: Plan) -> Iterator[str]:
    """One thread for each physical core, and no affinity."""
    user, exported = plan.request.environment, plan.environment
    cores = plan.request.host.processor.physical_cores
    threads = exported.get("OMP_NUM_THREADS")
    if "OMP_NUM_THREADS" not in user and threads != str(cores):
        yield f"OMP_NUM_THREADS={threads}, and there are {cores} physical cores"
    for name in AFFINITY:
        if name in exported and name not in user:
            yield f"{name}={exported[name]} is exported; thread affinity must be left alone"


def environment_keeps_user_values(plan: Plan) -> Iterator[str]:
    """What the user set explicitly wins."""
    for name, value in plan.request.environment.items():
        if plan.environment.get(name) != value:
            yield f"{name}={plan.environment.get(name)} instead of {value}, which the user set"


def environment_exports_no_hints(plan: Plan) -> Iterator[str]:
    """A name that starts with ``_`` is a hint for a person."""
    for name in plan.environment:
        if name.startswith("_") and name not in plan.request.environment:
            yield f"the hint {name}={plan.environment[name]} is exported"


def environment_asks_for_planned_devices(plan: Plan) -> Iterator[str]:
    """A GPU is asked for only where a device plans, and CUDA indices name planned devices only."""
    user, exported = plan.request.environment, plan.environment
    usable = {str(share.number) for share in plan.devices if share.usable.bytes}
    asking = sorted(name for name in GPU_VARIABLES & exported.keys() if name not in user)
    if asking and not usable:
        yield f"{', '.join(asking)} exported, and no device with usable memory plans"
    for name in {"COLI_GPU", "COLI_GPUS"} & set(asking):
        if not set(exported[name].split(",")) <= usable:
            yield f"{name}={exported[name]}, and the usable devices are {', '.join(sorted(usable)) or 'none'}"


def _largest_heap(share: DeviceShare) -> Figure:
    """Return the largest heap of a device with memory of its own: heaps are not to be summed."""
    sizes = [heap.size_bytes for heap in share.accelerator.heaps if heap.device_local]
    own = share.accelerator.pool == "discrete"
    return Figure(max(sizes) if sizes and own else None, "device-local heaps")


def _shared(plan: Plan) -> list[DeviceShare]:
    return [share for share in plan.devices if share.accelerator.pool != "discrete"]


def _within(exported_gb: str, budget_bytes: int) -> bool:
    whole, _, decimals = exported_gb.partition(".")
    if not (whole.isascii() and whole.isdigit()) or not (decimals == "" or decimals.isdigit()):
        return False
    return int(whole) * GB + int(decimals[:9].ljust(9, "0")) <= budget_bytes


Rule = Callable[[Plan], Iterator[str]]

RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        limit_is_physical,
        reserve_is_kept,
        pool_is_counted_once,
        unknown_drives_no_tier,
        devices_keep_their_reserve,
        staging_is_told,
        devices_were_asked_for,
        devices_are_visible,
        budgets_fit_devices,
        residents_are_charged,
        explicit_budgets_hold,
        ram_budget_holds_its_parts,
        runtime_holds_experts_in_flight,
        runtime_parts_add_up,
        slots_fit_cache,
        every_layer_has_a_slot,
        hot_experts_exist,
        hot_experts_are_ranked,
        hot_experts_fit,
        residency_is_complete,
        hit_rate_matches,
        bottleneck_matches,
        environment_keeps_budgets,
        environment_keeps_threads,
        environment_keeps_user_values,
        environment_exports_no_hints,
        environment_asks_for_planned_devices,
    )
}
