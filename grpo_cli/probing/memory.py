"""Memory of one process, part by part, each with its formula; and what is too much of it."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import psutil  # type: ignore[import-untyped]

from grpo_cli.batch.plan import BatchPlan, plan_batch
from grpo_cli.fast import attention as head
from grpo_cli.fast.graph_decoding import cached_tokens
from grpo_cli.issues import Issue
from grpo_cli.machine import pick_device, read_available_memory
from grpo_cli.recipe.launch import KEEPS_FLOAT32, SHARED_WEIGHTS, Strategy
from grpo_cli.recipe.recipe import Recipe, resolve_fast
from grpo_cli.recipe.warmup import WarmupConfig
from grpo_cli.units import format_bytes, format_count

if TYPE_CHECKING:
    from grpo_cli.probing.counting import ModelShape

Moment = Literal["always", "sampling", "loss", "update"]
"""When a part is held: all the time, while completions are sampled, when the backward pass begins,
or when it has ended and the weights change."""
Stage = Literal["GRPO", "warm-up"]

_CPU_ADAPTER_HOLES = 1.25
"""How much more than the kept tensors the forward pass of adapters takes on a CPU: each one adds up
three tensors that are dropped again, and leaves their holes. Measured, 1.0 to 1.7."""
_SAMPLING_COPIES = 4
"""float32 copies of the last logits while one token is drawn (temperature, softmax, sorting)."""
_ADAM = (0.0, 2.0)
_OPTIMIZER_STATES = {
    "adafactor": (0.0, 0.02),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), (2.0, 0.0)),
    "lion_32bit": (0.0, 1.0),
    "lion_8bit": (1.0, 0.0),
    "sgd": (0.0, 0.0),
}
"""(bytes for each trained weight, multiples of the trained weights' own size)."""
CUDA_CONTEXT = 600 * 2**20
"""What a CUDA context with the kernels of torch takes, about, on current drivers."""
_ZERO_BUCKET, _ZERO3_LIVE = 500_000_000, 1_000_000_000
"""DeepSpeed's own limits, in values (0.19, `runtime/zero/config.py`): gradients that are exchanged at a time, and
weights of other processes that are kept because they are used again soon."""
_NEARLY_FULL = 0.9


class Device(NamedTuple):
    """Where one process trains."""

    kind: Literal["cpu", "cuda"]
    total: int | None
    """Bytes of a GPU; None on a CPU."""
    available: int | None
    """Bytes that one process can take; None if the system does not tell."""
    library_bytes: int
    autocast: bool
    """Whether the model is computed in 16 bits, whatever its weights are in."""


def find_device(recipe: Recipe) -> Device:
    """Return the device of this machine that a recipe would train on; to be called once libraries are loaded."""
    import torch

    cuda = pick_device(recipe.launch) == "cuda"
    autocast = recipe.mixed_precision(cpu=not cuda) != "no"
    if cuda:
        free, total = torch.cuda.mem_get_info()
        return Device("cuda", total, free, CUDA_CONTEXT, autocast)
    local = int(recipe.launch.num_processes) // recipe.launch.num_machines
    available, _ = read_available_memory()
    share = None if available is None else available // max(local, 1)
    # By now this process has loaded the libraries that a worker loads.
    return Device("cpu", None, share, psutil.Process().memory_info().rss, autocast)


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
    stage: Stage = "GRPO"
    accumulation: int = 1
    """`gradient_accumulation_steps`."""
    group: int | None = None
    """`num_generations` if learning computes a prompt once for all its completions, else None."""
    budget: int | None = None
    """`max_tokens_per_micro_batch`."""
    checkpointing: bool = True
    reference: bool = False
    """Whether a second copy of the weights gives the KL term."""
    teacher_bytes: int = 0
    """Weights of the teacher, whole on each device."""
    autocast: bool = False
    processes: int = 1
    strategy: Strategy = "auto"
    optimizer: str = "adamw_torch_fused"
    cpu: bool = False
    """Whether the C library's heap holds the tensors, and no Triton kernel runs."""
    graphs: bool = False
    """Whether transformers samples with CUDA graphs."""
    adapters: bool = False
    """Whether LoRA adapters are trained."""
    vllm_bytes: int = 0
    """What a colocated vLLM takes for itself."""
    vllm_sleeps: bool = False
    """Whether it gives that back while the model learns (`vllm_enable_sleep_mode`)."""
    elsewhere: bool = False
    """Whether another process samples (a vLLM server)."""
    library_bytes: int = 0

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def generates(self) -> bool:
        """True if transformers samples on this device."""
        return not self.vllm_bytes and not self.elsewhere


def memory_inputs(recipe: Recipe, device: Device, prompt_tokens: int, sampled: int) -> MemoryInputs:
    """Return the settings that decide the memory of one process, which samples `sampled` completions at a time."""
    training, generation, lora = recipe.training, recipe.generation, recipe.model.lora is not None
    vllm = generation.backend == "vllm"
    colocated = vllm and generation.vllm.mode == "colocate"
    share = float(recipe.setting("vllm_gpu_memory_utilization") or 0)
    fast, size = resolve_fast(recipe), training.per_device_train_batch_size
    cpu = device.kind == "cpu"
    return MemoryInputs(
        micro_batch=size,
        sampled=sampled,
        prompt_tokens=prompt_tokens,
        completion_tokens=generation.max_completion_length,
        accumulation=training.gradient_accumulation_steps,
        group=generation.num_generations if fast.shared_prompts else None,
        budget=fast.max_tokens_per_micro_batch,
        checkpointing=bool(recipe.setting("gradient_checkpointing")),
        reference=bool(recipe.setting("beta")) and not lora,
        autocast=device.autocast,
        processes=int(recipe.launch.num_processes),
        strategy=recipe.launch.strategy,
        optimizer=str(recipe.setting("optim")),
        cpu=cpu,
        graphs=fast.cuda_graphs and not cpu,
        adapters=lora,
        vllm_bytes=int(share * (device.total or 0)) if colocated else 0,
        vllm_sleeps=bool(recipe.setting("vllm_enable_sleep_mode")),
        elsewhere=vllm and not colocated,
        library_bytes=device.library_bytes,
    )


def warmup_inputs(inputs: MemoryInputs, warmup: WarmupConfig, answer_tokens: int) -> MemoryInputs:
    """Return the settings of the supervised steps: nothing is sampled, and no other model is loaded yet."""
    return replace(
        inputs,
        stage="warm-up",
        micro_batch=warmup.per_device_train_batch_size,
        accumulation=warmup.gradient_accumulation_steps,
        completion_tokens=answer_tokens,
        group=None,
        budget=None,
        reference=False,
        teacher_bytes=0,
        vllm_bytes=0,
        elsewhere=True,
    )


class MemoryPart(NamedTuple):
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
    stage: Stage = "GRPO"

    def at_peak(self) -> list[MemoryPart]:
        """Return the parts that are held at the peak."""
        return [part for part in self.parts if part.moment in ("always", self.moment)]

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as plain values."""
        return {**asdict(self), "parts": [part._asdict() for part in self.parts]}


def estimate_memory(shape: "ModelShape", inputs: MemoryInputs) -> MemoryEstimate:
    """Return the peak memory of one device, in bytes, and what it is made of."""
    largest = _largest_pass(inputs)
    everything = (
        *_model_parts(shape, inputs, several_passes=largest.several),
        *_sampling_parts(shape, inputs),
        *_loss_parts(shape, inputs, largest),
    )
    parts = tuple(part for part in everything if part.bytes)
    moments: tuple[Moment, ...] = ("sampling", "loss", "update")
    estimates = [
        MemoryEstimate(
            parts,
            sum(part.bytes for part in parts if part.moment in ("always", moment)),
            moment,
            inputs.stage,
        )
        for moment in moments
    ]
    return max(estimates, key=lambda estimate: estimate.peak_bytes)


def count_state_bytes(optimizer: str, weights: int, size: int) -> int:
    """Return the bytes of an optimizer's states, for so many trained weights of `size` bytes together."""
    fixed, times = _OPTIMIZER_STATES.get(optimizer, _ADAM)
    return int(fixed * weights + times * size)


def _model_parts(
    shape: "ModelShape", inputs: MemoryInputs, *, several_passes: bool
) -> Iterator[MemoryPart]:
    """Return the weights, what belongs to them, and what others than this process lend.

    Source: accelerate 1.15, `fsdp2_prepare_model`, which trains float32 shards; DeepSpeed 0.19,
    `runtime/zero/stage_1_and_2.py` and `stage3.py`, which keep 16-bit weights and a float32 copy in shards.
    """
    strategy, count, names = inputs.strategy, inputs.processes, format_count(shape.trainable)
    sharded, zero = strategy in KEEPS_FLOAT32, strategy.startswith("zero")
    weights, trained = shape.weight_bytes, shape.trainable_bytes
    if sharded and inputs.autocast:
        # Float32 shards with FSDP2; 16-bit weights with ZeRO, whose float32 copies belong to the optimizer.
        size = 2 if zero else 4
        weights += size * shape.trainable - trained
        weights = min(weights, 2 * shape.parameters) if zero else weights
        trained = size * shape.trainable
    kept = max(trained, 4 * shape.trainable * sharded)
    states = count_state_bytes(inputs.optimizer, shape.trainable, kept)
    states += 4 * shape.trainable if zero else 0
    shares_weights = strategy in SHARED_WEIGHTS
    weights //= count if shares_weights else 1
    gradients = trained // (count if shares_weights or strategy == "zero2" else 1)
    states //= count if sharded else 1
    shards = f", in {count} shards" if sharded or shares_weights else ""
    yield MemoryPart("libraries", "always", inputs.library_bytes, "measured before loading a model")
    formula = f"{format_count(shape.parameters)} parameters, in the precision they have{shards}"
    yield MemoryPart("weights", "always", weights, formula)
    if inputs.reference:
        yield MemoryPart("reference model", "always", weights, "the weights again, since beta > 0")
    yield MemoryPart(
        "teacher", "always", inputs.teacher_bytes, "its weights, which are not trained"
    )
    float32 = shape.trainable_bytes == 4 * shape.trainable
    copy = 2 * shape.trainable if inputs.autocast and float32 and not sharded else 0
    yield MemoryPart(
        "16-bit copies", "loss", copy, f"{names} trained parameters × 2 bytes (autocast)"
    )
    if shares_weights:
        yield from _gathered_parts(shape, inputs, zero=zero)
    formula = f"of {names} trained weights ({inputs.optimizer}){shards}"
    yield MemoryPart("optimizer states", "always", states, formula)
    if zero or (count > 1 and not sharded):
        yield _exchange_part(shape, inputs, trained, zero=zero)
    moment: Moment = "sampling" if inputs.vllm_sleeps else "always"
    yield MemoryPart("vLLM", moment, inputs.vllm_bytes, "gpu_memory_utilization × the device")
    head_size, formula = (
        4 * shape.vocabulary * shape.hidden,
        f"one for each of {names} trained weights",
    )
    moments: tuple[Moment, ...] = ("loss", "update")
    for moment in moments:
        if several_passes or moment == "update":
            yield MemoryPart("gradients", moment, gradients, f"{formula}{shards}")
        if shape.head_trained:
            summed = f"{shape.vocabulary} × {shape.hidden} × 4 bytes, summed in float32"
            yield MemoryPart("gradient of the output head", moment, head_size, summed)


def _exchange_part(
    shape: "ModelShape", inputs: MemoryInputs, trained: int, *, zero: bool
) -> MemoryPart:
    """Return what gradients of `trained` bytes are exchanged in."""
    size, formula = trained, "one more copy of the gradients (DDP)"
    if zero:
        # A CPU gives only what is written to.
        values = min(_ZERO_BUCKET, shape.trainable) if inputs.cpu else _ZERO_BUCKET
        size = values * trained // max(shape.trainable, 1)
        formula = f"a bucket of {_ZERO_BUCKET:,} gradients (reduce_bucket_size)"
    return MemoryPart("gradient exchange", "always", size, formula)


def _gathered_parts(
    shape: "ModelShape", inputs: MemoryInputs, *, zero: bool
) -> Iterator[MemoryPart]:
    size = 2 if inputs.autocast else shape.value_bytes
    embeddings = shape.vocabulary * shape.hidden
    held = embeddings + 2 * max(shape.parameters - embeddings, 0) // shape.layers
    formula = "the embeddings and two layers, from the other processes"
    if zero:
        held = max(held, min(_ZERO3_LIVE, shape.parameters))
        formula = f"up to {_ZERO3_LIVE:,} weights of other processes (stage3_max_live_parameters)"
    yield MemoryPart("gathered weights", "loss", size * held, formula)
    if zero and inputs.generates:
        formula = "all weights, from the other processes (ds3_gather_for_generation)"
        yield MemoryPart("gathered weights", "sampling", size * shape.parameters, formula)


def _sampling_parts(shape: "ModelShape", inputs: MemoryInputs) -> Iterator[MemoryPart]:
    """Return what `generate` holds for one generation batch; the keys and values of vLLM are its own."""
    if shape.images is not None:
        pixels = inputs.sampled * shape.images.pixels
        formula = f"{inputs.sampled} prompts × {format_bytes(shape.images.pixels)}"
        yield MemoryPart("pixel values", "always", pixels, formula)
    if not inputs.generates:
        return
    each = shape.cache_bytes_per_token
    tokens, formula = inputs.length, f"{inputs.length} tokens"
    if inputs.graphs:
        tokens = cached_tokens(inputs.prompt_tokens, inputs.completion_tokens)
        formula = f"{tokens} tokens (two caches, while one follows the other)"
        merged = "copies of the adapted layers' weights (cuda_graphs)"
        yield MemoryPart("merged adapters", "sampling", shape.adapted_bytes, merged)
    cache = inputs.sampled * tokens * each
    # While one layer's cache grows by a token, the old and the new one exist side by side.
    cache += cache // shape.layers
    formula = f"{inputs.sampled} completions × {formula} × {format_bytes(each)}"
    formula += f", and one of the {shape.layers} layers again"
    yield MemoryPart("keys and values", "sampling", cache, formula)
    reading = inputs.sampled * inputs.prompt_tokens * shape.value_bytes
    reading *= 2 * shape.intermediate + 4 * shape.hidden
    drawing = inputs.sampled * shape.vocabulary * 4 * _SAMPLING_COPIES
    formula = (
        f"the larger of one layer over {inputs.sampled} × {inputs.prompt_tokens} prompt tokens and "
        f"{inputs.sampled} × {shape.vocabulary} logits × {4 * _SAMPLING_COPIES} bytes"
    )
    looking = inputs.sampled * shape.images.layer if shape.images else 0
    formula += ", or one layer of the vision part" if looking else ""
    yield MemoryPart("reading and drawing", "sampling", max(reading, drawing, looking), formula)


class _Pass(NamedTuple):
    """Tokens of the largest forward and backward pass."""

    tokens: int
    scored: int
    """Those whose logits are computed."""
    formula: str
    several: bool
    """Whether an optimizer step has others, whose gradients are kept meanwhile."""
    copied: int = 0
    """Tokens of prompts whose keys and values are copied for their completions."""


def _largest_pass(inputs: MemoryInputs) -> _Pass:
    padded, learned = inputs.micro_batch * inputs.length, inputs.micro_batch * inputs.accumulation
    if inputs.group is None:
        tokens, formula = padded, f"{inputs.micro_batch} × {inputs.length} tokens"
        if inputs.budget:
            # Passes of shorter rows are as full.
            tokens = min(max(inputs.budget, inputs.length), learned * inputs.length)
            formula = f"{tokens} tokens of {learned} × {inputs.length}"
        scored = tokens
        if inputs.stage == "warm-up":
            scored = inputs.micro_batch * inputs.completion_tokens
        return _Pass(tokens, scored, formula, several=tokens < learned * inputs.length)
    prompts = min(learned, math.ceil(inputs.sampled / inputs.group))
    scored = learned * inputs.completion_tokens
    whole = prompts * inputs.prompt_tokens + scored
    copied = learned * inputs.prompt_tokens
    most = max(inputs.budget or padded, inputs.length)
    if whole > most:
        formula = f"{most} tokens in one of several passes"
        parts = (size * most // whole for size in (scored, copied))
        return _Pass(most, next(parts), formula, True, next(parts))
    completions = f"{learned} completions × {inputs.completion_tokens} tokens"
    formula = f"({prompts} prompts × {inputs.prompt_tokens} + {completions})"
    return _Pass(whole, scored, formula, False, copied)


def _loss_parts(shape: "ModelShape", inputs: MemoryInputs, largest: _Pass) -> Iterator[MemoryPart]:
    per_token = shape.saved_bytes_per_token or 0.0
    kept = f"kept of each token in {shape.layers} layers"
    if inputs.checkpointing:
        per_token = (shape.checkpoint_bytes_per_token or 0.0) + per_token / shape.layers
        kept = "kept of each token at the layers' borders, and one whole layer"
    if inputs.cpu and inputs.adapters:
        per_token *= _CPU_ADAPTER_HOLES
    formula = f"{largest.formula} × {format_bytes(per_token)} ({kept})"
    yield MemoryPart("activations", "loss", int(largest.tokens * per_token), formula)
    if shape.images is not None:
        of_row, kept = shape.images.saved, "kept of each prompt's images"
        if inputs.checkpointing:
            of_row = shape.images.checkpointed
            of_row += shape.images.layer if of_row else 0
            kept = "kept of each prompt's images at the layers' borders, and one whole layer"
        formula = f"{inputs.micro_batch} prompts × {format_bytes(of_row)} ({kept})"
        yield MemoryPart("vision part", "loss", inputs.micro_batch * of_row, formula)
    per_copy = shape.cache_bytes_per_token // (shape.layers if inputs.checkpointing else 1)
    computed = 4 if inputs.cpu else 2 if inputs.autocast else shape.value_bytes
    copied = largest.copied * per_copy * computed // shape.value_bytes
    formula = f"of {largest.copied} tokens, a prompt for each of its completions"
    yield MemoryPart("copied keys and values", "loss", copied, formula)
    tokens, words = largest.scored, shape.vocabulary
    states = 4 * tokens * shape.hidden
    if inputs.cpu and inputs.group and inputs.processes == 1 and head.holds_logits(tokens, words):
        size = tokens * words * head.LOGIT_BYTES
        each = f"{head.LOGIT_BYTES} bytes (5 float32 copies at once)"
        formula = f"{tokens} tokens × {words} words × {each}"
    else:
        rows, columns = min(tokens, head.TILE_TOKENS), min(words, head.TILE_WORDS)
        value = head.TILE_BYTES if inputs.cpu else shape.value_bytes
        size, copies = rows * columns * value, " (13 float32 copies at once on a CPU)"
        whole = format_bytes(4 * tokens * words)
        formula = (
            f"tiles of {rows} tokens × {columns} words × {value} bytes{copies if inputs.cpu else ''}, and a "
            f"float32 gradient of the last layer (all {tokens} × {words} logits would be {whole} in float32)"
        )
    formula += f", and {tokens} hidden states × {4 * shape.hidden} bytes"
    yield MemoryPart("logits", "loss", size + states, formula)


def judge_memory(
    memory: MemoryEstimate, device: Device, recipe: Recipe, plan: BatchPlan
) -> Iterator[Issue]:
    """Find more memory than there is; on CUDA that is a warning, as the estimate has not been measured there."""
    available = device.available
    if available is None or memory.peak_bytes <= _NEARLY_FULL * available:
        return
    largest = max(memory.at_peak(), key=lambda part: part.bytes)
    over = memory.peak_bytes > available and device.kind == "cpu"
    peak, free = (f"{size / 2**30:.1f} GiB" for size in (memory.peak_bytes, available))
    section, stage, smaller = "training", "", _smaller_batch(plan)
    if memory.stage == "warm-up" and recipe.warmup is not None:
        section, stage, smaller = "warmup", " in the warm-up", _smaller_warmup(recipe.warmup)
    yield Issue(
        f"about {peak} a process{stage}, {free} available; the largest part is {largest.name} "
        f"({largest.bytes / 2**30:.1f} GiB)",
        _advise(largest.name, recipe, smaller),
        f"{section}.per_device_train_batch_size",
        level="error" if over else "warning",
        subject="cost: memory",
        why="a training that runs out of memory is killed, most often at its longest batch",
    )


def _advise(part: str, recipe: Recipe, smaller: str) -> str:
    quantize = "add `model.lora` with `model.quantization: 4bit`, or "
    advice = {
        "weights": f"{'' if recipe.model.quantization else quantize}take a smaller model",
        "optimizer states": "add `model.lora`, or set `training.optim: adamw_8bit`",
        "gradients": "add `model.lora`",
        "reference model": "set `training.beta: 0`, or add `model.lora` (it needs no second copy)",
        "teacher": "name a smaller teacher",
        "keys and values": "lower `per_device_train_batch_size`, or set `generation.backend: vllm`",
        "merged adapters": "set `training.fast.cuda_graphs: false`",
        "vLLM": "lower `generation.vllm.gpu_memory_utilization`",
    }
    if part == "activations" and not recipe.setting("gradient_checkpointing"):
        return f"set `gradient_checkpointing: true`, or {smaller.removeprefix('set ')}"
    return advice.get(part, smaller)


def _smaller_warmup(warmup: WarmupConfig) -> str:
    size, steps = warmup.per_device_train_batch_size, warmup.gradient_accumulation_steps
    if size % 2:
        return "set `per_device_train_batch_size: 1`" if size > 1 else "shorten the answers"
    edit = f"`gradient_accumulation_steps: {2 * steps}`"
    return f"set `per_device_train_batch_size: {size // 2}` and {edit}"


def _smaller_batch(plan: BatchPlan) -> str:
    """Return the edit that samples and learns the same in smaller micro-steps, if the arithmetic allows."""
    inputs = plan.inputs
    total = inputs.per_device_train_batch_size * inputs.gradient_accumulation_steps
    for size in range(inputs.per_device_train_batch_size // 2, 0, -1):
        steps = total // size
        split = replace(inputs, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        if total % size == 0 and plan_batch(split).valid:
            edit = f"`gradient_accumulation_steps: {steps}`"
            return f"set `per_device_train_batch_size: {size}` and {edit}"
    return "lower `max_completion_length`"
