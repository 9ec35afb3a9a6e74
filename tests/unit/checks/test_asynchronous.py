"""What asynchronous training cannot do is named before a launch."""

import pytest

from grpo_cli.checks.asynchronous import check_async
from grpo_cli.checks.compatibility import check_compatibility
from grpo_cli.recipe.recipe import Recipe
from tests.contexts import make_context, run_check

PLAIN = {
    "name": "sums",
    "model": {"path": "org/model"},
    "dataset": {"kind": "inline", "rows": [{"q": "1"}], "prompt": {"user": "{{ q }}"}},
    "rewards": [{"kind": "math", "answer": "q"}],
    "generation": {"backend": "vllm", "vllm": {"mode": "server"}},
    "training": {"mode": "async", "max_steps": 40},
}


def check(**changes):
    merged = {
        name: {**PLAIN[name], **changes.pop(name, {})}
        if isinstance(PLAIN[name], dict)
        else PLAIN[name]
        for name in PLAIN
    }
    context = make_context(Recipe.model_validate({**merged, **changes}))
    return [*run_check(check_async, context), *check_compatibility(context)]


def test_what_it_can_do_is_noted_as_experimental():
    more = {"warmup_steps": 2, "epsilon_high": 0.3, "save_steps": 5, "stop_when": ["nan_loss"]}
    asynchronous = {"max_staleness": 2}
    (problem,) = check(
        training={**more, "asynchronous": asynchronous},
        generation={"top_p": 0.9, "chat_template_kwargs": {"enable_thinking": False}},
        model={"path": "org/model", "lora": {"r": 8}},
    )
    assert (problem.level, problem.path) == ("note", "training.mode")
    assert "experimental" in problem.seen
    assert "up to 2 steps old" in problem.seen


@pytest.mark.parametrize(
    ("section", "given", "path"),
    [
        ("training", {"beta": 0.04}, "training.beta"),
        ("training", {"loss_type": "grpo"}, "training.loss_type"),
        ("training", {"num_iterations": 2}, "training.num_iterations"),
        ("training", {"eval_strategy": "steps"}, "training.eval_strategy"),
        ("training", {"early_stopping": {}}, "training.early_stopping"),
        ("training", {"use_liger_kernel": True}, "training.use_liger_kernel"),
        ("training", {"max_steps": -1}, "training.max_steps"),
        ("training", {"scale_rewards": "none"}, "training.scale_rewards"),
        ("generation", {"steps_per_generation": 4}, "generation.steps_per_generation"),
        ("generation", {"sampling_parts": 2}, "generation.sampling_parts"),
        ("generation", {"generation_kwargs": {}}, "generation.generation_kwargs"),
        ("generation", {"backend": "transformers"}, "generation.backend"),
        ("generation", {"vllm": {"mode": "colocate"}}, "generation.vllm.mode"),
        (
            "generation",
            {"vllm": {"mode": "server", "importance_sampling_mode": "token_mask"}},
            "generation.vllm.importance_sampling_mode",
        ),
        ("model", {"quantization": "4bit"}, "model.quantization"),
        ("model", {"attn_implementation": "eager"}, "model.attn_implementation"),
        ("launch", {"strategy": "zero2"}, "launch.strategy"),
        ("launch", {"num_machines": 2}, "launch.num_machines"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(section, given, path):
    note, problem = check(**{section: {**PLAIN.get(section, {}), **given}})
    assert note.level == "note"
    assert (problem.level, problem.path) == ("error", path)
    assert problem.fix


def test_it_plays_no_episodes():
    kinds = [{"kind": "python", "path": "room.py:Room"}]
    for section in ("tools", "environment"):
        _, problem = check(**{section: kinds})
        assert (problem.level, problem.path) == ("error", section)


def test_a_section_that_nothing_reads_is_told():
    (problem,) = check(training={"mode": "sync", "asynchronous": {"max_staleness": 1}})
    assert (problem.level, problem.path) == ("warning", "training.asynchronous")
    assert check(training={"mode": "sync"}) == []


def test_every_field_that_is_let_through_is_trls():
    async_grpo = pytest.importorskip("trl.experimental.async_grpo")
    from dataclasses import fields

    from grpo_cli.checks.asynchronous import _UNREAD
    from grpo_cli.recipe.base import read_fields

    assert read_fields("AsyncGRPOConfig").keys() == {
        each.name for each in fields(async_grpo.AsyncGRPOConfig)
    }
    assert read_fields("AsyncGRPOConfig").keys() >= _UNREAD
