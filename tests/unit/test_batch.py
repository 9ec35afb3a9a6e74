"""The batch arithmetic: sums worked by hand, and what must hold for every setting."""

import json
import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.batch.explanation import derive
from grpo_cli.batch.plan import BatchInputs, BatchPlan, Suggestion, as_json, plan_batch

EXAMPLE = BatchInputs(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_processes=3,
    num_generations=6,
    dataset_size=8000,
    num_train_epochs=1,
)
small = st.integers(1, 12)
settings_of_any_kind = st.builds(
    BatchInputs,
    per_device_train_batch_size=small,
    gradient_accumulation_steps=small,
    num_processes=st.integers(1, 8),
    num_generations=st.integers(1, 12),
    steps_per_generation=st.none() | small,
    generation_batch_size=st.none() | st.none() | st.integers(1, 96),
    num_iterations=st.integers(1, 3),
    num_train_epochs=st.sampled_from([0.3, 1.0, 1.5, 3.0]),
    max_steps=st.sampled_from([-1, 0, 1, 7]),
    dataset_size=st.none() | st.integers(0, 60),
    evaluates=st.booleans(),
    per_device_eval_batch_size=small,
    num_generations_eval=st.none() | st.integers(1, 6),
    eval_dataset_size=st.none() | st.integers(0, 20),
)
# The machine is shared, so the time of one example says nothing.
unhurried = settings(deadline=None)


def paths(plan: BatchPlan) -> list[str]:
    return [problem.path for problem in plan.problems]


def offers(plan: BatchPlan) -> dict[str, tuple[int, ...]]:
    return {suggestion.knob: suggestion.nearest for suggestion in plan.suggestions}


def change(inputs: BatchInputs, knob: str, value: int) -> BatchInputs:
    edit: dict[str, Any] = {knob.rpartition(".")[2]: value}
    return replace(inputs, **edit)


def obeys_the_rules(i: BatchInputs) -> bool:
    """The rules once more, in the trainer's own terms, for values that are not negative."""
    if i.num_generations < 2 or i.max_steps == 0 or (i.eval_dataset_size == 0 and i.evaluates):
        return False
    if i.generation_batch_size is not None and i.steps_per_generation is not None:
        return False
    micro_batch = i.per_device_train_batch_size * i.num_processes
    batch = micro_batch * (i.steps_per_generation or i.gradient_accumulation_steps)
    batch = i.generation_batch_size or batch
    if batch % micro_batch or batch % i.num_generations:
        return False
    if i.dataset_size is not None and i.dataset_size < batch // i.num_generations:
        return False
    eval_batch = i.per_device_eval_batch_size * i.num_processes
    return not i.evaluates or eval_batch % (i.num_generations_eval or i.num_generations) == 0


def test_example_holds_24_completions_a_step_and_takes_2000_steps() -> None:
    plan = plan_batch(EXAMPLE)
    assert plan.valid
    assert plan.completions_per_micro_step == 12
    assert plan.completions_per_optimizer_step == 24
    assert plan.prompts_per_optimizer_step == 4
    assert (plan.generation_batch_size, plan.steps_per_generation) == (24, 2)
    assert plan.prompts_per_generation_batch == 4
    assert plan.dropped_prompts_per_epoch == 0
    assert plan.micro_steps_per_epoch == 4000
    assert plan.optimizer_steps_per_epoch == plan.total_optimizer_steps == 2000
    assert plan.total_completions == 48_000
    assert plan.eval_valid is None


def test_tail_of_the_dataset_is_dropped() -> None:
    plan = plan_batch(replace(EXAMPLE, dataset_size=8003))
    assert plan.dropped_prompts_per_epoch == 3
    assert plan.total_optimizer_steps == 2000


def test_iterations_multiply_steps_but_not_samples() -> None:
    plan = plan_batch(replace(EXAMPLE, num_iterations=3))
    assert plan.total_optimizer_steps == 6000
    assert plan.total_completions == 48_000


def test_last_step_of_an_epoch_may_hold_fewer_micro_steps() -> None:
    inputs = replace(
        EXAMPLE, gradient_accumulation_steps=4, steps_per_generation=2, dataset_size=20
    )
    plan = plan_batch(inputs)
    assert plan.micro_steps_per_epoch == 10
    assert plan.optimizer_steps_per_epoch == 3
    assert plan_batch(replace(inputs, num_train_epochs=2)).total_optimizer_steps == 6


