"""What a model card says of a training."""

from types import SimpleNamespace

import pytest

from grpo_cli.exporting.card import _list_settings, write_card
from grpo_cli.runs.files import write_json
from tests.run_folders import make_finished_run


@pytest.mark.parametrize(("training", "steps"), [({"load_best_model_at_end": True}, 20), ({}, 40)])
def test_the_steps_are_those_of_the_model_that_is_exported(tmp_path, training, steps):
    saving = {"save_strategy": "steps", "eval_strategy": "steps", "max_steps": 40, **training}
    run = make_finished_run(tmp_path, training=saving)
    for step in (20, 40):
        checkpoint = run.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        write_json(checkpoint / "trainer_state.json", {"best_model_checkpoint": "x/checkpoint-20"})
    request = SimpleNamespace(run=run.path, recipe=run.read_recipe(), name="final")
    assert dict(_list_settings(request))["optimizer steps"] == steps


@pytest.mark.parametrize(
    ("prompt", "call"),
    [
        ({}, "generate(messages, tokenizer_encode_kwargs={'enable_thinking': False}, max_new"),
        ({"style": "text"}, 'generate("…", max_new'),
    ],
)
def test_the_snippet_asks_as_in_training(tmp_path, prompt, call):
    dataset = {"kind": "inline", "rows": [{"q": "1"}], "prompt": {"user": "{{ q }}", **prompt}}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    run = make_finished_run(tmp_path, dataset=dataset, generation=kwargs)
    request = SimpleNamespace(
        run=run.path,
        recipe=run.read_recipe(),
        name="final",
        format="safetensors",
        is_text=run.asks_in_text(),
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    write_card(request, tmp_path, {"precision": "float32", "verification": None})
    assert call in (tmp_path / "README.md").read_text()
