"""Sample with the real model and time one training step, which is thrown away."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers.utils.logging import disable_progress_bar
from trl.trainer import add_fused_lm_head

from grpo_cli.data.table import list_rows
from grpo_cli.environments.player import open_player, sample_episodes
from grpo_cli.errors import GrpoError, RunError
from grpo_cli.fast.completions import Completion, Images, open_sampler, sample_completions
from grpo_cli.fast.tokens import all_eos_token_ids, encode_prompt
from grpo_cli.machine import pick_device
from grpo_cli.models.loading import add_adapters, load_generation_config, load_model, load_trainable
from grpo_cli.models.processor import tokenizer_of
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.models.vllm_engine import engine_settings
from grpo_cli.probing.cost import Timings
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.recipe.recipe import Recipe, resolve_fast
from grpo_cli.units import count_noun, format_duration

_WARM_UP = {"max_new_tokens": 2, "samples_per_prompt": 2}
_TIMED = 2
"""Passes timed; the fastest counts, since the first one also warms up."""
_Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Token ids of prompts and their completions."""


class ModelRun(NamedTuple):
    """What a model wrote, and how long it took."""

    sampled: list[list[Completion]]
    timings: Timings | None
    """None if no training step was taken."""
    step_tokens: int
    """Of the micro-batch that was timed, with its padding."""
    mean_tokens: float
    """Of a completion; of an episode with the results of its calls."""


class _Sampled(NamedTuple):
    groups: list[list[Completion]]
    seconds: float
    """In which the model sampled."""
    tools_s: float = 0.0
    """In which it waited for tools and environments."""

    @property
    def completions(self) -> int:
        return sum(map(len, self.groups))


def run_model(
    recipe: Recipe,
    processing_class: Any,
    data: Any,
    *,
    batch_size: int,
    takes_step: bool,
    tell: Callable[[str], None],
) -> ModelRun:
    """Sample a group for each row, `batch_size` completions at a time, and take one training step.

    `data` is a `Dataset`, and `processing_class` the tokenizer, or the processor if prompts may hold images.

    Raises:
        RunError: The device runs out of memory.
        GrpoError: The model cannot be loaded.
    """
    disable_progress_bar()
    model, tokenizer, rows = None, tokenizer_of(processing_class), list_rows(data)
    images = None
    if recipe.has_images:
        own = data[IMAGES] if IMAGES in data.column_names else [[] for _ in rows]
        images = Images(processing_class, own)
    if recipe.generation.backend == "vllm":
        tell("starting vLLM")
        with _explained("sampling", recipe):
            sampled = _sample_with_vllm(recipe, tokenizer, rows, images, batch_size, tell)
    else:
        tell("loading the model")
        with _explained("loading the model", recipe):
            model = _load(recipe, tokenizer)
        with _explained("sampling", recipe):
            sampled = _sample(recipe, model, tokenizer, rows, images, batch_size, tell)
    if images is not None:
        return ModelRun(sampled.groups, None, 0, 0.0)
    sequences = _list_sequences(recipe, tokenizer, rows, sampled.groups)
    mean_tokens = fmean(len(completion) for _, completion in sequences)
    if not takes_step:
        return ModelRun(sampled.groups, None, 0, mean_tokens)
    tell("preparing one training step")
    with _explained("a training step", recipe):
        model = model or _load(recipe, tokenizer)
        steps, tokens = _time_step(recipe, model, tokenizer.pad_token_id, sequences, tell)
    timings = Timings(
        sample_s=sampled.seconds / sampled.completions,
        tools_s=sampled.tools_s / sampled.completions,
        **steps,
    )
    return ModelRun(sampled.groups, timings, tokens, mean_tokens)


def _list_sequences(
    recipe: Recipe,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    groups: list[list[Completion]],
) -> _Sequences:
    kwargs = recipe.setting("chat_template_kwargs")
    return [
        completion.sequence[:2]
        if completion.sequence
        else (encode_prompt(tokenizer, row["prompt"], kwargs), completion.token_ids)
        for row, group in zip(rows, groups, strict=True)
        for completion in group
    ]


