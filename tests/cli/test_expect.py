"""`grpo expect`: bands from runs, and runs beside bands."""

import json

from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.yaml_tree import write_yaml
from tests.cli.test_commands import grpo
from tests.run_folders import make_finished_run


def make_seeds(folder):
    return [
        make_finished_run(folder, seed, [0.5 + 0.01 * n] * 40, 0.8).path
        for n, seed in enumerate((42, 1, 2))
    ]


def test_a_block_can_be_appended_to_its_recipe_and_new_runs_checked_with_it(tmp_path):
    runs = make_seeds(tmp_path)
    done = grpo("expect", *runs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    recipe = tmp_path / "recipe.yaml"
    own = make_finished_run(tmp_path / "own").read_recipe()
    recipe.write_text(write_yaml(own) + done.stdout)
    expect = load_recipe(recipe).expect
    assert [each.metric for each in expect.metrics] == ["reward", "accuracy/math"]

    normal = make_finished_run(tmp_path, 3, [0.52] * 40, 0.82).path
    odd = make_finished_run(tmp_path, 4, [0.9] * 40, 0.82).path
    done = grpo("expect", normal, "--against", recipe, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "sums/seed-3" in done.stdout
    assert "reward at step 40: 0.5200, inside 0.4603 to 0.5597" in done.stdout
    done = grpo("expect", normal, odd, "--against", recipe, "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert [each["inside"] for each in json.loads(done.stdout)] == [True, False]


def test_check_takes_the_block_of_the_runs_own_recipe(tmp_path):
    block = {"metrics": [{"metric": "reward", "step": 40, "band": [0.6, 0.7]}]}
    run = make_finished_run(tmp_path, expect=block).path
    done = grpo("expect", run, "--check", cwd=tmp_path)
    assert done.returncode == 1
    assert "reward at step 40: 0.500, OUTSIDE 0.600 to 0.700" in done.stdout
    done = grpo("expect", make_finished_run(tmp_path, 7).path, "--check", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no `expect` block. Fix: write one with grpo expect RUN" in done.stderr


def test_one_run_says_what_its_band_is_worth(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.4, 0.6] * 20).path
    done = grpo("expect", run, cwd=tmp_path)
    assert done.returncode == 0
    assert "the bands come from one run" in done.stderr
    told = json.loads(grpo("expect", run, "--metric", "reward", "--json", cwd=tmp_path).stdout)
    assert [each["metric"] for each in told["expect"]["metrics"]] == ["reward"]
    assert "one run" in told["notes"][0]


def test_flags_for_writing_are_refused_where_a_run_is_compared(tmp_path):
    run = make_finished_run(tmp_path).path
    done = grpo("expect", run, "--check", "--step", 3, cwd=tmp_path)
    assert done.returncode == 2
    assert "a comparison takes them from it" in done.stderr


def test_a_folder_that_is_no_run_is_said(tmp_path):
    done = grpo("expect", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a run folder" in done.stderr