def test_training_that_ends_inside_a_generation_batch_has_sampled_it_whole() -> None:
    inputs = replace(EXAMPLE, steps_per_generation=6, dataset_size=24, max_steps=4)
    # 4 steps of 2 micro-steps: the second generation batch of 6 is begun at the seventh.
    plan = plan_batch(inputs)
    assert plan.total_generation_batches == 2
    assert plan.total_completions == 2 * 72


def test_max_steps_over_several_epochs_starts_each_on_a_fresh_generation_batch() -> None:
    inputs = replace(
        EXAMPLE, gradient_accumulation_steps=4, steps_per_generation=3, dataset_size=6, max_steps=3
    )
    # An epoch is one generation batch of 3 micro-steps, shorter than the 4 of a full step.
    plan = plan_batch(inputs)
    assert plan.optimizer_steps_per_epoch == 1
    assert plan.total_completions == 3 * 36


@pytest.mark.parametrize(("epochs", "steps"), [(0.3, 600), (0.0001, 1), (1.00001, 2001)])
def test_fractional_epochs_are_rounded_up_to_whole_steps(epochs: float, steps: int) -> None:
    assert plan_batch(replace(EXAMPLE, num_train_epochs=epochs)).total_optimizer_steps == steps


def test_generation_batch_size_sets_the_steps_per_generation() -> None:
    plan = plan_batch(replace(EXAMPLE, generation_batch_size=72))
    assert plan.steps_per_generation == 6
    assert plan.total_optimizer_steps == 1998  # 666 generation batches of 12 prompts


def test_prompts_of_a_step_are_fractional_where_it_holds_parts_of_groups() -> None:
    plan = plan_batch(replace(EXAMPLE, gradient_accumulation_steps=1, generation_batch_size=72))
    assert plan.prompts_per_optimizer_step == 2
    plan = plan_batch(
        replace(EXAMPLE, gradient_accumulation_steps=1, generation_batch_size=72, num_generations=8)
    )
    assert plan.valid
    assert plan.prompts_per_optimizer_step == 1.5


def test_unknown_dataset_leaves_unknown_what_depends_on_it() -> None:
    plan = plan_batch(replace(EXAMPLE, dataset_size=None))
    assert plan.valid
    assert plan.optimizer_steps_per_epoch is plan.total_optimizer_steps is None
    assert plan.total_completions is plan.dropped_prompts_per_epoch is None
    plan = plan_batch(replace(EXAMPLE, dataset_size=None, max_steps=50))
    assert (plan.total_optimizer_steps, plan.total_completions) == (50, 1200)
    uneven = replace(EXAMPLE, dataset_size=None, max_steps=50, steps_per_generation=3)
    assert plan_batch(uneven).total_completions is None


def test_broken_groups_show_the_sum_and_the_nearest_values_of_each_knob() -> None:
    plan = plan_batch(replace(EXAMPLE, num_generations=7))
    assert not plan.valid
    (problem,) = plan.problems
    assert problem.path == "generation.num_generations"
    assert problem.seen == (
        "generation batch 4 × 3 × 2 = 24 completions does not hold whole groups of 7 "
        "(24 / 7 = 3 remainder 3)"
    )
    assert problem.fix.startswith("set generation.num_generations to 6 or 8; or set ")
    assert plan.suggestions[0] == Suggestion("generation.num_generations", 7, (6, 8))
    assert offers(plan) == {
        "generation.num_generations": (6, 8),
        "training.per_device_train_batch_size": (7,),
        "training.gradient_accumulation_steps": (7,),
        "launch.num_processes": (7,),
    }
    assert plan.total_optimizer_steps is None


@pytest.mark.parametrize("knob", ["steps_per_generation", "generation_batch_size"])
def test_suggestions_name_the_knob_that_sets_the_generation_batch(knob: str) -> None:
    plan = plan_batch(change(replace(EXAMPLE, num_generations=5), knob, 24))
    assert f"generation.{knob}" in offers(plan)
    assert "training.gradient_accumulation_steps" not in offers(plan)


