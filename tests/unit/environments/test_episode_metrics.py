"""What the records of episodes come to in the metrics."""

from grpo_cli.environments.episode import Call, Episode, count_repeats, episode_metrics
from tests.run_folders import play


def asks(*results, arguments=None):
    messages = []
    for result in results:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments or {}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "look", "content": result})
    return messages


def test_a_call_repeats_another_if_its_result_is_the_same_too():
    assert count_repeats(asks("a wall", "a wall", "a wall")) == 2
    assert count_repeats(asks("a wall", "a door")) == 0
    assert count_repeats([*asks("a wall"), *asks("a wall", arguments={"far": True})]) == 0
    guesses = [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "higher"},
    ]
    assert count_repeats([*guesses, *guesses, {"role": "assistant", "content": "5"}]) == 1
    # A call that cannot be parsed is answered too; the last one may have no answer.
    malformed = [
        {"role": "assistant", "content": "<call>{"},
        {"role": "tool", "name": "unknown", "content": "Error"},
    ]
    assert count_repeats([*malformed, *malformed, malformed[0]]) == 1


def test_tokens_count_by_turn_and_calls_by_episode():
    messages = asks("a wall", "a wall")
    episode = Episode({}, [], [], None, messages=messages, turns=3, end="turns")
    episode.token_ids, episode.mask = [7] * 9, [1, 1, 1, 0, 0, 1, 1, 0, 1]
    episode.calls = [Call("look"), Call("look", "late", 2.0)]
    metrics = episode_metrics([episode.as_json(), play(1)[1]], ["look"])
    assert metrics["episode/tokens_per_turn"] == (6 + 9) / 4
    assert metrics["episode/turns"] == 2
    assert (metrics["tools/call_frequency"], metrics["tools/repeated"]) == (1, 0.5)
    assert (metrics["tools/late"], metrics["tools/failure_frequency"]) == (0.5, 0.5)
    assert (metrics["episode/end/turns"], metrics["episode/end/answer"]) == (0.5, 0.5)
