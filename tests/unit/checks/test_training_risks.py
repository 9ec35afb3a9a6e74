"""Settings that run to the end and teach nothing, on machines a test does not have."""

import pytest

from grpo_cli.checks.training import check_risks
from grpo_cli.machine import Hardware
from grpo_cli.rewards.registry import find_kind
from tests.contexts import make_context
from tests.unit.probing.test_counting import recipe

VLLM = {"backend": "vllm"}
LORA = {"path": "a/b", "lora": {"r": 8}}


def risks(processes=1, gpus=0, **sections):
    machine = Hardware(gpus=gpus, cpus=8)
    made = recipe(**sections)
    kinds = {index: find_kind(each.kind) for index, each in enumerate(made.rewards)}
    found = check_risks(make_context(made, machine, num_processes=processes, rewards=kinds))
    return {(finding.subject, finding.level) for finding in found}


@pytest.mark.parametrize(
    ("machine", "sections", "expected"),
    [
        ((1, 0), {"model": LORA}, ("setting: learning rate", "warning")),
        (
            (1, 0),
            {"model": LORA, "training": {"learning_rate": 0.5}},
            ("setting: learning rate", "warning"),
        ),
        ((1, 0), {"training": {"beta": 5}}, ("setting: KL term", "warning")),
        (
            (1, 0),
            {"rewards": [{"kind": "math", "weight": -1}]},
            ("setting: reward weights", "warning"),
        ),
        (
            (1, 0),
            {"training": {"learning_rate": 3e-5}},
            ("setting: nothing holds the policy", "warning"),
        ),
        ((1, 0), {"generation": {"num_generations": 3}}, ("setting: group size", "warning")),
        ((4, 4), {}, ("setting: generation backend", "warning")),
        ((1, 1), {"generation": {**VLLM, "top_p": 0.9}}, ("setting: narrowed sampling", "warning")),
        ((1, 1), {"generation": {**VLLM, "top_k": 50}}, ("setting: narrowed sampling", "warning")),
        ((1, 1), {"generation": {**VLLM, "min_p": 0.1}}, ("setting: narrowed sampling", "warning")),
        ((1, 0), {"generation": {"temperature": 0.1}}, ("setting: temperature", "warning")),
    ],
)
def test_a_risky_setting_is_found(machine, sections, expected):
    assert expected in risks(*machine, **sections)


@pytest.mark.parametrize(
    ("machine", "sections"),
    [
        ((1, 0), {}),
        ((2, 0), {}),
        ((1, 1), {"generation": VLLM}),
        ((4, 4), {"generation": VLLM}),
        ((1, 0), {"generation": {"top_p": 0.9}}),
        ((1, 1), {"generation": {**VLLM, "min_p": 0, "top_p": 1.0}}),
        ((1, 0), {"model": LORA, "training": {"learning_rate": 1e-5}}),
        ((1, 0), {"training": {"learning_rate": 3e-5, "beta": 0.04}}),
        ((4, 0), {"launch": {"use_cpu": True}}),
    ],
)
def test_a_sound_setting_is_left_alone(machine, sections):
    assert risks(*machine, **sections) == set()


@pytest.mark.parametrize("rate", [2e-4, 0.5])
def test_a_rate_beyond_the_limit_is_reported_once(rate):
    context = make_context(recipe(training={"learning_rate": rate}), Hardware(gpus=0, cpus=8))
    (issue,) = check_risks(context)
    assert issue.path == "training.learning_rate"
    assert ("add `model.lora`" in issue.fix) is (rate < 2e-3)


def test_every_risk_says_what_was_seen_why_and_how_to_mend_it():
    bad = recipe(
        model=LORA, generation={**VLLM, "num_generations": 2, "top_p": 0.5, "temperature": 0.1}
    )
    found = list(check_risks(make_context(bad, Hardware(gpus=4, cpus=8), num_processes=4)))
    assert len(found) == 4
    assert all(each.seen and each.why and each.fix and each.path for each in found)


def test_a_setting_is_the_recipes_or_trls_default():
    given = recipe(training={"beta": 0.5}, generation={**VLLM, "vllm": {"max_model_length": 64}})
    assert given.setting("beta") == 0.5
    assert given.setting("vllm_max_model_length") == 64
    assert given.setting("max_grad_norm") == 1.0
    assert given.setting("gradient_checkpointing") is True
    assert given.setting("optim") == "adamw_torch_fused"
