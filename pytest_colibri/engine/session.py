"""One run, from the request to the last event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from pytest_colibri.container.geometry import Geometry
from pytest_colibri.container.route_trace import RouteTraceWriter
from pytest_colibri.container.safetensors import open_container
from pytest_colibri.container.scan import geometry_of
from pytest_colibri.container.usage import USAGE_FILE, read_usage
from pytest_colibri.engine.config import ModelConfig, parse_config
from pytest_colibri.engine.device import DeviceCounts, ExpertDevice
from pytest_colibri.engine.events import Events
from pytest_colibri.engine.forward import Model, RoutingListener
from pytest_colibri.engine.request import Request
from pytest_colibri.engine.router import Ids
from pytest_colibri.engine.settings import Settings, read_settings
from pytest_colibri.engine.shaders import PIECES
from pytest_colibri.engine.tiers import ExpertTiers
from pytest_colibri.engine.vulkan import open_vulkan
from pytest_colibri.engine.weights import ExpertKey, ExpertLayout, Floats, WeightReader, expert_layouts
from pytest_colibri.errors import UsageError
from pytest_colibri.units import format_bytes

PROTOCOL = 1
NAME = "reference"


def run(request: Request, environment: Mapping[str, str], events: Events) -> None:
    """Answer a request with events. Raises ColibriError where it cannot be served as asked."""
    settings = read_settings(environment)
    events.emit("start", protocol=PROTOCOL, engine=NAME, backend=settings.backend)
    with ExitStack() as resources:
        files = open_model(request, resources)
        slots = min(request.slots_per_layer, files.config.router.experts)
        cache_bytes = slots * files.geometry.bytes_per_slot
        check_ram(files.geometry, cache_bytes, settings)
        device = open_device(request, settings, files.config, resources)
        tiers = ExpertTiers(files.reader, files.layouts, slots)
        budget = len(files.layouts) if settings.device_experts is None else settings.device_experts
        session = Session(request, budget, events, tiers, device)
        session.claim_device()
        events.emit("claim", claim="ram_tier", slots_per_layer=slots, bytes=cache_bytes)
        listener = _trace(request, resources)
        with session.phase("load"):
            model = Model(files.reader, files.config, tiers, device, listener)
        session.fill_device(files.layouts, rank_by_usage(request, files.layouts, events))
        session.answer(model)
    events.emit("end")


@dataclass(frozen=True)
class ModelFiles:
    """An opened model folder; headers are read and checked, weights are not read yet."""

    config: ModelConfig
    geometry: Geometry
    reader: WeightReader
    layouts: Mapping[ExpertKey, ExpertLayout]


def open_model(request: Request, resources: ExitStack) -> ModelFiles:
    """Open the model and hold the request against it. Raises UsageError where they do not go together."""
    container = resources.enter_context(open_container(request.model))
    config = parse_config(container.config)
    check_request(request, config)
    geometry = geometry_of(container)
    reader = WeightReader(container, config)
    return ModelFiles(config, geometry, reader, expert_layouts(reader, geometry, config))


def check_request(request: Request, config: ModelConfig) -> None:
    """Refuse tokens out of the vocabulary, and a run that is longer than the model's context."""
    outside = [token for token in (*request.prompt, *request.score) if token >= config.vocabulary]
    if outside:
        raise UsageError(
            f"token id {outside[0]} is not in the vocabulary: ids are 0 to {config.vocabulary - 1}"
        )
    if request.context > config.longest_context:
        raise UsageError(
            f"the run needs {request.context} positions; the model is computed for {config.longest_context}, "
            "the smaller of max_position_embeddings and index_topk"
        )


def check_ram(geometry: Geometry, cache_bytes: int, settings: Settings) -> None:
    """Refuse to start where dense weights and the full cache would exceed RAM_GB."""
    needed = geometry.dense_bytes + cache_bytes
    if settings.ram_bytes is not None and needed > settings.ram_bytes:
        raise UsageError(
            f"dense weights ({format_bytes(geometry.dense_bytes)}) and the expert cache "
            f"({format_bytes(cache_bytes)}) need {format_bytes(needed)}; RAM_GB allows "
            f"{format_bytes(settings.ram_bytes)}: lower slots_per_layer or raise RAM_GB"
        )


def open_device(
    request: Request, settings: Settings, config: ModelConfig, resources: ExitStack
) -> ExpertDevice | None:
    """Open the device that the request names; None on the CPU backend. Never another one."""
    if settings.backend == "vulkan":
        device = open_vulkan(request.device, request.widest_batch * config.router.experts_per_token)
        resources.callback(device.close)
        return device
    if request.device is not None:
        raise UsageError(f"the request names the device {request.device}, but COLI_VULKAN=1 is not set")
    return None


