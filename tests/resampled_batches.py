"""A generation batch that dynamic sampling put together, and the same rows as TRL makes a batch of them at once.

    torchrun --nproc-per-node 2 -m tests.resampled_batches MODEL FOLDER

runs all of it in several processes, with groups that lie across them.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from grpo_cli.training.trainer import RunTrainer
from tests.plain_rewards import scored_by

ROWS = 24


def by_tokens(completions, completion_ids, teaches, log_metric, **_):
    """Tells completions apart on rows that teach, and on no others; logs how often it is called."""
    log_metric("calls", 1.0)
    pairs = zip(completion_ids, teaches, strict=True)
    return [(sum(ids) % 97) / 97 if useful else 0.3 for ids, useful in pairs]


def sometimes(completions, completion_ids, teaches, **_):
    """Scores some completions alone."""
    pairs = zip(completion_ids, teaches, strict=True)
    return [None if ids[0] % 3 == 0 else float(useful) for ids, useful in pairs]


def make_rows(share: int) -> list[dict[str, Any]]:
    """Prompts of different lengths, of which one in `share` teaches."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{'so ' * (place % 5)}count {place}"}],
            "row_id": 100 + place,
            "teaches": place % share == 0,
        }
        for place in range(ROWS)
    ]


def make_trainer(
    model: Path, folder: Path, *, share: int = 2, max_resample: int | None = 3, **settings: Any
) -> RunTrainer:
    """A trainer on the tiny model that replaces groups, up to three times."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_completion_length=8,
        learning_rate=1e-3,
        **{"num_generations": 4, "per_device_train_batch_size": 12, **settings},
    )
    trainer = RunTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        **scored_by(RunTrainer, by_tokens, sometimes, max_resample=max_resample),
        args=args,
        train_dataset=Dataset.from_list(make_rows(share)),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def sample(trainer: RunTrainer, groups: list[int]) -> dict[str, Any]:
    """The batch of these prompts, of which those without signal are replaced."""
    size, rank = trainer.num_generations, trainer.accelerator.process_index
    asked = [trainer.train_dataset[place] for place in groups for _ in range(size)]
    own = len(asked) // trainer.accelerator.num_processes
    return trainer._generate_and_score_completions(asked[rank * own : (rank + 1) * own])


def sample_at_once(trainer: RunTrainer, batch: dict[str, Any]) -> dict[str, Any]:
    """TRL's own batch of the prompts and completions of another batch."""
    asked, said = [], []
    for place in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()]
        (number,) = re.findall(r"count (\d+)", trainer.processing_class.decode(prompt))
        asked.append(trainer.train_dataset[int(number)])
        ids, mask = batch["completion_ids"][place], batch["completion_mask"][place].bool()
        # What was cut off may be masked whole, and then ends in no padding of its own.
        shown = mask | (ids != trainer.processing_class.pad_token_id)
        said.append(ids[shown].tolist())
    trainer._generate_single_turn = lambda *_, **__: (said, None)
    stages, trainer.rollouts.stages = trainer.rollouts.stages, []
    try:
        return trainer._generate_and_score_completions(asked)
    finally:
        trainer.rollouts.stages = stages
        del trainer._generate_single_turn


def gradient_of(trainer: RunTrainer, batch: dict[str, Any]) -> torch.Tensor:
    """The gradient of the loss over a batch, in one row."""
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, batch).backward()
    parts = [each.grad.flatten() for each in trainer.model.parameters() if each.grad is not None]
    return torch.cat(parts)


def assert_same_batch(trainer: RunTrainer, merged: dict[str, Any]) -> None:
    """A batch is what TRL makes of the same rows, and so is its gradient."""
    whole = sample_at_once(trainer, merged)
    assert merged.keys() == whole.keys()
    mask = whole["completion_mask"].bool()
    for name, expected in whole.items():
        found = merged[name]
        if name.endswith("logps"):
            found, expected = found[mask], expected[mask]
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    difference = gradient_of(trainer, merged) - gradient_of(trainer, whole)
    assert difference.abs().max() < 1e-6


def main(model: Path, folder: Path) -> None:
    """In several processes: batches, and weights after training."""
    # Three groups of four in two processes: the second lies across them.
    trainer = make_trainer(
        model, folder, num_generations=4, per_device_train_batch_size=6, max_steps=3
    )
    merged = sample(trainer, [1, 2, 3])
    assert trainer._metrics["train"]["dynamic_sampling/resampled_groups"][0] >= 2
    assert_same_batch(trainer, merged)
    trainer.train()
    weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
    everywhere = trainer.accelerator.gather(weights[None])
    assert len(everywhere) == trainer.accelerator.num_processes == 2
    assert torch.equal(everywhere[0], everywhere[1])
    # Gloo's threads abort a process now and then that ends beside them.
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
