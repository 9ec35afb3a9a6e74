"""Trainings on streamed rows: the prompts of every step, resume, and several processes."""

import json
from itertools import islice

import pytest

from grpo_cli.data.build import build_datasets
from grpo_cli.data.streaming import stream_rows
from grpo_cli.runs.folder import RunFolder
from tests.integration.test_resuming import (
    DEADLY_RECIPE,
    assert_same,
    completions_of,
    sets,
    train,
    workshop_of,
)

_ROWS = 11


def streamed(folder, model, die_at=None):
    head, _, rest = DEADLY_RECIPE.partition("  kind: inline\n")
    prompt, _, rest = rest.partition("  rows:\n")
    files = "  kind: files\n  train: rows.jsonl\n  streaming: {{buffer_size: 4}}\n"
    text = head + files + prompt + rest[rest.index("rewards:\n") :]
    workshop = workshop_of(folder, model, die_at, text)
    lines = (json.dumps({"question": f"count {n}", "answer": str(n)}) for n in range(_ROWS))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return workshop


def rows_of(workshop):
    """The row of each group, in the order in which they were sampled."""
    return [row for _, row, *_ in completions_of(workshop)]


def test_steps_take_the_rows_in_their_shuffled_order(tmp_path, chat_model):
    workshop = streamed(tmp_path / "run", chat_model)
    train(workshop, steps=7)
    recipe = RunFolder(workshop.run).read_recipe()
    options = {"has_chat_template": True, "count_tokens": lambda prompt: 1}
    stream = stream_rows(recipe, build_datasets(recipe, **options), **options)
    # Two prompts a step, so that step 6 takes the last of one pass and the first of the next.
    assert rows_of(workshop) == [row["row_id"] for row in islice(stream, 14)]
    assert "files: streamed" in workshop.grpo("runs", "show", workshop.run).stdout
    assert "rows after the first 1,024" in workshop.grpo("check", "recipe.yaml").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        # The checkpoint lies in the second pass.
        {"save_steps": 6},
        # One generation feeds four steps; the checkpoint lies between them.
        {"save_steps": 3, "steps_per_generation": 4},
    ],
    ids=["second pass", "steps per generation"],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, chat_model, settings):
    unbroken = streamed(tmp_path / "unbroken", chat_model)
    train(unbroken, *sets(**settings))
    broken = streamed(tmp_path / "broken", chat_model, die_at=settings["save_steps"] + 1)
    assert "was killed (signal 9)" in train(broken, *sets(**settings), code=1).stderr
    done = train(broken, *sets(**settings), "--resume")
    assert f"from step {settings['save_steps']}" in done.stderr
    assert_same(broken, unbroken)


@pytest.mark.slow
def test_two_processes_take_the_rows_of_one(tmp_path, chat_model):
    one = streamed(tmp_path / "one", chat_model)
    train(one, steps=6)
    two = streamed(tmp_path / "two", chat_model)
    size = sets(per_device_train_batch_size=2)
    train(two, *size, "--set", "launch.num_processes=2", steps=6)
    halves = rows_of(two)
    assert len(halves) == 12
    steps = zip(halves[:6], halves[6:], strict=True)
    assert [row for step in steps for row in step] == rows_of(one)
