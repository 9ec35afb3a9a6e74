"""One training of TRL alone, and what is known of it besides its log: samples of the model, its weights."""

import math
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.foreign_runs import rewards
from benchmarks.foreign_runs.cases import Case
from benchmarks.foreign_runs.models import make_tokenizer

_PROMPTS, _SAMPLES = 20, 8


@dataclass(frozen=True)
class Samples:
    """What a model answers to the prompts, at temperature 1."""

    truth: float
    length: float
    cut: float
    """Share that did not end."""
    commonest: float
    """Share of the commonest answer, over all prompts."""
    example: str


def train_case(case: Case, seed: int, folder: Path, bases: Path) -> dict[str, Any]:
    """Train, and keep the last `trainer_state.json` alone.

    Args:
        case: What to train.
        seed: Of sampling, rows and order.
        folder: Gets `checkpoint-*/trainer_state.json`.
        bases: Folders of the models to start from.

    Returns:
        What was measured besides the log: samples before and after, how far the weights moved.
    """
    set_seed(seed)
    tokenizer = make_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(bases / case.base)
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    functions = [getattr(rewards, name) for name in case.reward.split()]
    given = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_steps": 60,
        "max_completion_length": 8 if case.task == "sum" else 16,
        "logging_steps": 1,
        "learning_rate": 1e-3,
    } | case.arguments
    config = GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_steps=given["max_steps"],
        save_only_model=True,
        **({"eval_strategy": "steps", "eval_steps": 20} if case.evaluated else {}),
        **given,
    )
    before = sample(model, case, seed, given["max_completion_length"])
    set_seed(seed)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=functions,
        args=config,
        train_dataset=rewards.make_rows(case.task, seed, 512),
        eval_dataset=rewards.make_rows(case.task, seed, 16) if case.evaluated else None,
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    moved = max(
        float((weight.detach() - start[name]).abs().max())
        for name, weight in model.named_parameters()
    )
    _keep_state_only(folder)
    after = sample(model, case, seed, given["max_completion_length"])
    return {"before": vars(before), "after": vars(after), "weights_moved": moved}


def sample(model: PreTrainedModel, case: Case, seed: int, limit: int) -> Samples:
    """Sample answers to prompts of the case."""
    tokenizer = make_tokenizer()
    end = int(tokenizer.eos_token_id)
    rows = rewards.make_rows(case.task, seed, _PROMPTS)
    prompts = [prompt for prompt in rows["prompt"] for _ in range(_SAMPLES)]
    answers = [answer for answer in rows["answer"] for _ in range(_SAMPLES)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    inputs.pop("token_type_ids", None)
    try:
        with torch.no_grad():
            output = model.generate(**inputs, do_sample=True, max_new_tokens=limit)
    except RuntimeError as error:  # probabilities are NaN
        return Samples(math.nan, math.nan, math.nan, math.nan, str(error)[:80])
    ids = [_until(end, row.tolist()) for row in output[:, inputs["input_ids"].shape[1] :]]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    truth = getattr(rewards, case.truth or case.reward.split()[0])
    scores = truth(completions=texts, answer=answers)
    [(text, count)] = Counter(texts).most_common(1)
    return Samples(
        statistics.fmean(scores),
        statistics.fmean(map(len, ids)),
        statistics.fmean(row[-1] != end for row in ids),
        count / len(texts),
        text[:60],
    )


def _until(end: int, ids: list[int]) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def _keep_state_only(folder: Path) -> None:
    for path in [p for p in folder.rglob("*") if p.is_file() and p.name != "trainer_state.json"]:
        path.unlink()
    for path in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        if not any(path.iterdir()):
            shutil.rmtree(path)
