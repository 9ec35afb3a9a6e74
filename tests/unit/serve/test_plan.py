"""Which model is served, and how it is asked."""

import json
import shlex
from itertools import pairwise

import pytest

from grpo_cli.launch.server_plan import VLLM_SERVE, Listening, find_served, plan_server
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder
from tests.run_folders import make_finished_run

RECIPE = """\
name: sums
model: {path: org/model, trust_remote_code: true}
dataset:
  kind: inline
  prompt: {system: SYSTEM, user: "{{ q }}"}
  rows: [{q: "1"}]
rewards: [{kind: length, target: 3}]
"""


@pytest.fixture
def export(tmp_path):
    """A folder as `grpo export` leaves it."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "system"),
    [
        (RECIPE.replace("SYSTEM", "Don't guess."), "Don't guess."),
        (RECIPE.replace("SYSTEM", "'For {{ q }}'"), None),
        ("name: [", None),
        (None, None),
    ],
)
def test_an_export_is_asked_as_it_was_trained_and_nothing_else_is_taken(export, text, system):
    if text is not None:
        (export / "recipe.yaml").write_text(text)
    served = find_served(export, None)
    assert (served.system, served.adapter) == (system, None)
    assert not served.settings.trust_remote_code


def flags_of(source, on_gpu=False):
    listening = Listening("127.0.0.1", 8000, None, None)
    plan = plan_server(find_served(source, None), VLLM_SERVE, listening, on_gpu=on_gpu)
    return dict(pairwise(plan.argv)), plan


def test_what_the_run_was_trained_with_reaches_the_server(tmp_path):
    recipe = Recipe.model_validate(
        {
            "name": "sums",
            "model": {
                "path": "org/model",
                "revision": "abc",
                "trust_remote_code": True,
                "lora": {},
            },
            "dataset": {"kind": "inline", "prompt": {"user": "{{ q }}"}, "rows": [{"q": "1"}]},
            "rewards": [{"kind": "length", "target": 3}],
            "generation": {"chat_template_kwargs": {"enable_thinking": False}},
        }
    )
    run = RunFolder(tmp_path)
    run.write_recipe(recipe)
    run.model.mkdir()
    adapter = {"base_model_name_or_path": "org/model", "r": 16}
    (run.model / "adapter_config.json").write_text(json.dumps(adapter))
    (run.model / "chat_template.jinja").write_text("{{ messages }}")
    flags, plan = flags_of(tmp_path)
    assert flags["--revision"] == flags["--tokenizer-revision"] == "abc"
    assert flags["--chat-template"] == str(run.model / "chat_template.jinja")
    assert json.loads(flags["--default-chat-template-kwargs"]) == {"enable_thinking": False}
    assert "--trust-remote-code" in plan.argv


def test_an_exported_adapter_is_served_on_the_revision_that_it_was_trained_on(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.replace("{path:", "{lora: {}, revision: v1, path:")
    )
    for base, revision in (("org/model", "v1"), ("org/other", None)):
        adapter = {"base_model_name_or_path": base, "r": 16}
        (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
        assert find_served(tmp_path, None).settings.revision == revision


def test_a_model_of_plain_text_is_asked_in_it(export):
    text = RECIPE.replace("system: SYSTEM", "style: text")
    (export / "recipe.yaml").write_text(text)
    _, plan = flags_of(export)
    words = shlex.split(plan.curl)
    assert words[1].endswith("/v1/completions")
    assert json.loads(words[-1])["prompt"] == "Hello"


def test_a_run_knows_whether_it_was_asked_in_plain_text(tmp_path):
    run = make_finished_run(tmp_path)
    run.model.mkdir()
    assert not find_served(run.path, None).is_text
    write_json(run.manifest, {"data": {"plain_text": True}})
    assert find_served(run.path, None).is_text


def test_float32_weights_are_served_as_such(export):
    (export / "config.json").write_text('{"dtype": "float32"}')
    assert flags_of(export)[0]["--dtype"] == "float32"
    (export / "config.json").write_text('{"dtype": "bfloat16"}')
    assert "--dtype" not in flags_of(export)[0]


def test_an_adapter_is_served_in_16_bits_on_a_gpu(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("{path:", "{dtype: float32, path:"))
    adapter = {"base_model_name_or_path": "org/model", "r": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    assert flags_of(tmp_path)[0]["--dtype"] == "float32"
    assert flags_of(tmp_path, on_gpu=True)[0]["--dtype"] == "bfloat16"


def test_the_example_holds_the_system_message_and_survives_a_shell(export):
    (export / "recipe.yaml").write_text(RECIPE.replace("SYSTEM", "Don't guess."))
    _, plan = flags_of(export)
    body = json.loads(shlex.split(plan.curl)[-1])
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][0]["content"] == "Don't guess."