@contextmanager
def _explained(action: str, recipe: Recipe) -> Iterator[None]:
    """Turn what a library raises into an error that does not lose what was found so far."""
    try:
        yield
    except GrpoError:
        raise
    except torch.OutOfMemoryError as error:
        size = recipe.training.per_device_train_batch_size
        raise RunError(
            f"{action} ran out of memory with per_device_train_batch_size {size}: {str(error).split('. ')[0]}",
            "lower it and raise gradient_accumulation_steps, or see what needs most under `cost`",
        ) from error
    except Exception as error:
        if os.environ.get("GRPO_DEBUG") == "1":
            raise
        sentence = " ".join(str(error).split())[:300]
        raise RunError(
            f"{action} failed: {type(error).__name__}: {sentence}",
            "see the findings above; GRPO_DEBUG=1 shows the traceback",
        ) from error


def _load(recipe: Recipe, tokenizer: Any) -> Any:
    """Return the model as the trainer makes it, to sample and to learn: with TRL's loss and fresh adapters.

    Source: trl 1.16, `GRPOTrainer.__init__`, for the adapters of a quantized model.
    """
    device, quantized = pick_device(recipe.launch), recipe.model.quantization is not None
    model = load_model(recipe.model, tokenizer, device_is_cuda=device == "cuda")
    model = model if quantized else model.to(device)
    add_fused_lm_head(
        model, temperature=recipe.generation.temperature, outputs=("log_probs", "entropy")
    )
    if recipe.model.lora is None:
        return model
    lora, has_adapter = recipe.model.lora, recipe.model.adapter is not None
    model = load_trainable(model, recipe.model) if has_adapter else add_adapters(model, lora)
    for name, weight in model.named_parameters() if quantized else ():
        if weight.requires_grad and "lora_magnitude_vector" not in name:
            weight.data = weight.data.to(torch.bfloat16)
    return model


# --- sampling ----------------------------------------------------------------------------------


def _sample(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    images: Images | None,
    batch_size: int,
    tell: Callable[[str], None],
) -> _Sampled:
    """Sample with transformers."""
    reading = recipe.generation.reading
    settings = {**_settings(recipe), **reading, "fast": resolve_fast(recipe), "images": images}
    prompts = [row["prompt"] for row in rows]
    # The first call makes ready what the others use.
    sample_completions(model, tokenizer, prompts[:1], **{**settings, **_WARM_UP})
    report = _report_progress(tell, recipe.generation.num_generations * len(prompts))
    if recipe.has_episodes:
        names = ("temperature", "seed", "options", "fast", "stop_strings")
        shared = {name: settings[name] for name in names}
        processor = tokenizer if images is None else images.processor
        with open_sampler(
            model, tokenizer, batch_size=batch_size, processor=processor, **shared
        ) as draw:
            return _play(recipe, processor, rows, draw, batch_size, report)
    started = time.perf_counter()
    sampled = sample_completions(
        model, tokenizer, prompts, batch_size=batch_size, on_progress=report, **settings
    )
    return _Sampled(sampled, time.perf_counter() - started)


def _report_progress(tell: Callable[[str], None], total: int) -> Callable[[int, int], None]:
    """Tell how much is sampled, from now on; return what is called with completions and their total."""
    started = time.perf_counter()

    def report(done: int, total: int) -> None:
        left = (time.perf_counter() - started) * (total - done) / done if done else 0.0
        more = f", about {format_duration(left)} left" if left else ""
        tell(f"sampling: {done:,} of {count_noun(total, 'completion')}{more}")

    report(0, total)
    return report


def _play(
    recipe: Recipe,
    processing_class: Any,
    rows: Sequence[Mapping[str, Any]],
    draw: Callable[..., list[list[int]]],
    batch_size: int,
    report: Callable[[int, int], None],
) -> _Sampled:
    """Play a group of episodes for each row."""
    tokenizer = tokenizer_of(processing_class)
    stops = all_eos_token_ids(load_generation_config(recipe.model), tokenizer)
    with open_player(recipe, processing_class, stops=stops) as player:
        started = time.perf_counter()
        groups = sample_episodes(
            player,
            rows,
            draw,
            samples_per_prompt=recipe.generation.num_generations,
            batch_size=batch_size,
            on_progress=report,
        )
        seconds = time.perf_counter() - started
        return _Sampled(groups, seconds - player.waited_s, player.waited_s)


