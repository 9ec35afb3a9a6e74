"""What is often misread: sums worked by hand, and what must hold for every setting."""

import json
from dataclasses import replace

from hypothesis import given

from grpo_cli.batch.explanation import find_misreadings
from grpo_cli.batch.plan import plan_batch
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
    """24 places a step hold 24 completions of 4 prompts; 24 prompts would be 144. 4 / 6 does not divide, 24, which
    counts, does. 8000 / 24 = 333.3."""
    found = read(EXAMPLE)
    assert [each.topic for each in found] == ["unit", "divisibility", "steps"]
    assert values(found) == [(144, 24, False), (False, True, False), (334, 2000, False)]
    unit, per_device, without_group = found
    assert unit.claimed.text == "144 completions a step (4 × 3 × 2 = 24 prompts, × 6)"
    assert unit.actual.text == "24 completions a step (4 × 3 × 2), of 4 prompts (/ 6)"
    assert "TRL 0.14" in unit.because
    assert "2776" in unit.source
    assert per_device.claimed.text == "4 / 6 = 0 remainder 4: refused"
    assert per_device.actual.text == "generation batch 4 × 3 × 2 = 24; 24 / 6 = 4: allowed"
    assert without_group.claimed.text == "334 steps (1 × 8,000 / 24 = 333.333, rounded up)"


def test_without_the_number_of_prompts_steps_are_not_known():
    *_, steps = read(replace(EXAMPLE, dataset_size=None))
    assert (steps.right_here, steps.claimed.value) == (None, None)
    assert "--dataset-size" in steps.claimed.text


def test_max_steps_decides_whatever_is_computed():
    *_, steps = read(replace(EXAMPLE, max_steps=40))
    assert steps.actual.text == "40 steps, as max_steps sets"


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
