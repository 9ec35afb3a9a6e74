"""What a training with an environment leaves in its run folder, and what is shown of it."""

from pathlib import Path

import pytest

from grpo_cli.report.packing import pack_held_out, pack_training
from grpo_cli.report.summary import RunReport
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.run import Run
from tests.integration.conftest import Workshop

GAME = Path(__file__).parents[2] / "recipes" / "offline" / "higher_lower.py"
RECIPE = f"""\
name: game
model: {{{{path: {{model}}}}}}
dataset: {{{{kind: environment, size: 64, eval_size: 4}}}}
environment: {{{{kind: python, path: "{GAME}:HigherLower"}}}}
episode: {{{{max_turns: 3, max_turn_tokens: 4}}}}
rewards: [{{{{kind: environment}}}}]
generation: {{{{num_generations: 4, max_completion_length: 24, dynamic_sampling: {{{{max_resample: 1}}}}}}}}
training: {{{{max_steps: 2, per_device_train_batch_size: 8, learning_rate: 1e-4, beta: 0.0}}}}
launch: {{{{use_cpu: true}}}}
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory, made):
    workshop = Workshop(tmp_path_factory.mktemp("played"), made / "tiny-guesser")
    done = workshop.grpo("train", workshop.write(RECIPE))
    assert done.returncode == 0, done.stdout + done.stderr
    return workshop


def test_completions_hold_all_turns_and_how_each_episode_went(played):
    groups = list(Run(RunFolder(played.run)).completions())
    assert len(groups) >= 4
    for group in groups:
        assert group.prompt[-1]["content"].endswith("guess")
        for text, tokens, messages, episode in zip(
            group.texts, group.tokens, group.messages, group.episodes, strict=True
        ):
            own = [each["content"] for each in messages if each["role"] == "assistant"]
            assert (own[-1], len(own)) == (text, episode["turns"])
            assert episode["tokens"] == tokens
            assert {each["content"] for each in messages if each["role"] == "user"} <= {
                "higher",
                "lower",
            }


def test_the_metrics_of_a_step_are_those_of_its_first_sampling(played):
    first = played.records("train")[0]
    groups = [each for each in Run(RunFolder(played.run)).completions() if each.step == 1]
    episodes = [episode for group in groups[:2] for episode in group.episodes]
    assert len(episodes) == 8
    turns = sum(each["turns"] for each in episodes)
    assert first["episode/turns"] == pytest.approx(turns / 8)
    assert first["episode/tokens_per_turn"] == pytest.approx(
        sum(each["tokens"] for each in episodes) / turns
    )
    assert first["time/tools"] > 0
    assert first["time/sampling"] > 0


def test_episodes_are_shown_in_lines_comparisons_and_the_page(played):
    run = RunReport(RunFolder(played.run))
    assert pack_training(run).completions >= 16
    assert pack_held_out(run).groups == 4
    shown = played.grpo("runs", "compare", played.run, played.run)
    assert " turns " in shown.stdout
    assert "  turns " in played.grpo("watch", played.run).stdout