def rank_by_usage(
    request: Request, layouts: Mapping[ExpertKey, ExpertLayout], events: Events
) -> list[ExpertKey]:
    """Return the experts that were ever used, the most used first; ties by layer and expert."""
    path = request.usage or request.model / USAGE_FILE
    if request.usage is None and not path.exists():
        return []
    history = {ExpertKey(*key): count for key, count in read_usage(path).items() if count}
    unknown = len(history.keys() - layouts.keys())
    if unknown:
        events.note(f"{path.name} lists {unknown} experts that this model does not have")
    return sorted(history.keys() & layouts.keys(), key=lambda key: (-history[key], key))


def _trace(request: Request, resources: ExitStack) -> RoutingListener | None:
    if request.route_trace is None:
        return None
    try:
        return RouteTrace(resources.enter_context(RouteTraceWriter(request.route_trace)))
    except OSError as error:
        raise UsageError(f"cannot write route_trace {request.route_trace}: {error.strerror}") from None


class RouteTrace:
    """Writes every routing decision to a trace file."""

    def __init__(self, writer: RouteTraceWriter) -> None:
        self._writer = writer

    def routed(self, layer: int, chosen: Ids, weights: Floats) -> None:
        """Write one batch of a layer."""
        rows = zip(chosen.tolist(), weights.tolist(), strict=True)
        self._writer.write(layer, [list(zip(*row, strict=True)) for row in rows])


class Session:
    """Says what it does: phases with their counters, claims, retractions, tokens."""

    def __init__(
        self,
        request: Request,
        budget_experts: int,
        events: Events,
        tiers: ExpertTiers,
        device: ExpertDevice | None,
    ) -> None:
        self._request = request
        self._events = events
        self._tiers = tiers
        self._device = device
        self._budget_experts = budget_experts
        self._tier_announced = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase, and after its end what was served and executed in it."""
        self._events.emit("phase", phase=name, state="begin")
        yield
        self._events.emit("phase", phase=name, state="end")
        counts = self._device.take_counts() if self._device else DeviceCounts({}, 0)
        self._events.emit(
            "telemetry",
            phase=name,
            tiers={tier: asdict(count) for tier, count in self._tiers.take_counts().items()},
            dispatches=dict(counts.dispatches),
            submits=counts.submits,
        )

    def claim_device(self) -> None:
        """Claim the device, and the tier on it unless its budget is zero."""
        if self._device is None:
            return
        identity = asdict(self._device.identity)
        self._events.emit("claim", claim="device", device=identity)
        self._tier_announced = self._budget_experts > 0 and self._request.vram_bytes > 0
        if self._tier_announced:
            self._events.emit(
                "claim",
                claim="expert_tier",
                tier="vram",
                device=identity,
                pieces=PIECES,
                budget_experts=self._budget_experts,
            )

    def fill_device(self, layouts: Mapping[ExpertKey, ExpertLayout], ranked: list[ExpertKey]) -> None:
        """Upload the hot experts that the budgets allow, and take the tier's claim back if there are none."""
        if self._device is None or not self._tier_announced:
            return
        hot = [(key, layouts[key]) for key in ranked[: self._budget_experts]]
        with self.phase("fill"):
            residency = self._device.fill(hot, self._request.vram_bytes, self._tiers.read)
        self._tiers.keep_on_device(residency.experts)
        if not residency.experts:
            self._events.emit("retract", claim="expert_tier", reason=self._why_empty(hot))
            return
        self._events.emit(
            "claim",
            claim="resident",
            tier="vram",
            device=asdict(self._device.identity),
            experts=residency.experts,
            bytes=residency.bytes,
        )

    def _why_empty(self, hot: list[tuple[ExpertKey, ExpertLayout]]) -> str:
        if not hot:
            return "no usage history: it is not known which experts are hot, and none is on the device"
        return f"the hottest expert does not fit into {format_bytes(self._request.vram_bytes)}"

    def answer(self, model: Model) -> None:
        """Score or generate, as the request asks."""
        if self._request.score:
            self._score(model)
        else:
            self._generate(model)

    def _score(self, model: Model) -> None:
        tokens = (*self._request.prompt, *self._request.score)
        with self.phase("score"):
            best = model.best_tokens(model.run(tokens, 0, model.new_caches(len(tokens))))
        self._events.emit("scores", ids=best)

    def _generate(self, model: Model) -> None:
        prompt = self._request.prompt
        caches = model.new_caches(self._request.context)
        with self.phase("prefill"):
            token = model.best_tokens(model.run(prompt, 0, caches)[-1:])[0]
            self._events.emit("token", position=len(prompt), id=token)
        if self._request.new_tokens == 1:
            return
        with self.phase("decode"):
            for position in range(len(prompt), self._request.context):
                token = model.best_tokens(model.run([token], position, caches))[0]
                self._events.emit("token", position=position + 1, id=token)
