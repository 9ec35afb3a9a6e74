"""The rewards of episodes: the environment's score, and the share of well-formed calls."""

from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import EPISODE, Batch, RewardContext


def score(kind, **records):
    rows = [{"reward": None, "calls": [], "end": "done", **each} for each in records.values()]
    (reward,) = build_rewards([RewardConfig(kind=kind)], RewardContext(8))
    answer = [{"role": "assistant", "content": ""}]
    batch = Batch(["q"] * len(rows), [answer] * len(rows), columns={EPISODE: rows})
    return [each.value for each in reward.score(batch)]


def test_named_parts_are_added_and_a_failed_episode_scores_0():
    records = {"plain": 0.5, "parts": {"won": 1.0, "short": 0.25}, "none": None}
    shown = {name: {"reward": reward} for name, reward in records.items()}
    assert score("environment", **shown, lost={"reward": 1.0, "end": "failed"}) == [
        0.5,
        1.25,
        None,
        0.0,
    ]


def test_answers_to_a_text_environment_are_no_calls():
    calls = [["search", "failed", 0.1], ["", "malformed", 0.0], ["step", "", 0.1]]
    assert score("tool_use", mixed={"calls": calls}, text={"calls": calls[2:]}) == [0.5, 0.0]