def test_generation_batch_must_split_into_micro_steps() -> None:
    plan = plan_batch(replace(EXAMPLE, generation_batch_size=30))
    assert paths(plan) == ["generation.generation_batch_size"]
    assert "4 × 3 = 12 (30 / 12 = 2 remainder 6)" in plan.problems[0].seen
    assert offers(plan)["generation.generation_batch_size"] == (24, 36)


def test_too_small_dataset_is_an_error_also_with_max_steps() -> None:
    plan = plan_batch(replace(EXAMPLE, dataset_size=3, max_steps=10))
    assert paths(plan) == ["dataset"]
    assert "4 × 3 × 2 = 24 completions / 6 = 4 prompts" in plan.problems[0].seen
    assert plan.problems[0].fix.startswith("add prompts; or set ")
    assert offers(plan)["training.per_device_train_batch_size"] == (3,)
    assert offers(plan)["training.gradient_accumulation_steps"] == (1,)
    assert plan.total_optimizer_steps is None
    assert plan_batch(replace(EXAMPLE, dataset_size=4)).total_optimizer_steps == 1


def test_evaluation_rule_holds_only_where_training_evaluates() -> None:
    inputs = replace(EXAMPLE, per_device_eval_batch_size=5)
    assert plan_batch(inputs).valid
    plan = plan_batch(replace(inputs, evaluates=True))
    assert paths(plan) == ["training.per_device_eval_batch_size"]
    assert (plan.valid, plan.eval_valid) == (False, False)
    assert "5 × 3 = 15 completions does not hold whole groups of 6" in plan.problems[0].seen
    assert offers(plan) == {
        "training.per_device_eval_batch_size": (4, 6),
        "generation.num_generations_eval": (5, 15),
        "launch.num_processes": (6,),
    }
    assert plan.total_optimizer_steps == 2000


def test_several_processes_repeat_prompts_to_fill_the_last_evaluation_batch() -> None:
    inputs = replace(EXAMPLE, evaluates=True, per_device_eval_batch_size=4, eval_dataset_size=5)
    plan = plan_batch(inputs)
    assert (plan.eval_prompts_per_step, plan.eval_steps) == (2, 3)
    assert (plan.eval_completions, plan.eval_repeated_prompts) == (36, 1)
    alone = plan_batch(replace(inputs, num_processes=1, per_device_eval_batch_size=12))
    assert (alone.eval_steps, alone.eval_completions, alone.eval_repeated_prompts) == (3, 30, 0)


def test_empty_evaluation_set_is_an_error_beside_its_divisibility() -> None:
    inputs = replace(EXAMPLE, evaluates=True, eval_dataset_size=0, per_device_eval_batch_size=5)
    plan = plan_batch(inputs)
    assert paths(plan) == ["dataset", "training.per_device_eval_batch_size"]
    assert plan.eval_valid is False


def test_all_problems_are_found_at_once() -> None:
    plan = plan_batch(
        replace(
            EXAMPLE,
            generation_batch_size=20,
            num_generations=8,
            evaluates=True,
            per_device_eval_batch_size=1,
            max_steps=0,
        )
    )
    assert paths(plan) == [
        "training.max_steps",
        "generation.generation_batch_size",
        "generation.num_generations",
        "training.per_device_eval_batch_size",
    ]
    assert not any(suggestion.complete for suggestion in plan.suggestions)


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("per_device_train_batch_size", 0, "training.per_device_train_batch_size"),
        ("gradient_accumulation_steps", -2, "training.gradient_accumulation_steps"),
        ("num_processes", 0, "launch.num_processes"),
        ("num_generations", 1, "generation.num_generations"),
        ("steps_per_generation", 0, "generation.steps_per_generation"),
        ("generation_batch_size", 0, "generation.generation_batch_size"),
        ("num_iterations", 0, "training.num_iterations"),
        ("max_steps", 0, "training.max_steps"),
        ("num_train_epochs", 0.0, "training.num_train_epochs"),
        ("num_train_epochs", math.inf, "training.num_train_epochs"),
        ("num_train_epochs", math.nan, "training.num_train_epochs"),
        ("per_device_eval_batch_size", 0, "training.per_device_eval_batch_size"),
        ("num_generations_eval", 0, "generation.num_generations_eval"),
    ],
)
def test_senseless_value_is_one_problem_at_its_place(field: str, value: Any, path: str) -> None:
    inputs = replace(EXAMPLE, evaluates=True, per_device_eval_batch_size=2)
    plan = plan_batch(replace(inputs, **{field: value}))
    assert paths(plan) == [path]
    assert str(value) in plan.problems[0].seen
    derive(plan)


