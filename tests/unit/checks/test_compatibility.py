"""Every field of the installed `GRPOConfig` acts, or `check` says that it does not and what it needs.

Trainings show which fields are read, and that a value changes the weights only beside its partner.
"""

import inspect
import re
import sys
from dataclasses import dataclass, fields
from functools import cache

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from trl import GRPOConfig, GRPOTrainer

from grpo_cli.checks.compatibility import PARTNERS, SCHEDULERS, check_compatibility
from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from grpo_cli.recipe.grpo_fields import default_of, home_of, key_in_home, read_grpo_fields
from grpo_cli.recipe.loading import load_recipe
from tests.contexts import make_context, plan_of
from tests.recipe_texts import write_recipe
from tests.tiny_models import make_tiny_model

GUARDED = {name: each for each in PARTNERS for name in each.fields.split()}
VALUES = {
    "cache_implementation": "static",
    "dataloader_multiprocessing_context": "spawn",
    "ddp_backend": "gloo",
    "log_level_replica": "error",
    "optim_args": "momentum=0.5",
    "vllm_importance_sampling_mode": "token_mask",
}
"""Values of fields that only take some."""
WITHOUT = {
    **{
        key: {"save_strategy": "no"}
        for key in ("save_steps", "save_total_limit", "save_only_model")
    },
    **{
        key: {"loss_type": "sapo", "num_iterations": 2}
        for key in ("delta", "epsilon", "epsilon_high")
    },
    **{key: {"num_iterations": 2} for key in GUARDED if key.startswith(("sapo_", "vespo_"))},
    **{key: {"optim": "sgd"} for key in ("adam_beta1", "adam_beta2", "adam_epsilon")},
    **{
        name: {"vllm_importance_sampling_correction": False}
        for name in GUARDED
        if name.startswith("vllm_importance_sampling_")
    },
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": False},
    "warmup_steps": {"lr_scheduler_type": "constant"},
}
"""Settings without which a field acts already."""
SCORED = {"top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"}


def other_value(name):
    """A value of a field that is not its default."""
    default, annotation = default_of(name), read_grpo_fields()[name].annotation
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default / 2 or 1
    kinds = {"dict": {"use_reentrant": True}, "bool": True, "float": 0.5, "int": 2}
    return next((value for kind, value in kinds.items() if kind in annotation), "a")


def find(folder, settings, more=(), processes=1):
    """What is found with some fields, called as TRL calls them, by path."""
    flags = [f"{key_in_home(name)}={value}" for name, value in settings.items()]
    recipe = load_recipe(write_recipe(folder), [*flags, *more])
    context = make_context(recipe, num_processes=processes, plan=plan_of(100))
    return {each.path: each for each in check_compatibility(context)}


@pytest.mark.parametrize("name", sorted(GUARDED.keys() - SCORED))
def test_a_field_without_its_partner_is_named_and_the_fix_makes_it_act(tmp_path, name):
    settings = {name: other_value(name), **WITHOUT.get(name, {})}
    path = key_in_home(name)
    issue = find(tmp_path, settings)[path]
    assert issue.fix.endswith("remove it")
    if change := re.match(r"set `([\w.]+): ([^`]+)`", issue.fix):
        assert path not in find(tmp_path, settings, [f"{change[1]}={change[2]}"])
    assert path not in find(tmp_path, WITHOUT.get(name, {}))


@pytest.mark.parametrize("name", sorted(GUARDED.keys() - SCORED))
def test_a_field_without_its_partner_is_named_once(tmp_path, name):
    settings = {name: other_value(name), **WITHOUT.get(name, {})}
    flags = [f"{key_in_home(each)}={value}" for each, value in settings.items()]
    checked = check_recipe(write_recipe(tmp_path), flags, Hardware(gpus=0, cpus=2))
    assert [each.path for each in checked.problems].count(key_in_home(name)) <= 1


ONCE = {
    "epsilon": {},
    "delta": {},
    "sapo_temperature_pos": {"loss_type": "sapo"},
    "vespo_k_neg": {"loss_type": "vespo"},
}
OFTEN = (
    {"num_iterations": 2},
    {"steps_per_generation": 2},
    {"generation_batch_size": 8},
    {"backend": "vllm"},
)


