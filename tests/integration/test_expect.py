"""Bands from real trainings, and a real training that ends by saying whether it lies inside."""

import json

import pytest


@pytest.mark.slow
def test_two_seeds_make_a_band_and_the_next_training_says_where_it_lies(workshop):
    recipe = workshop.write()
    for seed in (1, 2):
        done = workshop.grpo("train", recipe, "--run-id", f"seed-{seed}", "--set", f"seed={seed}")
        assert done.returncode == 0, done.stderr
    runs = [f"runs/tiny/seed-{seed}" for seed in (1, 2)]
    metrics = [
        "--metric",
        "reward",
        "--metric",
        "completions/mean_length",
        "--metric",
        "rewards/length",
    ]
    done = workshop.grpo("expect", *runs, *metrics)
    assert done.returncode == 0, done.stderr
    assert "runs: [tiny/seed-1, tiny/seed-2]" in done.stdout
    assert "seeds: [1, 2]" in done.stdout

    # A band that no run of eight tokens lies in.
    wrong = "    - {metric: num_tokens, step: 2, band: [1e6, 1e7]}\n  measured:"
    block = done.stdout.replace("  measured:", wrong)
    recipe.write_text(recipe.read_text() + block)
    done = workshop.grpo("train", recipe, "--run-id", "again", "--json")
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout)["expected"]
    assert [(each["metric"], each["outcome"]) for each in expected["metrics"]] == [
        ("reward", "inside"),
        ("completions/mean_length", "inside"),
        ("rewards/length", "inside"),
        ("num_tokens", "outside"),
    ]
    assert expected["differs"] == {}
    assert expected["measured_runs"] == 2

    done = workshop.grpo("expect", "runs/tiny/again", "--check")
    assert done.returncode == 1
    assert "num_tokens at step 2: " in done.stdout
    assert "OUTSIDE 1000000.000 to 10000000.000" in done.stdout
    done = workshop.grpo("train", recipe, "--set", "training.max_steps=1", "--run-id", "short")
    assert done.returncode == 0, done.stderr
    assert "expected  reward at step 2: not reached (1 of 2)" in done.stdout
    assert "measured with other settings (training)" in done.stdout
