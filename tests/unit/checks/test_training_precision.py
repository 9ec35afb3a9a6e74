import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.checks.training import check_precision
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import load_recipe
from tests.contexts import make_context
from tests.recipe_texts import write_recipe

OLD, NEW, UNKNOWN = (Hardware(gpus=0, cpus=2, bfloat16=has) for has in (False, True, None))


@pytest.mark.parametrize(
    ("hardware", "flags", "expected"),
    [
        (OLD, ["model.dtype=bfloat16"], ["model.dtype"]),
        (OLD, ["model.dtype=float32", "training.bf16=true"], ["training.bf16"]),
        (OLD, ["model.dtype=auto"], []),
        (NEW, ["model.dtype=bfloat16"], []),
        (UNKNOWN, ["model.dtype=bfloat16"], []),
        (Hardware(gpus=1, cpus=2, bfloat16=False), ["model.dtype=bfloat16"], []),
        # The nodes of a job may have GPUs.
        (OLD, ["model.dtype=bfloat16", "launch.slurm={time: 60}"], []),
        (OLD, ["training.fp16=true", "launch.slurm={time: 60}"], []),
    ],
)
def test_an_emulated_precision_is_told(tmp_path, hardware, flags, expected):
    flags = [*flags, "training.learning_rate=1e-4"]
    problems = list(
        check_precision(make_context(load_recipe(write_recipe(tmp_path), flags), hardware))
    )
    assert [problem.path for problem in problems] == expected
    assert all(problem.level == "warning" for problem in problems)


GPUS = Hardware(gpus=2, cpus=2, names=("0", "1"))


@pytest.mark.parametrize(("flags", "said"), [(["training.bf16=false"], True), ([], False)])
def test_flash_attention_needs_16_bits(tmp_path, flags, said):
    settings = ["model.dtype=float32", "model.attn_implementation=flash_attention_2", *flags]
    found = check_precision(make_context(load_recipe(write_recipe(tmp_path), settings), GPUS))
    assert [each.path for each in found] == ["model.attn_implementation"] * said


def test_fp16_with_all_weights_in_float16_is_refused(tmp_path):
    def check(*flags):
        recipe = load_recipe(write_recipe(tmp_path), ["training.fp16=true", *flags])
        return [each.path for each in check_precision(make_context(recipe, GPUS))]

    assert check("model.dtype=float16") == ["model.dtype"]
    assert check("model.dtype=float16", "model.lora={r: 4}") == check("model.dtype=float32") == []


@pytest.mark.parametrize(
    ("hardware", "flags", "lost"),
    [
        (GPUS, ["training.learning_rate=4e-5"], True),
        (GPUS, ["launch.strategy=ddp"], True),
        (GPUS, ["training.learning_rate=5e-5"], False),
        (GPUS, ["model.lora={r: 4}"], False),
        (GPUS, ["model.dtype=float32"], False),
        (
            GPUS,
            ["training.optim=adamw_torch_8bit", "training.optim_args=bf16_stochastic_round=True"],
            False,
        ),
        (GPUS, ["training.optim=adamw_torch_8bit"], True),
        # Their optimizers change float32 weights, if the model is computed in bf16.
        (GPUS, ["launch.strategy=fsdp2"], False),
        (GPUS, ["launch.strategy=zero2"], False),
        (GPUS, ["launch.strategy=zero2", "training.bf16=false"], True),
        (NEW, ["launch.strategy=zero2"], True),
    ],
)
def test_all_weights_in_bfloat16_and_a_rate_that_is_rounded_away_are_an_error(
    tmp_path, hardware, flags, lost
):
    recipe = load_recipe(
        write_recipe(tmp_path), ["model.dtype=bfloat16", "training.learning_rate=1e-6", *flags]
    )
    problems = list(check_precision(make_context(recipe, hardware)))
    assert [(each.path, each.level) for each in problems] == [("model.dtype", "error")] * lost
    assert all("rounded away" in each.seen and "float32" in each.fix for each in problems)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [([], "float32"), (["model.lora={r: 4}"], "auto"), (["model.dtype=bfloat16"], "bfloat16")],
)
def test_auto_is_float32_if_all_weights_are_trained(tmp_path, flags, dtype):
    checked = check_recipe(write_recipe(tmp_path), flags, NEW)
    assert checked.loaded.recipe.model.dtype == dtype


@pytest.mark.parametrize(
    ("hardware", "flags", "refused"),
    [
        (GPUS, [], True),
        (GPUS, ["model.lora={r: 4}", "model.dtype=bfloat16"], True),
        (GPUS, ["training.bf16=false"], False),
        (GPUS, ["model.dtype=bfloat16", "training.learning_rate=1e-4"], False),
        (NEW, [], False),
    ],
)
def test_sampling_that_rounds_the_trained_weights_is_refused(tmp_path, hardware, flags, refused):
    backend = "generation.backend=transformers_continuous_batching"
    checked = check_recipe(write_recipe(tmp_path), [backend, *flags], hardware)
    found = [each.path for each in checked.errors if "rounds the trained weights" in each.seen]
    assert found == ["generation.backend"] * refused