@pytest.mark.parametrize("name", ONCE)
def test_what_bounds_probability_ratios_needs_ratios_other_than_1(tmp_path, name):
    settings, path = {**ONCE[name], name: 0.1 if name == "epsilon" else 4}, key_in_home(name)
    aligned = {"generation_batch_size": 8, "gradient_accumulation_steps": 2}
    for once in ({}, aligned, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}):
        assert "learned from once" in find(tmp_path, {**settings, **once})[path].seen
    for often in OFTEN:
        flags = ["generation.backend=vllm"] if "backend" in often else []
        often = {key: value for key, value in often.items() if key != "backend"}
        assert path not in find(tmp_path, {**settings, **often}, flags)


def test_a_ratio_of_1_is_bounded_too(tmp_path):
    assert "training.delta" not in find(tmp_path, {"delta": 0.5})
    cispo = {"epsilon": 0.1, "loss_type": "cispo"}
    assert "training.epsilon" not in find(tmp_path, cispo)


def test_a_default_that_is_written_and_has_no_effect_is_named(tmp_path):
    name = "use_bias_correction_kl"
    assert default_of(name) is True
    assert "there is no KL term" in find(tmp_path, {name: "true"})[f"training.{name}"].seen
    assert not find(tmp_path, {})


def test_the_default_optimizer_is_named(tmp_path):
    assert default_of("optim") == GRPOConfig(output_dir=str(tmp_path), bf16=False).optim.value
    for name in ("optim_args", "optim_target_modules"):
        issue = find(tmp_path, {name: "a=1"})[f"training.{name}"]
        assert "the optimizer `adamw_torch_fused` does not read it" in issue.seen


def test_schedulers_take_what_transformers_gives_them():
    taken = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    found = {}
    for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items():
        names = inspect.signature(function).parameters
        if "kwargs" not in names:
            # `get_scheduler` hands nothing on to the constant ones.
            own = set() if kind.value.startswith("constant") else {*names} - taken
            found[kind.value] = frozenset(own)
    assert found == SCHEDULERS


@pytest.mark.parametrize("name", sorted({*SCHEDULERS, "reduce_lr_on_plateau", "greedy"}))
def test_a_scheduler_is_refused_exactly_if_it_cannot_be_built_and_the_fix_builds_it(tmp_path, name):
    def build(options):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        get_scheduler(name, optimizer, 1, 100, options)

    issue = find(tmp_path, {"lr_scheduler_type": name}).get("training.lr_scheduler_type")
    if name not in SCHEDULERS:
        assert "set `training.eval_strategy: steps`" in issue.fix
    elif issue is None:
        build(None)
    else:
        with pytest.raises((TypeError, ValueError)):
            build(None)
        key, value = re.search(r"\{(\w+): ([\d.]+)\}", issue.fix).groups()
        assert key in issue.seen
        build({key: type(1.0 if "." in value else 1)(value)})
        options = {
            "lr_scheduler_type": name,
            "lr_scheduler_kwargs": f"{{{key}: {value}, {key}x: 1}}",
        }
        found = find(tmp_path, options)
        assert found[f"training.lr_scheduler_kwargs.{key}x"].fix == f"write `{key}`"
        assert len(found) == 1


def test_reentrant_checkpointing_on_several_processes_is_refused_where_it_would_fail(tmp_path):
    settings = {"gradient_checkpointing_kwargs": "{use_reentrant: true}"}
    looks = {"ddp_find_unused_parameters": "true"}
    path = "training.gradient_checkpointing_kwargs.use_reentrant"
    assert path in find(tmp_path, {**settings, **looks}, processes=2)
    assert path not in find(tmp_path, {**settings, **looks})
    assert path not in find(tmp_path, settings, processes=2)
    assert path not in find(tmp_path, looks, processes=2)


# --- what trainings read -----------------------------------------------------------------------

NAMES = frozenset(field.name for field in fields(GRPOConfig))
BY_CONFIG = set(
    """bf16 fp16 tf32 torch_compile warmup_steps log_level log_level_replica log_on_each_node save_on_each_node
    ddp_backend ddp_timeout""".split()
)
"""Fields that the configuration's own methods read for the trainer."""
BY_PACKAGE = {
    *(
        "vllm_model_impl",
        "vllm_enable_sleep_mode",
        "vllm_structured_outputs_regex",
        "vllm_group_port",
    ),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_max_model_length", "run_name", "project"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
}
"""Fields that need vLLM or a tracker; resuming reads two more."""
ON_RESUME = {"ignore_data_skip", "restore_callback_states_from_checkpoint"}
BASE = {
    "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
    "num_generations": 4, "max_completion_length": 4, "max_steps": 4, "report_to": [], "logging_steps": 1,
    "learning_rate": 1e-2, "num_iterations": 2, "disable_tqdm": True, "save_strategy": "no",
}  # fmt: skip


