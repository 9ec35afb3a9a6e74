"""What a recipe chooses, beside the defaults."""

from grpo_cli.recipe.comparison import list_choices
from grpo_cli.recipe.recipe import Recipe
from tests.run_folders import PLAIN


def test_what_must_be_given_and_what_differs_is_listed_with_its_default():
    training = {"max_steps": 40, "learning_rate": 2e-5, "gradient_checkpointing": False}
    changed = {**PLAIN, "training": training, "model": {"path": "org/model", "lora": {"r": 32}}}
    found = {each.path: each for each in list_choices(Recipe.model_validate(changed))}
    assert (found["training.learning_rate"].value, found["training.learning_rate"].default) == (
        2e-5,
        1e-6,
    )
    assert not found["model.path"].has_default
    assert found["model.lora.r"].value == 32
    assert found["rewards[0].answer"].value == "q"
    # A field of TRL's by name: what TRL would do is not the schema's to say.
    assert not found["training.gradient_checkpointing"].has_default
    assert "seed" not in found
    assert "training.per_device_train_batch_size" not in found
