import pytest

from grpo_cli.preflight.hardware import Hardware
from grpo_cli.preflight.precision import check_precision
from grpo_cli.recipe.loading import load_recipe
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
    ],
)
def test_an_emulated_precision_is_told(tmp_path, hardware, flags, expected):
    problems = list(check_precision(load_recipe(write_recipe(tmp_path), flags), hardware))
    assert [problem.path for problem in problems] == expected
    assert all(problem.level == "warning" for problem in problems)
