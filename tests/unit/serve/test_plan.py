"""Which model is served, and how it is asked."""

import json
import shlex

import pytest

from grpo_cli.serve.plan import find_served, plan_server

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
    assert (served.system, served.settings, served.adapter) == (system, None, None)


def test_the_example_holds_the_system_message_and_survives_a_shell(export):
    (export / "recipe.yaml").write_text(RECIPE.replace("SYSTEM", "Don't guess."))
    plan = plan_server(
        find_served(export, None),
        "vllm",
        host="127.0.0.1",
        port=8000,
        max_model_len=None,
        gpu_memory_utilization=None,
        chat_template=None,
    )
    body = json.loads(shlex.split(plan.curl)[-1])
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][0]["content"] == "Don't guess."
