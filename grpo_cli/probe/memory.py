"""How much memory a training needs on each device, part by part, each with its formula.

Owns the sums. Sizes come from `models/shape.py`, or from a test; nothing is loaded or measured here.

Source: the loss of TRL 1.16 (`trl.kernels.chunked_logprob`), which projects tiles of tokens onto the
vocabulary instead of holding `batch × length × vocabulary` logits, and `GRPOTrainer`, which samples
one whole generation batch at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from grpo_cli.checks.fast import settle_fast
from grpo_cli.checks.settings import read_setting
from grpo_cli.fast import output_head as head
from grpo_cli.models.shape import ModelShape
from grpo_cli.probe.device import Device
from grpo_cli.recipe.fast import find_large_masks
from grpo_cli.recipe.launch import KEEPS_FLOAT32, SHARED_WEIGHTS, Strategy
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import format_bytes, format_count

Moment = Literal["always", "sampling", "loss", "update"]
"""When a part is held: all the time, while completions are sampled, when the backward pass begins,
or when it has ended and the weights change."""

_CPU_ADAPTER_HOLES = 1.25
"""How much more than the kept tensors the forward pass of adapters takes on a CPU: each one adds up
three tensors that are dropped again, and leaves their holes. Measured, 1.0 to 1.7."""
_SAMPLING_COPIES = 4
"""float32 copies of the last logits while one token is drawn (temperature, softmax, sorting)."""
_OPTIMIZER_STATES: dict[str, tuple[float, float]] = {
    "adafactor": (0.0, 0.02),
    "adamw_8bit": (2.0, 0.0),
    "adamw_bnb_8bit": (2.0, 0.0),
    "paged_adamw_8bit": (2.0, 0.0),
    "lion_32bit": (0.0, 1.0),
    "lion_8bit": (1.0, 0.0),
    "sgd": (0.0, 0.0),
}
"""(bytes for each trained weight, multiples of the trained weights' own size)."""
_ADAM = (0.0, 2.0)
_SHARED: dict[str, frozenset[Strategy]] = {
    "weights": SHARED_WEIGHTS,
    "gradients": SHARED_WEIGHTS | {"zero2"},
    "states": KEEPS_FLOAT32,
}
"""What each process holds its share of, and with which strategies."""


@dataclass(frozen=True, kw_only=True)
class MemoryInputs:
    """The settings that decide the memory of one device."""

    micro_batch: int
    """`per_device_train_batch_size`."""
    sampled: int
    """Completions sampled at a time on this device."""
    prompt_tokens: int
    """Of the longest prompt."""
    completion_tokens: int
    accumulation: int = 1
    """`gradient_accumulation_steps`."""
    group: int | None = None
    """`num_generations`, where learning computes a prompt once for all its completions; else None."""
    budget: int | None = None
    """`max_tokens_per_micro_batch`."""
    checkpointing: bool = True
    reference: bool = False
    """Whether a second copy of the weights gives the KL term."""
    autocast: bool = False
    """Whether the model is computed in 16 bits, whatever its weights are in."""
    processes: int = 1
    strategy: Strategy = "auto"
    """How the processes share the model."""
    optimizer: str = "adamw_torch_fused"
    cpu: bool = False
    """Whether the C library's heap holds the tensors, and no Triton kernel runs."""
    adapters: bool = False
    """Whether LoRA adapters are trained."""
    vllm_bytes: int = 0
    """What a colocated vLLM takes for itself; 0 samples with transformers."""
    elsewhere: bool = False
    """Whether another process samples (a vLLM server)."""
    library_bytes: int = 0
    """What the libraries take before any model is loaded."""

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.completion_tokens


def memory_inputs(recipe: Recipe, device: Device, prompt_tokens: int, sampled: int) -> MemoryInputs:
    """The settings of a recipe that decide the memory of one process.

    Args:
        recipe: With the number of processes worked out.
        device: Where the process trains.
        prompt_tokens: Of the longest prompt that is kept.
        sampled: Completions that one process samples at a time.
    """
    colocated = recipe.generation.backend == "vllm" and recipe.generation.vllm.mode == "colocate"
    share = float(read_setting(recipe, "vllm_gpu_memory_utilization") or 0)
    processes = recipe.launch.num_processes
    fast, length = settle_fast(recipe), recipe.generation.max_completion_length
    size = recipe.training.per_device_train_batch_size, length
    shares = fast.shared_prompts and not (device.kind == "cuda" and find_large_masks(*size))
    return MemoryInputs(
        micro_batch=recipe.training.per_device_train_batch_size,
        sampled=sampled,
        prompt_tokens=prompt_tokens,
        completion_tokens=length,
        accumulation=recipe.training.gradient_accumulation_steps,
        group=recipe.generation.num_generations if shares else None,
        budget=fast.max_tokens_per_micro_batch,
        checkpointing=bool(read_setting(recipe, "gradient_checkpointing")),
        reference=bool(read_setting(recipe, "beta")) and recipe.model.lora is None,
        autocast=device.autocast,
        processes=processes if isinstance(processes, int) else 1,
        strategy=recipe.launch.strategy,
        optimizer=str(read_setting(recipe, "optim") or "adamw_torch_fused"),
        cpu=device.kind == "cpu",
        adapters=recipe.model.lora is not None,
        vllm_bytes=int(share * (device.total or 0)) if colocated else 0,
        elsewhere=recipe.generation.backend == "vllm" and not colocated,
        library_bytes=device.library_bytes,
    )


@dataclass(frozen=True)
class MemoryPart:
    """One use of memory."""

    name: str
    moment: Moment
    bytes: int
    formula: str


@dataclass(frozen=True)
class MemoryEstimate:
    """The parts, and the moment at which most is needed."""

    parts: tuple[MemoryPart, ...]
    peak_bytes: int
    moment: Moment
    """When the peak comes."""

    def largest(self) -> MemoryPart:
        """The largest part that is held at the peak."""
        held = (part for part in self.parts if part.moment in ("always", self.moment))
        return max(held, key=lambda part: part.bytes)

    def as_json(self) -> dict[str, Any]:
        """The estimate as plain values."""
        return asdict(self)


def estimate_memory(shape: ModelShape, inputs: MemoryInputs) -> MemoryEstimate:
    """The peak memory of one device, in bytes, and what it is made of."""
    parts = tuple(
        part
        for part in (
            *_held(shape, inputs),
            *_sampling(shape, inputs),
            *_loss(shape, inputs),
            *_update(shape, inputs),
        )
        if part.bytes
    )
    moments: tuple[Moment, ...] = ("sampling", "loss", "update")
    sums = {
        moment: sum(part.bytes for part in parts if part.moment in ("always", moment))
        for moment in moments
    }
    worst = max(moments, key=lambda moment: sums[moment])
    return MemoryEstimate(parts, sums[worst], worst)


@dataclass(frozen=True)
class _Held:
    """Bytes that one process holds of the model, by the strategy.

    Source: accelerate 1.15, `fsdp2_prepare_model`, which trains float32 shards; DeepSpeed 0.19,
    `runtime/zero/stage_1_and_2.py` and `stage3.py`, which keep 16-bit weights and a float32 copy in shards.
    """

    weights: int
    gradients: int
    states: int
    copy: int
    """16-bit copies of float32 weights, made for the forward pass."""
    gathered: int
    """Weights of other processes that a pass needs at a time: the embeddings, and a layer and the next."""
    whole: int
    """Weights of other processes that sampling needs."""
    share: str
    """For formulas."""


def _hold(shape: ModelShape, inputs: MemoryInputs) -> _Held:
    weights, trained = shape.weight_bytes, shape.trainable_bytes
    fixed, times = _OPTIMIZER_STATES.get(inputs.optimizer, _ADAM)
    sharded = inputs.strategy in KEEPS_FLOAT32
    zero = inputs.strategy.startswith("zero")
    if sharded and inputs.autocast:
        # Float32 shards with FSDP2; 16-bit weights with ZeRO, whose float32 copies belong to the optimizer.
        size = 2 if zero else 4
        weights += size * shape.trainable - trained
        weights = min(weights, 2 * shape.parameters) if zero else weights
        trained = size * shape.trainable
    states = int(fixed * shape.trainable + times * max(trained, 4 * shape.trainable * sharded))
    states += 4 * shape.trainable if zero else 0
    float32 = shape.trainable_bytes == 4 * shape.trainable
    copy = 2 * shape.trainable if inputs.autocast and float32 and not sharded else 0
    parts = {kind: inputs.processes for kind, names in _SHARED.items() if inputs.strategy in names}
    gathered = whole = 0
    if inputs.strategy in SHARED_WEIGHTS:
        size = 2 if inputs.autocast else shape.value_bytes
        head = shape.vocabulary * shape.hidden
        gathered = size * (head + 2 * max(shape.parameters - head, 0) // shape.layers)
        # TRL gathers them before it samples (`ds3_gather_for_generation`).
        whole = size * shape.parameters if zero and not _samples_elsewhere(inputs) else 0
    return _Held(
        weights // parts.get("weights", 1),
        trained // parts.get("gradients", 1),
        states // parts.get("states", 1),
        copy,
        gathered,
        whole,
        f", in {inputs.processes} shards" if parts else "",
    )


def _samples_elsewhere(inputs: MemoryInputs) -> bool:
    return bool(inputs.vllm_bytes or inputs.elsewhere)


def _held(shape: ModelShape, inputs: MemoryInputs) -> Iterator[MemoryPart]:
    yield MemoryPart("libraries", "always", inputs.library_bytes, "measured before loading a model")
    held = _hold(shape, inputs)
    count = f"{format_count(shape.parameters)} parameters"
    formula = f"{count}, in the precision they have{held.share}"
    yield MemoryPart("weights", "always", held.weights, formula)
    if inputs.reference:
        formula = "the weights again, since beta > 0"
        yield MemoryPart("reference model", "always", held.weights, formula)
    formula = f"{format_count(shape.trainable)} trained parameters × 2 bytes (autocast)"
    yield MemoryPart("16-bit copies", "loss", held.copy, formula)
    formula = "the embeddings and two layers, from the other processes"
    yield MemoryPart("gathered weights", "loss", held.gathered, formula)
    formula = "all weights, from the other processes (ds3_gather_for_generation)"
    yield MemoryPart("gathered weights", "sampling", held.whole, formula)
    formula = f"of {format_count(shape.trainable)} trained weights ({inputs.optimizer}){held.share}"
    yield MemoryPart("optimizer states", "always", held.states, formula)
    if inputs.processes > 1 and inputs.strategy not in KEEPS_FLOAT32:
        formula = "one more copy of the gradients (DDP)"
        yield MemoryPart("gradient exchange", "always", held.gradients, formula)
    if inputs.vllm_bytes:
        yield MemoryPart("vLLM", "always", inputs.vllm_bytes, "gpu_memory_utilization × the device")


def _sampling(shape: ModelShape, inputs: MemoryInputs) -> Iterator[MemoryPart]:
    """What `generate` holds for one generation batch; the keys and values of vLLM are its own."""
    if _samples_elsewhere(inputs):
        return
    cache = inputs.sampled * inputs.length * shape.cache_bytes_per_token
    # While one layer's cache grows by a token, the old and the new one exist side by side.
    growing = cache // shape.layers
    yield MemoryPart(
        "keys and values",
        "sampling",
        cache + growing,
        f"{inputs.sampled} completions × {inputs.length} tokens × {format_bytes(shape.cache_bytes_per_token)}",
    )
    reading = inputs.sampled * inputs.prompt_tokens * shape.value_bytes
    reading *= 2 * shape.intermediate + 4 * shape.hidden
    drawing = inputs.sampled * shape.vocabulary * 4 * _SAMPLING_COPIES
    yield MemoryPart(
        "reading and drawing",
        "sampling",
        max(reading, drawing),
        f"the larger of one layer over {inputs.sampled} × {inputs.prompt_tokens} prompt tokens "
        f"and {inputs.sampled} × {shape.vocabulary} logits × {4 * _SAMPLING_COPIES} bytes",
    )


@dataclass(frozen=True)
class _Pass:
    """Tokens of the largest forward and backward pass."""

    tokens: int
    scored: int
    """Those whose logits are computed."""
    formula: str
    several: bool = False
    """Whether an optimizer step has others, whose gradients are kept meanwhile."""


def _largest_pass(inputs: MemoryInputs) -> _Pass:
    padded = inputs.micro_batch * inputs.length
    learned = inputs.micro_batch * inputs.accumulation
    if inputs.group is None:
        formula = f"{inputs.micro_batch} × {inputs.length} tokens"
        tokens = padded
        if inputs.budget:
            # Passes of shorter rows are as full.
            tokens = min(max(inputs.budget, inputs.length), learned * inputs.length)
            formula = f"{tokens} tokens of {learned} × {inputs.length}"
        return _Pass(tokens, tokens, formula, several=tokens < learned * inputs.length)
    prompts = min(learned, math.ceil(inputs.sampled / inputs.group))
    scored = learned * inputs.completion_tokens
    whole = prompts * inputs.prompt_tokens + scored
    most = max(inputs.budget or padded, inputs.length)
    if whole > most:
        formula = f"{most} tokens in one of several passes"
        return _Pass(most, scored * most // whole, formula, several=True)
    formula = (
        f"({prompts} prompts × {inputs.prompt_tokens} + {learned} completions × "
        f"{inputs.completion_tokens} tokens)"
    )
    return _Pass(whole, scored, formula)


def _loss(shape: ModelShape, inputs: MemoryInputs) -> Iterator[MemoryPart]:
    largest = _largest_pass(inputs)
    if largest.several:
        yield _gradients(shape, inputs, "loss")
    per_token = shape.saved_bytes_per_token or 0.0
    how = f"kept of each token in {shape.layers} layers"
    if inputs.checkpointing:
        per_token = (shape.checkpoint_bytes_per_token or 0.0) + per_token / shape.layers
        how = "kept of each token at the layers' borders, and one whole layer"
    if inputs.cpu and inputs.adapters:
        per_token *= _CPU_ADAPTER_HOLES
    yield MemoryPart(
        "activations",
        "loss",
        int(largest.tokens * per_token),
        f"{largest.formula} × {format_bytes(per_token)} ({how})",
    )
    yield _logits(shape, inputs, largest)
    if shape.head_trained:
        yield _head_gradient(shape, "loss")


def _logits(shape: ModelShape, inputs: MemoryInputs, largest: _Pass) -> MemoryPart:
    tokens, words = largest.scored, shape.vocabulary
    states = 4 * tokens * shape.hidden
    if inputs.cpu and inputs.group and inputs.processes == 1 and head.holds_logits(tokens, words):
        formula = (
            f"{tokens} tokens × {words} words × {head.LOGIT_BYTES} bytes (5 float32 copies at once)"
        )
        return MemoryPart("logits", "loss", tokens * words * head.LOGIT_BYTES + states, formula)
    rows, columns = min(tokens, head.TILE_TOKENS), min(words, head.TILE_WORDS)
    each = head.TILE_BYTES if inputs.cpu else shape.value_bytes
    why = " (13 float32 copies at once on a CPU)" if inputs.cpu else ""
    formula = (
        f"tiles of {rows} tokens × {columns} words × {each} bytes{why}, and a float32 gradient of the "
        f"last layer (all {tokens} × {words} logits would be {format_bytes(4 * tokens * words)} in "
        "float32)"
    )
    return MemoryPart("logits", "loss", rows * columns * each + states, formula)


def _update(shape: ModelShape, inputs: MemoryInputs) -> Iterator[MemoryPart]:
    yield _gradients(shape, inputs, "update")
    if shape.head_trained:
        yield _head_gradient(shape, "update")


def _gradients(shape: ModelShape, inputs: MemoryInputs, moment: Moment) -> MemoryPart:
    held = _hold(shape, inputs)
    formula = f"one for each of {format_count(shape.trainable)} trained weights{held.share}"
    return MemoryPart("gradients", moment, held.gradients, formula)


def _head_gradient(shape: ModelShape, moment: Moment) -> MemoryPart:
    size = 4 * shape.vocabulary * shape.hidden
    formula = f"{shape.vocabulary} × {shape.hidden} × 4 bytes, summed in float32"
    return MemoryPart("gradient of the output head", moment, size, formula)
