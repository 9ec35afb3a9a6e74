"""`completions/rank_N.jsonl`: what is written of a batch, and read back."""

from grpo_cli.rewards.contract import EPISODE, Batch, Score
from grpo_cli.runs.completions import find_groups, load_groups
from grpo_cli.runs.folder import RunFolder
from grpo_cli.training.rollout.rollout import repeated_share
from grpo_cli.training.rollout.step import CompletionLog
from tests.run_folders import play

PROMPT = [{"role": "user", "content": "What is 12 * 3?"}]


def make_batch(episodes):
    return Batch(
        [PROMPT] * len(episodes),
        [messages for messages, _ in episodes],
        completion_ids=[[5, 5, 1], [5, 5, 5], [5, 1]],
        columns={"row_id": [4, 4, 6], EPISODE: [record for _, record in episodes]},
    )


def test_episodes_are_written_and_read_with_all_that_was_said(tmp_path):
    folder = RunFolder(tmp_path)
    folder.completions.mkdir()
    log = CompletionLog(folder.completions / "rank_0.jsonl", lambda ids: ids[-1:] == [1])
    # A limit can end an episode after a whole answer, and another way one whose answer is not.
    episodes = [play(3, end="tokens"), play(1), play(2, end="done")]
    log.add(make_batch(episodes), {"right": [Score(1.0), Score(0.0), Score(1.0)]}, step=2)
    first, second = load_groups(find_groups(folder))
    assert first.texts == ["It is 36.", "It is 36."]
    assert (first.prompt, first.tokens, first.clipped) == (PROMPT, [3, 3], [True, False])
    assert list(zip(first.messages, first.episodes, strict=True)) == episodes[:2]
    assert second.episodes == [episodes[2][1]]


def test_a_single_answer_is_written_as_before(tmp_path):
    folder = RunFolder(tmp_path)
    folder.completions.mkdir()
    log = CompletionLog(folder.completions / "rank_0.jsonl", lambda ids: ids[-1:] == [1])
    log.add(Batch(["q"], ["a"], completion_ids=[[1]]), {"right": [Score(1.0)]}, step=0)
    assert '"messages"' not in log.path.read_text()
    (group,) = load_groups(find_groups(folder))
    assert (group.texts, group.messages, group.episodes) == (["a"], [], [])


def test_episodes_that_only_end_alike_are_not_the_same_answer():
    assert repeated_share(make_batch([play(3), play(1), play(2)])) == 0
    assert repeated_share(make_batch([play(3), play(3), play(2)])) == 2 / 3