def test_epochs_do_not_matter_where_max_steps_is_set() -> None:
    assert plan_batch(replace(EXAMPLE, num_train_epochs=0.0, max_steps=5)).valid


def test_generation_batch_size_and_steps_per_generation_exclude_each_other() -> None:
    inputs = replace(EXAMPLE, generation_batch_size=24, steps_per_generation=2)
    assert paths(plan_batch(inputs)) == ["generation.steps_per_generation"]


def test_suggestion_that_mends_one_problem_of_two_says_so() -> None:
    inputs = replace(EXAMPLE, num_generations=7, evaluates=True, num_generations_eval=5)
    plan = plan_batch(inputs)
    assert {s.knob: s.complete for s in plan.suggestions}["generation.num_generations"] is False
    assert offers(plan)["generation.num_generations_eval"] == (4, 6)


def test_derivation_reads_as_a_sum_on_paper() -> None:
    lines = {line.label: line for line in derive(plan_batch(EXAMPLE))}
    first = lines["completions per micro-step"]
    assert (first.formula, first.result) == ("4 per device × 3 processes", "12")
    assert list(lines) == [
        "completions per micro-step",
        "completions per optimizer step",
        "prompts per optimizer step",
        "generation batch size",
        "prompts per generation batch",
        "generation batches per epoch",
        "dropped prompts per epoch",
        "micro-steps per epoch",
        "optimizer steps per epoch",
        "total optimizer steps",
        "total completions",
    ]
    assert lines["total optimizer steps"].formula == "⌈1 epoch × 2,000⌉"
    assert lines["total completions"].result == "48,000"


def test_derivation_shows_the_remainder_and_the_short_step() -> None:
    broken = {line.label: line for line in derive(plan_batch(replace(EXAMPLE, num_generations=7)))}
    assert broken["prompts per generation batch"].result == "3 remainder 3"
    assert "total completions" not in broken
    inputs = replace(
        EXAMPLE, gradient_accumulation_steps=4, steps_per_generation=2, dataset_size=20
    )
    short = {line.label: line for line in derive(plan_batch(inputs))}
    assert short["optimizer steps per epoch"].note == "the last one has fewer micro-steps: 2"


def test_derivation_of_evaluation() -> None:
    inputs = replace(EXAMPLE, evaluates=True, per_device_eval_batch_size=4, eval_dataset_size=5)
    lines = {line.label: line for line in derive(plan_batch(inputs))}
    assert lines["eval prompts per step"].formula == "12 completions / 6 per group"
    assert lines["eval completions"].formula == "(5 + 1 repeated) prompts × 6"
    assert lines["eval completions"].result == "36"


def test_plan_is_frozen() -> None:
    plan = plan_batch(EXAMPLE)
    with pytest.raises(FrozenInstanceError):
        plan.valid = False  # type: ignore[misc]


def test_json_holds_every_count_and_the_suggestions() -> None:
    values = json.loads(json.dumps(as_json(plan_batch(replace(EXAMPLE, num_generations=7)))))
    assert values["valid"] is False
    assert values["problems"][0]["path"] == "generation.num_generations"
    assert values["suggestions"][0]["nearest"] == [6, 8]
    assert values["completions_per_optimizer_step"] == 24
    assert values["total_optimizer_steps"] is None
    assert values["inputs"]["dataset_size"] == 8000


@unhurried
@given(settings_of_any_kind)
def test_every_setting_gets_a_verdict_a_derivation_and_json(inputs: BatchInputs) -> None:
    plan = plan_batch(inputs)
    assert plan.valid == (not plan.problems) == obeys_the_rules(inputs)
    assert all(line.result and line.formula for line in derive(plan))
    json.dumps(as_json(plan))