@dataclass
class RecordingConfig(GRPOConfig):
    """Remembers which fields are read outside of the configuration."""

    def __getattribute__(self, name):
        if name in NAMES:
            file = sys._getframe(1).f_code.co_filename
            if not file.endswith(("training_args.py", "_config.py", "dataclasses.py", "<string>")):
                self.__dict__.setdefault("_read", set()).add(name)
        return super().__getattribute__(name)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in "abcdefgh"]

    def score(completions, **kwargs):
        return [float(sum(each[0]["content"].encode()) % 7) for each in completions]

    @cache
    def run_once(settings):
        out = str(tmp_path_factory.mktemp("run"))
        arguments = RecordingConfig(**{**BASE, **dict(settings), "output_dir": out})
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=score,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:1]),
        )
        trainer.train()
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        return arguments.__dict__["_read"], weights

    return lambda **settings: run_once(tuple(sorted(settings.items())))


@pytest.mark.slow
def test_every_field_that_a_recipe_takes_is_read_or_guarded(train):
    read, _ = train(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    taken = {name for name in read_grpo_fields() if home_of(name)}
    assert taken - read - GUARDED.keys() == (BY_CONFIG | BY_PACKAGE | ON_RESUME) & (
        taken - read - GUARDED.keys()
    )
    beside, _ = train(use_adaptive_entropy=True)
    assert "entropy_coef_min" in beside - read
    # Those are refused although something reads them: into what nothing of GRPO looks at.
    assert {"data_seed", "include_for_metrics", "bf16_full_eval"}.isdisjoint(taken)


LOSSES = {
    "delta": (1.01, {"loss_type": "sapo"}, {}),
    "epsilon": (1e-4, {"loss_type": "sapo"}, {}),
    "epsilon_high": (1e-4, {"num_iterations": 1}, {}),
    "sapo_temperature_neg": (9.0, {}, {"loss_type": "sapo"}),
    "sapo_temperature_pos": (
        8.0,
        {"loss_type": "sapo", "num_iterations": 1},
        {"loss_type": "sapo"},
    ),
    "vespo_k_pos": (9.0, {"loss_type": "vespo", "num_iterations": 1}, {"loss_type": "vespo"}),
    "vespo_k_neg": (9.0, {}, {"loss_type": "vespo"}),
    "vespo_lambda_pos": (9.0, {}, {"loss_type": "vespo"}),
    "vespo_lambda_neg": (9.0, {}, {"loss_type": "vespo"}),
    "entropy_coef_delta": (0.5, {}, {"use_adaptive_entropy": True, "entropy_target": 9.0}),
    "entropy_target": (9.0, {}, {"use_adaptive_entropy": True}),
    "entropy_coef_max": (0.001, {}, {"use_adaptive_entropy": True, "entropy_target": 9.0}),
    "use_bias_correction_kl": (False, {}, {"beta": 0.5}),
    "ref_model_mixup_alpha": (
        0.1,
        {"beta": 0.5},
        {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1},
    ),
    "ref_model_sync_steps": (1, {"beta": 0.5}, {"beta": 0.5, "sync_ref_model": True}),
    "off_policy_mask_threshold": (1e-9, {"num_iterations": 1}, {}),
    "adam_beta1": (0.5, {"optim": "sgd"}, {}),
    "adam_beta2": (0.5, {"optim": "adafactor"}, {}),
    "adam_epsilon": (0.5, {"optim": "adagrad"}, {}),
    "optim_args": ("momentum=0.5", {}, {"optim": "sgd"}),
    "warmup_steps": (2, {"lr_scheduler_type": "constant"}, {}),
    "num_train_epochs": (0.25, {}, {"max_steps": -1}),
}
"""A value, settings beside which it changes nothing, and beside which it does."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_value_changes_the_weights_only_beside_its_partner(train, name):
    assert name in GUARDED
    value, without, beside = LOSSES[name]
    assert torch.equal(train(**without)[1], train(**without, **{name: value})[1])
    assert not torch.equal(train(**beside)[1], train(**beside, **{name: value})[1])
