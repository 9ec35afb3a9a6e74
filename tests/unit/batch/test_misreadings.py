"""What is often misread: sums worked by hand, and what must hold for every setting."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from grpo_cli.batch import BatchInputs, find_misreadings, plan_batch
from tests.unit.test_batch import EXAMPLE, settings_of_any_kind, unhurried


def read(inputs):
    return find_misreadings(plan_batch(inputs))


def values(misreadings):
    return [(each.claimed.value, each.actual.value, each.right_here) for each in misreadings]


def test_the_tutorials_example_is_pinned_number_by_number():
    plan = plan_batch(EXAMPLE)
    assert plan.completions_per_micro_step == 12
    assert plan.completions_per_optimizer_step == 24
    assert plan.prompts_per_optimizer_step == 4
    assert plan.generation_batch_size == 24
    assert plan.steps_per_generation == 2
    assert plan.prompts_per_generation_batch == 4
    assert plan.generation_batches_per_epoch == 2000
    assert plan.dropped_prompts_per_epoch == 0
    assert plan.micro_steps_per_epoch == 4000
    assert plan.optimizer_steps_per_epoch == plan.total_optimizer_steps == 2000
    assert plan.total_generation_batches == 2000
    assert plan.total_completions == 48_000


def test_the_tutorials_example_misread():
    """24 places a step hold 24 completions of 4 prompts; 24 prompts would be 144. 4 / 6 does not divide,
    4 · 3 = 12 does, and 4 · 3 · 2 = 24, which counts, does. 8000 / 24 = 333.3; 8000 · 6 / 24 = 2000."""
    found = read(EXAMPLE)
    assert [each.topic for each in found] == ["unit", *["divisibility"] * 2, *["steps"] * 2]
    assert values(found) == [
        (144, 24, False),
        (False, True, False),
        (True, True, True),
        (334, 2000, False),
        (2000, 2000, True),
    ]
    unit, per_device, _, without_group, simple = found
    assert unit.claimed.text == "144 completions a step (4 × 3 × 2 = 24 prompts, × 6)"
    assert unit.actual.text == "24 completions a step (4 × 3 × 2), of 4 prompts (/ 6)"
    assert "TRL 0.14" in unit.because
    assert "2776" in unit.source
    assert per_device.claimed.text == "4 / 6 = 0 remainder 4: refused"
    assert per_device.actual.text == "generation batch 4 × 3 × 2 = 24; 24 / 6 = 4: allowed"
    assert without_group.claimed.text == "334 steps (1 × 8,000 / 24 = 333.333, rounded up)"
    assert simple.because.endswith("here all of that holds")


def test_the_simple_formula_fails_for_each_of_its_reasons():
    """10 prompts in generation batches of 4: two, and 2 prompts dropped: 2 steps; on paper 10 · 6 / 24 = 2.5."""
    dropped = read(replace(EXAMPLE, dataset_size=10))[-1]
    assert (dropped.claimed.value, dropped.actual.value) == (3, 2)
    assert "2 of 10 prompts are dropped" in dropped.because
    repeated = read(replace(EXAMPLE, num_iterations=2))[-1]
    assert (repeated.claimed.value, repeated.actual.value) == (2000, 4000)
    assert "trained on 2 times" in repeated.because
    # 36 completions of 6 prompts a generation batch: one of 3 micro-steps; 3 / 2 is 2 steps, on paper 1.5.
    uneven = read(replace(EXAMPLE, steps_per_generation=3, dataset_size=6))[-1]
    assert (uneven.claimed.value, uneven.actual.value, uneven.right_here) == (2, 2, True)
    assert "3 micro-steps leave 1 after steps of 2" in uneven.because


def test_accumulation_is_a_rule_of_its_own_only_where_it_is_not_the_generation_batch():
    """2 · 1 · 2 = 4 does not hold a group of 3, 2 · 1 · 3 = 6 does."""
    inputs = BatchInputs(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=3,
        num_generations=3,
    )
    third = read(inputs)[3]
    assert third.claim.startswith("per_device_train_batch_size × processes × gradient")
    assert values([third]) == [(False, True, False)]
    assert "TRL 0.17" in third.because
    assert len(read(inputs)) == 6


def test_a_batch_that_is_set_may_hold_groups_and_yet_not_split():
    found = read(replace(EXAMPLE, generation_batch_size=30))
    assert found[1].actual.value is True
    assert found[1].actual.text == (
        "generation batch generation_batch_size = 30; 30 / 6 = 5: allowed by this rule, but it does not "
        "split into micro-steps of 12"
    )
    assert found[-1].actual.text == "unknown until the sizes fit"


def test_without_the_number_of_prompts_steps_are_not_known():
    *_, without_group, simple = read(replace(EXAMPLE, dataset_size=None))
    assert without_group.right_here is None
    assert simple.claimed.value is None
    assert "--dataset-size" in simple.claimed.text


def test_max_steps_decides_whatever_is_computed():
    *_, simple = read(replace(EXAMPLE, max_steps=40))
    assert simple.actual.text == "40 steps, as max_steps sets"
    assert simple.because.startswith("max_steps is set")


def test_settings_that_make_no_sense_are_not_misread_on_top():
    assert read(replace(EXAMPLE, num_generations=1)) == []


@unhurried
@given(settings_of_any_kind)
def test_what_is_said_to_be_is_what_the_plan_says(inputs):
    plan = plan_batch(inputs)
    found = find_misreadings(plan)
    assert bool(found) == (plan.completions_per_micro_step is not None)
    for each in found:
        if each.topic == "unit":
            assert each.actual.value == plan.completions_per_optimizer_step
            assert each.claimed.value > each.actual.value
        elif each.topic == "divisibility":
            assert each.actual.value == (plan.prompts_per_generation_batch is not None)
        else:
            assert each.actual.value == plan.total_optimizer_steps
    assert json.loads(json.dumps([each.as_json() for each in found])) is not None


@unhurried
@given(settings_of_any_kind)
def test_the_simple_formula_is_right_wherever_its_conditions_hold(inputs):
    plan = plan_batch(replace(inputs, max_steps=-1))
    found = find_misreadings(plan)
    if not found or plan.total_optimizer_steps is None:
        return
    simple = found[-1]
    holds = (
        plan.dropped_prompts_per_epoch == 0
        and inputs.num_iterations == 1
        and plan.micro_steps_per_epoch % inputs.gradient_accumulation_steps == 0
    )
    assert simple.because.endswith("all of that holds") == holds
    if holds:
        assert simple.right_here


@pytest.mark.parametrize("size", [8000, 7999])
def test_reasons_are_told_only_where_they_hold(size):
    *_, simple = read(replace(EXAMPLE, dataset_size=size))
    assert ("are dropped" in simple.because) == (size == 7999)
