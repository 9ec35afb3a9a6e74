"""The plan against the real trainer: its config, its dataloaders, its loop and its sampling."""

import gc
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from grpo_cli.batch.plan import BatchInputs, BatchPlan, plan_batch
from tests.nightly import scale

pytestmark = pytest.mark.slow

SETTINGS = scale(80, 640)
CHUNKS = SETTINGS // 80
SEED = int(os.environ.get("PARITY_SEED", "0"))
"""Of the first chunk. Set it to try other settings than the last time."""


class ManyProcessConfig(GRPOConfig):
    """`GRPOConfig` in a world of a chosen size.

    `__post_init__` resets accelerate's state while it runs, and reads `world_size` right after, so
    overriding the public property is the one place where the size can be put without a launch.
    """

    world = 1

    @property
    def world_size(self) -> int:
        return type(self).world


class CountingTrainer(GRPOTrainer):
    """The real trainer, but for the model's part: sampling is counted, and the loss is zero.

    The dataloader, `_prepare_inputs` (which decides when to sample) and transformers' loop are real.
    """

    sampled = 0

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.sampled += len(inputs)
        return {"rows": torch.zeros(len(inputs), 1)}

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        assert len(inputs["rows"]) == self.args.per_device_train_batch_size
        return next(model.parameters()).sum() * 0


