"""What is generated from the schema is up to date in the repository."""

import importlib.util
import json
from pathlib import Path

from grpo_cli.recipe.base import field_docs
from grpo_cli.recipe.dataset import SourceKeys

ROOT = Path(__file__).parents[2]


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_what_make_docs_would_write():
    generator = load_generator()
    assert generator.REFERENCE.read_text(encoding="utf-8") == generator.render_reference(), (
        "make docs"
    )
    assert generator.REWARDS.read_text(encoding="utf-8") == generator.render_rewards(), "make docs"
    assert generator.DIAGNOSIS.read_text(encoding="utf-8") == generator.render_diagnosis(), (
        "make docs"
    )
    written = json.loads(generator.SCHEMA.read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(generator.build_schema(), default=str)), "make docs"


def test_every_section_of_a_recipe_has_its_table():
    generator = load_generator()
    listed = {model.__name__ for _, model in generator.SECTIONS}
    # Both have the table of `KindConfig`; sources have that of their kind of dataset, and one for all.
    described = {"ToolConfig", "EnvironmentConfig"}
    described |= {each.__name__ for each in SourceKeys.__subclasses__()}
    assert set(generator.build_schema()["$defs"]) - described <= listed


def test_every_field_says_what_it_means():
    generator = load_generator()
    for title, model in (*generator.SECTIONS, *generator.KIND_SECTIONS):
        docs = field_docs(model)
        for name in model.model_fields:
            # A discriminator means what the section's title says.
            if name != "kind" or title.startswith("rewards, every"):
                assert docs.get(name), f"{title}: {name}"