def _sample_with_vllm(
    recipe: Recipe,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    images: Images | None,
    batch_size: int,
    tell: Callable[[str], None],
) -> _Sampled:
    """Sample with an engine of the recipe's settings; in server mode too, since it ends with the probe."""
    from grpo_cli.fast.vllm_completions import open_vllm

    with open_vllm(
        model_folder_or_id(recipe.model),
        tokenizer,
        stops=all_eos_token_ids(load_generation_config(recipe.model), tokenizer),
        **recipe.generation.reading,
        seed=recipe.seed,
        engine=engine_settings(recipe, pick_device(recipe.launch)),
    ) as engine:
        settings, started = _settings(recipe), time.perf_counter()
        if not recipe.has_episodes:
            prompts = [row["prompt"] for row in rows]
            sampled = engine.sample(prompts, images=images, **settings)
            return _Sampled(sampled, time.perf_counter() - started)
        report = _report_progress(tell, recipe.generation.num_generations * len(rows))
        shared = {name: settings[name] for name in ("temperature", "seed", "options")}
        draw = engine.open_sampler(**shared)
        return _play(recipe, tokenizer, rows, draw, batch_size, report)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return how the recipe samples completions, as both samplers take it."""
    generation = recipe.generation
    return {
        "max_new_tokens": generation.max_completion_length,
        "temperature": generation.temperature,
        "samples_per_prompt": generation.num_generations,
        "seed": recipe.seed,
        "chat_template_kwargs": recipe.setting("chat_template_kwargs"),
        "options": generation.sampling_options,
    }


# --- a training step ---------------------------------------------------------------------------


def _time_step(
    recipe: Recipe,
    model: Any,
    pad_token_id: int,
    sequences: _Sequences,
    tell: Callable[[str], None],
) -> tuple[dict[str, float], int]:
    """Take one training step with a model that has sampled; changes its weights.
    Returns:
        The seconds of the step's parts by their names in `Timings`, and the tokens of the micro-batch.
    """
    if recipe.setting("gradient_checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if recipe.model.lora is not None:
            model.enable_input_require_grads()
    model.train()
    size = recipe.training.per_device_train_batch_size
    ids, mask, width = _collate(size, pad_token_id, sequences)
    ids, mask = ids.to(model.device), mask.to(model.device)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    kind = model.device.type
    mixed = recipe.mixed_precision(cpu=kind == "cpu") == "bf16"

    def forward(rows: int = size) -> Any:
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=mixed):
            return model(**{name: each[:rows] for name, each in inputs.items()}, fused_lm_head=True)

    def pass_once() -> None:
        with torch.no_grad():
            forward()

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)

    def learn(rows: int = size) -> None:
        forward(rows).log_probs.mean().backward()

    # One row first, which tells how long all of them take.
    pass_s = size * _time(partial(learn, 1), 1, tell, "one row") if size > 1 else None
    seconds = {
        "micro_step_s": _time(learn, _TIMED, tell, "forward and backward pass", pass_s),
        "update_s": _time(optimizer.step, 1, tell, "optimizer step"),
        "forward_s": _time(pass_once, _TIMED, tell, "forward pass", pass_s),
    }
    return seconds, ids.numel()


def _collate(size: int, pad: int, sequences: _Sequences) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Pad a micro-batch as TRL does: prompts on the left, completions on the right.

    Returns:
        Token ids and mask, [sequences, tokens] int64, and the width of the completions.
    """
    taken = [sequences[index % len(sequences)] for index in range(size)]
    before = max(len(prompt) for prompt, _ in taken)
    width = max(len(completion) for _, completion in taken)
    ids = torch.full((size, before + width), pad)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(taken):
        start, end = before - len(prompt), before + len(completion)
        ids[row, start:end] = torch.tensor([*prompt, *completion])
        mask[row, start:end] = 1
    return ids, mask, width


def _time(
    action: Callable[[], Any],
    times: int,
    tell: Callable[[str], None],
    what: str,
    expected_s: float | None = None,
) -> float:
    """Return the seconds of the fastest of some calls; `tell` gets each with the time that is left for them."""
    seconds: list[float] = []
    for number in range(1, times + 1):
        each_s = min(seconds, default=expected_s)
        left = f", about {format_duration(each_s * (times + 1 - number))} left" if each_s else ""
        tell(f"timing a training step: {what} {number} of {times}{left}")
        _wait()
        started = time.perf_counter()
        action()
        _wait()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