@dataclass
class Micro:
    model: Qwen2ForCausalLM
    tokenizer: PreTrainedTokenizerFast
    folder: Path


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Micro]:
    """A random model of a few hundred weights, which fits every setting."""
    transformers_logging.set_verbosity_error()
    words = ["<pad>", "<eos>", "<unk>", *map(str, range(61))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    # Every `train()` collects garbage, which takes 0.2 s a time over torch's own objects.
    gc.collect()
    gc.freeze()
    yield Micro(Qwen2ForCausalLM(config), tokenizer, tmp_path_factory.mktemp("out"))
    gc.unfreeze()
    ManyProcessConfig.world = 1
    AcceleratorState._reset_state(reset_partial_state=True)


def as_dataset(size: int | None) -> Dataset | None:
    return None if size is None else Dataset.from_dict({"prompt": [str(i) for i in range(size)]})


def build(
    micro: Micro,
    inputs: BatchInputs,
    trainer_class: type[GRPOTrainer] = CountingTrainer,
    reward: Callable[..., list[float]] = lambda completions, **_: [0.0] * len(completions),
    **extra: Any,
) -> GRPOTrainer:
    """The trainer of rank 0 as `inputs` ask for it; raises what the real one raises."""
    ManyProcessConfig.world = inputs.num_processes
    given = {**vars(inputs), "eval_strategy": "epoch" if inputs.evaluates else "no"}
    sizes = ("dataset_size", "dataset_limit", "eval_dataset_size")
    ours = ("num_processes", "evaluates", "max_resample", *sizes)
    args = ManyProcessConfig(
        output_dir=str(micro.folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        max_completion_length=2,
        **{name: value for name, value in given.items() if name not in ours},
        **extra,
    )
    enter_world(inputs.num_processes, rank=0)
    trainer = trainer_class(
        micro.model,
        reward,
        args=args,
        train_dataset=as_dataset(inputs.dataset_size),
        eval_dataset=as_dataset(inputs.eval_dataset_size) if inputs.evaluates else None,
        processing_class=micro.tokenizer,
    )
    enter_world(inputs.num_processes, rank=0)
    return trainer


def enter_world(size: int, rank: int) -> None:
    """Tells accelerate its place in a world of `size`; collectives stay those of one process."""
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:
            shared.update(num_processes=size, process_index=rank, local_process_index=rank)


def batches_by_rank(
    inputs: BatchInputs, loader: Callable[[], torch.utils.data.DataLoader]
) -> list[list[list[str]]]:
    """The prompts of every batch of one epoch, for each rank."""
    ranks = []
    for rank in range(inputs.num_processes):
        enter_world(inputs.num_processes, rank)
        ranks.append([[row["prompt"] for row in batch] for batch in loader()])
    enter_world(inputs.num_processes, rank=0)
    return ranks


def assert_whole_groups(ranks: list[list[list[str]]], group: int) -> None:
    """Rewards are gathered rank after rank, then cut into groups: each must be of one prompt."""
    for batches in zip(*ranks, strict=True):
        gathered = [prompt for batch in batches for prompt in batch]
        assert len(gathered) % group == 0
        for start in range(0, len(gathered), group):
            assert len(set(gathered[start : start + group])) == 1


def random_settings(count: int, seed: int) -> list[BatchInputs]:
    """Settings of which about half are valid; every rule is broken by many of them."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        group, processes = rng.choice([2, 2, 3, 4, 4, 6, 8]), rng.randint(1, 8)
        each = rng.choice([1, 2, 3, 4, 6, 8, group, group])
        rhythm: dict[str, int] = {}
        if rng.random() < 0.3:
            rhythm["steps_per_generation"] = rng.randint(1, 6)
        elif rng.random() < 0.4:
            multiple = each * processes * rng.randint(1, 4)
            rhythm["generation_batch_size"] = multiple if rng.random() < 0.8 else rng.randint(1, 60)
        if rng.random() < 0.04:
            rhythm |= {"steps_per_generation": 2, "generation_batch_size": 2 * each * processes}
        evaluates = rng.random() < 0.5
        eval_group = rng.choice([None, None, 1, 2, 3, 4])
        eval_each = rng.choice([1, 2, 4, 8, (eval_group or group)])
        found.append(
            BatchInputs(
                per_device_train_batch_size=each,
                gradient_accumulation_steps=rng.randint(1, 6),
                num_processes=processes,
                num_generations=1 if rng.random() < 0.02 else group,
                num_iterations=rng.choice([1, 1, 1, 2, 3]),
                num_train_epochs=rng.choice([0.05, 0.3, 1, 1, 1.5, 2, 2.7]),
                max_steps=rng.randint(1, 12) if rng.random() < 0.35 else -1,
                dataset_size=rng.choice(
                    [rng.randint(0, 4), *(rng.randint(8, 80) for _ in range(4))]
                ),
                evaluates=evaluates,
                per_device_eval_batch_size=eval_each,
                num_generations_eval=eval_group,
                eval_dataset_size=rng.randint(1, 12) if evaluates else None,
                **rhythm,
            )
        )
    return found


def check_epoch(inputs: BatchInputs, plan: BatchPlan, trainer: GRPOTrainer) -> bool:
    """Compares one epoch of every rank; says whether there is anything to train on."""
    ranks = batches_by_rank(inputs, trainer.get_train_dataloader)
    if not ranks[0]:
        return False
    # What a rank loads at each micro-step is its share of the whole generation batch.
    assert {len(batches) for batches in ranks} == {plan.micro_steps_per_epoch}
    assert plan.generation_batch_size is not None
    share = plan.generation_batch_size // inputs.num_processes
    assert {len(batch) for batches in ranks for batch in batches} == {share}
    assert_whole_groups(ranks, inputs.num_generations)
    used = {prompt for batches in ranks for batch in batches for prompt in batch}
    assert plan.dropped_prompts_per_epoch == (inputs.dataset_size or 0) - len(used)
    distinct = {tuple(b for rank in ranks for b in rank[i]) for i in range(len(ranks[0]))}
    assert plan.generation_batches_per_epoch == len(distinct)
    values = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    assert plan.optimizer_steps_per_epoch == values[1]
    assert plan.micro_steps_per_epoch == values[5]
    assert plan.total_optimizer_steps == values[6]
    return True


def check_evaluation(inputs: BatchInputs, plan: BatchPlan, trainer: GRPOTrainer) -> None:
    ranks = batches_by_rank(inputs, trainer.get_eval_dataloader)
    assert plan.eval_num_generations == trainer.num_generations_eval
    assert {len(batches) for batches in ranks} == {plan.eval_steps}
    assert_whole_groups(ranks, trainer.num_generations_eval)
    asked = [prompt for batches in ranks for batch in batches for prompt in batch]
    assert plan.eval_completions == len(asked)
    repeated = len(asked) // trainer.num_generations_eval - len(set(asked))
    assert plan.eval_repeated_prompts == repeated


def verdict_of_trainer(micro: Micro, inputs: BatchInputs, plan: BatchPlan) -> bool:
    """Whether the real one accepts `inputs` and trains; compares every count on the way."""
    try:
        trainer = build(micro, inputs)
    except ValueError:
        return False
    if not check_epoch(inputs, plan, trainer):
        return False
    assert plan.generation_batch_size == trainer.args.generation_batch_size
    assert plan.steps_per_generation == trainer.args.steps_per_generation
    if inputs.evaluates:
        check_evaluation(inputs, plan, trainer)
        trainer.args.eval_strategy = "no"  # the loop below would need a model for it
    trainer.train()
    assert plan.total_optimizer_steps == trainer.state.global_step
    assert plan.total_completions == trainer.sampled * inputs.num_processes
    return True


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_plan_agrees_with_the_trainer_on_random_settings(micro: Micro, chunk: int) -> None:
    accepted = refused = 0
    print(f"PARITY_SEED={SEED + chunk}")
    for inputs in random_settings(SETTINGS // CHUNKS, seed=SEED + chunk):
        plan = plan_batch(inputs)
        assert plan.valid == verdict_of_trainer(micro, inputs, plan), (inputs, plan.problems)
        accepted, refused = accepted + plan.valid, refused + (not plan.valid)
    assert accepted >= 5
    assert refused >= 5


def test_suggestions_are_accepted_by_the_config(micro: Micro) -> None:
    tried = 0
    for inputs in random_settings(60, seed=99):
        for suggestion in plan_batch(inputs).suggestions:
            if suggestion.complete:
                change = {suggestion.knob.rpartition(".")[2]: suggestion.nearest[0]}
                build(micro, BatchInputs(**{**vars(inputs), **change}))
                tried += 1
    assert tried > 30


WHOLE_TRAININGS = [
    {"per_device_train_batch_size": 4, "num_generations": 2, "dataset_size": 5},
    {"per_device_train_batch_size": 2, "num_generations": 4, "gradient_accumulation_steps": 2},
    {"per_device_train_batch_size": 2, "num_generations": 2, "num_iterations": 2, "max_steps": 5},
    {"per_device_train_batch_size": 2, "num_generations": 4, "steps_per_generation": 4},
    {"per_device_train_batch_size": 3, "num_generations": 3, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 2, "num_generations": 3, "generation_batch_size": 6},
    {"per_device_train_batch_size": 4, "num_generations": 4, "num_train_epochs": 1.5},
    {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "evaluates": True,
        "per_device_eval_batch_size": 4,
        "num_generations_eval": 2,
        "eval_dataset_size": 3,
    },
]


@pytest.mark.parametrize("settings", WHOLE_TRAININGS)
def test_whole_training_takes_the_planned_steps_and_samples(
    micro: Micro, settings: dict[str, Any]
) -> None:
    inputs = BatchInputs(**{"dataset_size": 4, "num_train_epochs": 1.0, **settings})
    plan = plan_batch(inputs)
    scored = {True: 0, False: 0}

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        scored[trainer.model.training] += len(completions)
        return [float(i) for i in range(len(completions))]

    trainer = build(micro, inputs, trainer_class=GRPOTrainer, reward=reward)
    trainer.train()
    assert trainer.state.global_step == plan.total_optimizer_steps
    assert scored[True] == plan.total_completions
    evaluations = math.ceil(inputs.num_train_epochs) if inputs.evaluates else 0
    assert scored[False] == evaluations * (plan.eval_completions or 0)


def test_cases_where_the_plan_is_stricter_than_the_trainer(micro: Micro) -> None:
    base = {"per_device_train_batch_size": 2, "num_generations": 2, "dataset_size": 4}
    no_steps = BatchInputs(**base, max_steps=0)
    trainer = build(micro, no_steps)
    trainer.train()
    assert trainer.state.global_step == 1
    assert not plan_batch(no_steps).valid

    nothing = BatchInputs(**{**base, "dataset_size": 0}, max_steps=3)
    trainer = build(micro, nothing)
    trainer.train()
    assert trainer.state.global_step == 0
    assert not plan_batch(nothing).valid

    empty = BatchInputs(**base, evaluates=True, eval_dataset_size=0)
    assert "eval_reward" not in build(micro, empty).evaluate()
    assert not plan_batch(empty).valid
