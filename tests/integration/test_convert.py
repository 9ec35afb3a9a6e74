"""A dump of TRL's own config is converted to a recipe that passes check."""

import json

import pytest
import yaml


@pytest.mark.slow
@pytest.mark.parametrize("form", [json, yaml])
def test_a_dump_of_trls_config_passes_check_once_what_it_lacks_is_written(form, tmp_path):
    from trl import GRPOConfig

    from grpo_cli.checks.recipe import check_recipe
    from grpo_cli.convert.conversion import convert_file

    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        learning_rate=2e-6,
        gradient_accumulation_steps=4,
        warmup_steps=0.1,
        report_to="none",
        bf16=False,
        use_cpu=True,
    ).to_dict()
    assert config["generation_batch_size"] == 32
    path = tmp_path / f"dump.{form.__name__}"
    path.write_text((json.dumps if form is json else yaml.safe_dump)(config), encoding="utf-8")
    output = tmp_path / "new.yaml"
    converted = convert_file(path, None, output)
    assert [each for each in converted.problems if each.level == "error"] == []
    assert set(converted.report.to_do) == {"model.path", "dataset", "rewards"}
    missing = [
        "model.path=org/model",
        "dataset={kind: hub, path: org/rows}",
        "rewards=[{kind: think_format}]",
    ]
    recipe = check_recipe(output, missing).recipe
    assert (recipe.generation.steps_per_generation, recipe.training.warmup_steps) == (4, 0.1)
    assert (recipe.training.learning_rate, recipe.launch.use_cpu) == (2e-6, True)
