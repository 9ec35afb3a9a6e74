"""One optimizer step of TRL's trainer and of `grpo`'s on the same completions: result, time, memory, syncs."""

import gc
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.gpu_kit.bench import Batch, Bench, Row, estimate_gib, noted, reward
from benchmarks.gpu_kit.sampling import make_samplers
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.recipe.training import FastConfig

SIDES = {"TRL": GRPOTrainer, "grpo": FastTrainer}
_REPEATS = 3
_CELL_S = 25.0
"""After so many seconds no step is repeated."""


class Watch(TrainerCallback):
    """What was seen of the steps: times without the first, the last one's peak memory, gradients and syncs."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.seconds, self.left_off = bench, list[float](), dict[str, str]()
        self.gradients: dict[str, torch.Tensor] | None = None
        """Of the last step, if it is a dictionary when training begins."""
        self.seen: list[warnings.WarningMessage] = []
        """Warnings since the end of the first step."""
        self.loss = 0.0
        self._first = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bench.reset_peak()
        self._started = self.bench.now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.gradients is not None:
            weights = named["model"].named_parameters()
            self.gradients = {n: w.grad.float().clone() for n, w in weights if w.grad is not None}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds, self.peak_gib = self.bench.now() - self._started, self.bench.peak_gib()
        if state.global_step == 1:
            self.seen.clear()
            return
        self.seconds.append(seconds)
        if time.monotonic() - self._first > _CELL_S or not self.bench.has_time():
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.loss = logs.get("loss", self.loss)


def run_steps(
    watch: Watch, side: str, model: Any, batch: Batch, *, steps: int, bf16: bool | None = None
) -> Watch:
    """Train for some steps, in autocast on a GPU if `bf16` is None."""
    cuda = watch.bench.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=batch.rows,
            num_generations=batch.group,
            max_completion_length=max(batch.lengths),
            max_steps=steps,
            bf16=cuda if bf16 is None else bf16,
            use_cpu=not cuda,
            max_grad_norm=0.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = SIDES[side](
            model=model,
            reward_funcs=[reward],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["?"] * 64}),
            processing_class=watch.bench.tokenizer,
            rollout_func=batch,
            callbacks=[watch],
        )
        if isinstance(trainer, FastTrainer):
            trainer.speed_up(FastConfig(), watch.left_off.update)
        trainer.train()
    return watch


def free_memory() -> None:
    """Free trainers, which refer to themselves, and with them the models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_parity(bench: Bench) -> Iterator[Row]:
    """Loss and gradients of one step in each precision; TRL's in float32 tells how much is rounding."""
    batch = Batch.mixed(bench, 512)
    exact: dict[str, torch.Tensor] = {}
    for precision, dtype, bf16 in (
        ("float32", torch.float32, False),
        ("bf16 weights", torch.bfloat16, False),
        ("bf16 autocast", torch.float32, True),
    ):
        found = {}
        for side in SIDES:
            found[side] = watch = Watch(bench)
            watch.gradients = {}
            model = bench.make_model("0.5B", torch.float32).to(dtype)
            run_steps(watch, side, model, batch, steps=1, bf16=bf16)
            del model
            free_memory()
        trl, grpo = found["TRL"], found["grpo"]
        exact = exact or trl.gradients
        yield {
            "precision": precision,
            "loss TRL": trl.loss,
            "loss grpo": grpo.loss,
            "gradient, grpo to TRL": relative_distance(grpo.gradients, trl.gradients),
            "TRL to float32": relative_distance(trl.gradients, exact),
            "grpo to float32": relative_distance(grpo.gradients, exact),
            "left off": ", ".join(grpo.left_off),
        }


def relative_distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients over the norm of the second."""
    apart = sum(float((one[name] - other[name]).square().sum()) for name in other)
    return (apart / sum(float(value.square().sum()) for value in other.values())) ** 0.5


def measure_learning(bench: Bench) -> Iterator[Row]:
    """Seconds of a step with completions given, and its peak memory, by the longest completion."""
    for name, lora in (("0.5B", False), ("7B", True)):
        for longest in (1024, 256) if bench.tiny else (1024, 4096, 8192, 256):
            if not bench.has_time():
                return
            row: Row = {"model": f"{name} {'LoRA' if lora else 'full'}", "C": longest}
            for side in SIDES:
                with noted(row, side):
                    row |= _measure_side(bench, side, name, longest, lora=lora)
                free_memory()
            if {"TRL s", "grpo s"} <= row.keys():
                row["ratio"] = row["grpo s"] / row["TRL s"]
            yield row


def _measure_side(bench: Bench, side: str, name: str, longest: int, *, lora: bool) -> Row:
    batch, dtype = Batch.mixed(bench, longest), torch.bfloat16 if lora else torch.float32
    model = bench.make_model(name, dtype, lora=lora)
    watch = run_steps(Watch(bench), side, model, batch, steps=1 + _REPEATS)
    shares = side == "grpo" and "shared_prompts" not in watch.left_off
    return {
        f"{side} s": median(watch.seconds),
        f"{side} GiB": watch.peak_gib,
        f"{side} estimate GiB": estimate_gib(bench, name, batch, dtype, lora=lora, shares=shares),
        **({f"{side} without": ", ".join(watch.left_off)} if watch.left_off else {}),
    }


@contextmanager
def recorded_syncs(bench: Bench) -> Iterator[list[warnings.WarningMessage]]:
    """Collect torch's warnings of operations for which the host waits for the device."""
    cuda = bench.device == "cuda"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")


def count_syncs(bench: Bench) -> Iterator[Row]:
    """Host syncs of the second step of each system, and of sampling, by source line."""
    if bench.device == "cpu":
        yield {"what": "torch reports them on CUDA alone"}
    for side in SIDES:
        watch, model = Watch(bench), bench.make_model("0.5B", torch.float32)
        with recorded_syncs(bench) as watch.seen:
            run_steps(watch, side, model, Batch.mixed(bench, 256), steps=2)
        yield from find_sites(f"step, {side}", watch.seen)
    new = bench.size(64)
    model = bench.make_model("0.5B", torch.bfloat16)
    for name, sample in make_samplers(bench, model, rows=8, new=new, prompt=16):
        sample()
        with recorded_syncs(bench) as seen:
            sample()
        yield from find_sites(f"{new} tokens, {name}", seen)


def find_sites(what: str, seen: list[warnings.WarningMessage]) -> Iterator[Row]:
    """Count the syncs of each source line."""
    sites = Counter(
        f"{re.sub(r'^.*/(?:site|dist)-packages/', '', each.filename)}:{each.lineno}"
        for each in seen
        if "called a synchronizing" in str(each.message)
    )
    for site, count in [("all", sites.total()), *sites.most_common(12)]:
        yield {"what": what, "site": site, "syncs": count}
