"""The rules a batch must meet, and what a broken one says.

Owns which values are wrong by themselves and which do not fit each other. What would mend them is
`suggestions.py`'s.
"""

from collections.abc import Set

from grpo_cli.batch.inputs import BatchInputs
from grpo_cli.errors import Problem

_TRAINING = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"]
_GENERATION = ["num_generations", "steps_per_generation", "generation_batch_size"]
FRESH = "generation.dynamic_sampling.max_resample"
"""Where the recipe holds how often groups are replaced, and where a lack of prompts for that is reported."""
PATHS = {
    "num_processes": "launch.num_processes",
    "max_resample": FRESH,
    **{field: f"training.{field}" for field in [*_TRAINING, "per_device_eval_batch_size"]},
    **{field: f"generation.{field}" for field in [*_GENERATION, "num_generations_eval"]},
}
"""Where the recipe holds the integers that must be positive."""
LEAST = {"num_generations": 2}
"""The smallest value of each of them, where it is not 1."""
SPLIT, GROUPS = PATHS["generation_batch_size"], PATHS["num_generations"]
DATASET, EVAL = "dataset", PATHS["per_device_eval_batch_size"]
"""Paths that broken rules are reported at."""
TIME = {"max_steps", "num_train_epochs"}
EVAL_KNOBS = {"per_device_eval_batch_size", "num_generations_eval", "num_processes"}
_EVAL_ONLY = EVAL_KNOBS - {"num_processes"}
NOT_BATCH = _EVAL_ONLY | TIME | {"eval_dataset_size"}
"""Fields the training batch can be computed without."""
_MOST_EPOCHS = 1e9
"""More is a slip of the pen; keeps steps far from where floats lose whole numbers."""


def find_senseless_values(inputs: BatchInputs) -> dict[str, Problem]:
    """Values that are wrong by themselves, by field; the rules that need them cannot be applied."""
    found = _duration_problem(inputs)
    for field, path in PATHS.items():
        value, least = getattr(inputs, field), LEAST.get(field, 1)
        if value is not None and value < least and (inputs.evaluates or field not in _EVAL_ONLY):
            why = "; advantages compare the completions of a group" if least == 2 else ""
            text = f"{field} is {value}, below {least}{why}"
            found[field] = Problem(text, f"set {path} to {least} or more", path)
    batch, steps = inputs.generation_batch_size, inputs.steps_per_generation
    if batch is not None and steps is not None:
        text = f"generation_batch_size {batch} and steps_per_generation {steps} exclude each other"
        path = PATHS["steps_per_generation"]
        found["exclusive"] = Problem(text, f"remove {path} or {SPLIT}", path)
    if inputs.evaluates and inputs.eval_dataset_size == 0:
        text = "the evaluation set has no prompts, so an evaluation yields no metric"
        fix = "add evaluation prompts, or set training.eval_strategy: no"
        found["eval_dataset_size"] = Problem(text, fix, DATASET)
    return found


def _duration_problem(inputs: BatchInputs) -> dict[str, Problem]:
    field, fix = "max_steps", "set training.max_steps to 1 or more, or to -1 to train by epochs"
    if inputs.max_steps < 0:  # any positive value overrides the epochs, whatever they are
        field, fix = "num_train_epochs", "set training.num_train_epochs above 0"
    value = getattr(inputs, field)
    fine = inputs.max_steps > 0 or 0 < value <= _MOST_EPOCHS
    text = f"{field} is {value}, which trains for no time or without end"
    return {} if fine else {field: Problem(text, fix, f"training.{field}")}


def can_evaluate(inputs: BatchInputs, senseless: Set[str]) -> bool:
    """Whether there is an evaluation batch, and it can be computed."""
    return inputs.evaluates and not senseless & (EVAL_KNOBS | {"num_generations"})


def find_broken_rules(inputs: BatchInputs, senseless: Set[str]) -> dict[str, str]:
    """What each broken rule says, by the path it is reported at."""
    said = {} if senseless - NOT_BATCH else _train_rules(inputs)
    if can_evaluate(inputs, senseless):
        batch, group = inputs.eval_batch, inputs.eval_group
        factors = f"{inputs.per_device_eval_batch_size} × {inputs.num_processes}"
        what = f"evaluation batch {factors} = {batch}"
        said[EVAL] = _uneven(what, f"hold whole groups of {group}", batch, group)
    return {path: message for path, message in said.items() if message}


def _train_rules(inputs: BatchInputs) -> dict[str, str | None]:
    micro, batch, group = inputs.micro_batch, inputs.generation_batch, inputs.num_generations
    factors = f"{inputs.per_device_train_batch_size} × {inputs.num_processes}"
    what = f"generation batch {factors} × {batch // micro} = {batch}"
    if inputs.generation_batch_size is not None:
        what = f"generation batch of {batch}"
    size, needed = inputs.dataset_size, batch // group
    short = size is not None and size < needed and batch % group == 0
    lacking = (
        f"training prompts ({size}) are fewer than one generation batch takes, so no step would be "
        f"trained ({what} completions / {group} = {needed} prompts)"
    )
    rounds, most = inputs.max_resample or 0, needed * (1 + (inputs.max_resample or 0))
    scarce = (
        f"training prompts ({size}) are fewer than one generation batch and its replacements may take "
        f"({needed} prompts × (1 + {rounds}) = {most})"
    )
    return {
        SPLIT: _uneven(what, f"split into whole micro-steps of {factors} = {micro}", batch, micro),
        GROUPS: _uneven(what, f"hold whole groups of {group}", batch, group),
        DATASET: lacking if short else None,
        FRESH: scarce if size is not None and not batch % group and needed <= size < most else None,
    }


def _uneven(what: str, verb: str, batch: int, size: int) -> str | None:
    whole, rest = divmod(batch, size)
    shown = f"({batch} / {size} = {whole} remainder {rest})"
    return f"{what} completions does not {verb} {shown}" if rest else None