@unhurried
@given(settings_of_any_kind)
def test_counts_of_a_valid_plan_add_up(inputs: BatchInputs) -> None:
    plan = plan_batch(inputs)
    if not plan.valid or inputs.dataset_size is None:
        return
    batches, prompts = plan.generation_batches_per_epoch, plan.prompts_per_generation_batch
    assert plan.generation_batch_size == prompts * inputs.num_generations
    assert batches * prompts + plan.dropped_prompts_per_epoch == inputs.dataset_size
    assert 0 <= plan.dropped_prompts_per_epoch < prompts
    full_steps = plan.optimizer_steps_per_epoch * inputs.gradient_accumulation_steps
    assert 0 <= full_steps - plan.micro_steps_per_epoch < inputs.gradient_accumulation_steps
    assert plan.total_optimizer_steps >= 1
    assert plan.total_completions % plan.generation_batch_size == 0


@unhurried
@given(settings_of_any_kind)
def test_samples_are_those_of_a_loop_that_counts_one_by_one(inputs: BatchInputs) -> None:
    plan = plan_batch(inputs)
    if not plan.valid or inputs.dataset_size is None:
        return
    sampled = steps = micro_step = 0
    while steps < plan.total_optimizer_steps:
        place = micro_step % plan.micro_steps_per_epoch
        sampled += place % (plan.steps_per_generation * inputs.num_iterations) == 0
        last = place + 1 == plan.micro_steps_per_epoch
        steps += last or (place + 1) % inputs.gradient_accumulation_steps == 0
        micro_step += 1
    assert plan.total_generation_batches == sampled


@unhurried
@given(settings_of_any_kind)
def test_complete_suggestions_are_valid_and_nothing_nearer_is(inputs: BatchInputs) -> None:
    plan = plan_batch(inputs)
    for suggestion in plan.suggestions:
        if not suggestion.complete:
            continue
        for value in suggestion.nearest:
            assert obeys_the_rules(change(inputs, suggestion.knob, value))
            between = range(min(value, suggestion.value) + 1, max(value, suggestion.value))
            for nearer in between:
                assert not obeys_the_rules(change(inputs, suggestion.knob, nearer))


@unhurried
@given(settings_of_any_kind)
def test_no_mending_value_of_a_single_knob_is_missed(inputs: BatchInputs) -> None:
    plan = plan_batch(inputs)
    if paths(plan) != ["generation.num_generations"]:
        return
    limit = 2 * inputs.num_generations
    for knob in ("per_device_train_batch_size", "num_processes", "num_generations"):
        mends = any(obeys_the_rules(change(inputs, knob, n)) for n in range(1, limit))
        offered = {path.rpartition(".")[2] for path in offers(plan)}
        assert knob in offered or not mends


@unhurried
@given(settings_of_any_kind)
def test_suggestions_come_smallest_relative_change_first(inputs: BatchInputs) -> None:
    changes = [abs(s.nearest[0] - s.value) / s.value for s in plan_batch(inputs).suggestions]
    assert changes == sorted(changes)


def test_replacements_take_prompts_but_no_steps() -> None:
    plan = plan_batch(replace(EXAMPLE, max_resample=3))
    assert plan.most_prompts_per_generation_batch == 16
    assert plan.total_optimizer_steps == plan_batch(EXAMPLE).total_optimizer_steps
    (line,) = [line for line in derive(plan) if line.label.startswith("most prompts")]
    assert (line.formula, line.result) == ("4 prompts × (1 + 3 rounds)", "16")
    assert plan_batch(EXAMPLE).most_prompts_per_generation_batch is None


def test_a_batch_and_its_replacements_find_enough_prompts() -> None:
    scarce = replace(EXAMPLE, max_resample=3, dataset_size=15)
    plan = plan_batch(scarce)
    assert paths(plan) == ["generation.dynamic_sampling.max_resample"]
    assert "(15)" in plan.problems[0].seen
    assert "(4 prompts × (1 + 3) = 16)" in plan.problems[0].seen
    assert offers(plan)["generation.dynamic_sampling.max_resample"] == (2,)
    assert plan_batch(replace(scarce, dataset_size=16)).valid
    # Where not even a batch finds them, that alone is said.
    assert paths(plan_batch(replace(scarce, dataset_size=3))) == ["dataset"]
