"""The table of TRL's and peft's fields is that of the installed versions."""

import json

from grpo_cli.recipe.base import TABLE
from tests.architecture.test_generated_docs import load_generator


def test_the_table_is_what_make_docs_would_write():
    written, installed = (
        json.loads(TABLE.read_text()),
        json.loads(load_generator().render_upstream_fields()),
    )
    for config, fields in installed.items():
        assert written[config].keys() == fields.keys(), f"{config}: make docs"
        for name, field in fields.items():
            assert written[config][name] == field, f"{config}.{name}: make docs"
