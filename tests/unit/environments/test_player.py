"""The loop of an episode, with scripted answers."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.episode import Sampled, episode_metrics
from grpo_cli.training.rollout.episodes import EpisodeSampler
from tests.unit.environments.scripted import QWEN, Game, Script, call, play, player_of, rows_of


def add(a: int, b: int) -> dict:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return {"sum": a + b}


def shout(text: str) -> str:
    """Shout.

    Args:
        text: What.
    """
    return text.upper()


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    import asyncio

    await asyncio.sleep(seconds)
    return "waited"


def sleep() -> str:
    """Sleep."""
    time.sleep(30)
    return "slept"


def fail(how: str) -> str:
    """Fail.

    Args:
        how: The way.
    """
    if how == "exit":
        sys.exit(3)
    raise ValueError("no such row")


def contents(episode, role):
    return [message["content"] for message in episode.messages if message["role"] == role]


def test_the_tokens_are_those_of_the_dialogue_and_only_the_models_count():
    two = f"Let me see.\n{call('add', a=1, b=2)}\n{call('shout', text='hé')}"
    (episode,) = play(Script(one=[two, "3 it is"]), player_of([add, shout]))
    assert (episode.end, episode.turns) == ("answer", 2)
    assert contents(episode, "tool") == ['{"sum": 3}', "HÉ"]
    assert contents(episode, "assistant") == ["Let me see.", "3 it is"]
    rendered = QWEN.apply_chat_template(
        [*episode.prompt, *episode.messages],
        tools=[tool.schema for tool in episode.tools],
        tokenize=True,
        return_dict=False,
    )
    newline = rendered[-1:]
    assert episode.prompt_ids + episode.token_ids + newline == rendered
    assert QWEN.decode(episode.own_ids) == f"{two}<|im_end|>3 it is<|im_end|>"
    assert episode.logprobs == [-1.0 if own else 0.0 for own in episode.mask]


def test_whatever_text_a_call_or_an_error_is_made_of_does_not_end_the_run():
    def break_off(how: str) -> str:
        """Break off.

        Args:
            how: The way.
        """
        raise ValueError("file \udc80")

    half = '<tool_call>\n{"name": "%s", "arguments": {"text": "\\ud800"}}\n</tool_call>'
    deep = '<tool_call>\n{"name": "shout", "arguments": {"text": %s}}\n</tool_call>'
    script = Script(
        argument=[half % "shout"],
        name=[half % "sh\\ud800"],
        deep=[deep % ("[" * 3000)],
        error=[call("break_off", how="")],
    )
    episodes = play(script, player_of([shout, break_off], max_tokens=20_000))
    assert [contents(episode, "tool")[0] for episode in episodes] == [
        "?",
        "Error: there is no tool 'sh?'; the tools are shout, break_off",
        "Error: the call cannot be read: it is nested too deeply",
        "Error: ValueError: file ?",
    ]
    for episode in episodes:
        assert "\ud800" not in repr(episode.messages)


def test_an_environment_that_changes_its_row_changes_it_for_itself_only():
    class Deck(Game):
        def reset(self, row, seed):
            return f"the card {row['cards'].pop()}"

    (row,) = rows_of(["one"])
    row["cards"] = [1, 2, 3]
    episodes = player_of(environment=Deck).begin([row, row])
    assert [each.prompt[-1]["content"] for each in episodes] == ["episode one\n\nthe card 3"] * 2
    assert row["cards"] == [1, 2, 3]


def test_a_failing_call_is_told_and_counted_and_the_episode_goes_on():
    script = Script(
        raised=[call("fail", how="raise")],
        exit=[call("fail", how="exit")],
        names=[call("add", a=1, c=2)],
        types=[call("shout", text=5)],
        unknown=[call("search", q="x")],
        malformed=["<tool_call>\n{'name': add}\n</tool_call>"],
        unfinished=['<tool_call>{"name": "add"'],
        late=[call("sleep")],
        coroutine=[call("wait", seconds=30)],
        right=[call("wait", seconds=0)],
    )
    for answers in script.answers.values():
        answers.append("done")
    player = player_of([add, shout, wait, sleep, fail], tool_timeout_s=0.3)
    episodes = dict(zip(script.answers, play(script, player), strict=True))
    assert {episode.end for episode in episodes.values()} == {"answer"}
    told = {name: contents(episode, "tool")[0] for name, episode in episodes.items()}
    assert told["raised"] == "Error: ValueError: no such row"
    assert told["exit"] == "Error: SystemExit: 3"
    assert "unexpected keyword argument 'c'" in told["names"]
    assert "TypeError" in told["types"] or "AttributeError" in told["types"]
    assert told["unknown"].startswith("Error: there is no tool 'search'; the tools are add, shout")
    assert told["malformed"].startswith("Error: the call cannot be read: ")
    # A stop token in it would end the message that it is told in.
    assert "<|im_end|>" not in told["unfinished"]
    assert told["late"] == told["coroutine"] == "Error: it took longer than 0.3 s"
    assert told["right"] == "waited"
    metrics = episode_metrics([each.as_json() for each in episodes.values()], ["add", "wait"])
    expected = {"failed": 0.4, "unknown": 0.1, "malformed": 0.2, "late": 0.2}
    assert {name: metrics[f"tools/{name}"] for name in expected} == pytest.approx(expected)
    assert metrics["tools/failure_frequency"] == pytest.approx(0.9)
    assert metrics["tools/wait/calls"] == pytest.approx(0.2)


def test_the_recipe_may_have_failures_end_the_episode_or_the_run():
    script = {"one": [call("fail", how="raise"), "on"]}
    (episode,) = play(Script(**script), player_of([fail], on_tool_error="zero"))
    assert (episode.end, episode.turns) == ("failed", 1)
    with pytest.raises(EpisodeError, match="fail failed: ValueError: no such row"):
        play(Script(**script), player_of([fail], on_tool_error="raise"))
    broken = Script(one=["<tool_call>x</tool_call>", "on"])
    (episode,) = play(broken, player_of([fail], on_malformed_call="end"))
    assert (episode.end, episode.turns) == ("malformed", 1)


def test_a_text_environment_gets_answers_without_a_call():
    script = Script(one=["hello", f"I add\n{call('add', a=1, b=1)}", "end", "never"])
    (episode,) = play(script, player_of([add], Game))
    (game,) = Game.made
    assert episode.prompt[-1]["content"].startswith("episode one\n\nplay, seed ")
    assert game.heard == ["hello", "end"]
    assert [each["role"] for each in episode.messages] == [
        *("assistant", "user", "assistant", "tool", "assistant", "user"),
    ]
    assert (episode.end, episode.turns) == ("done", 3)
    assert episode.reward == {"length": 2.0, "won": 1.0}
    assert [each.tool for each in episode.calls] == ["step", "add", "step"]
    assert game.closed == 1


def test_a_text_environment_gets_what_follows_the_thinking():
    answers = ["<think>Is it end? No.</think>\n\nno", " end", "<think>so</think>end"]
    (episode,) = play(Script(one=answers), player_of((), Game))
    assert Game.made[0].heard == ["no", " end", "end"]
    assert contents(episode, "assistant") == answers


@pytest.mark.parametrize(
    ("config", "answers", "end", "turns"),
    [
        ({"max_turns": 2}, ["a", "b", "c"], "turns", 2),
        ({"max_turn_tokens": 3}, ["a", "much"], "cut_off", 2),
        ({"max_tokens": 10}, ["much longer than that"], "tokens", 1),
        ({"max_tokens": 30}, ["a", "b"], "tokens", 1),
        ({"max_tokens": 100}, ["a", "b" * 90], "tokens", 2),
    ],
    ids=["turns", "cut off", "answer too long", "result does not fit", "second answer too long"],
)
def test_limits_end_an_episode_with_the_models_own_token(config, answers, end, turns):
    (episode,) = play(Script(one=answers), player_of((), Game, **config))
    assert (episode.end, episode.turns) == (end, turns)
    assert episode.mask[-1] == 1
    assert len(episode.token_ids) == len(episode.mask) <= config.get("max_tokens", 4000)
    assert len(episode.token_ids) == len(episode.logprobs)


def test_a_long_result_loses_its_middle_and_a_broken_character_breaks_nothing():
    def read() -> str:
        """Read."""
        return "start " + "x" * 1_000_000 + " end"

    def half() -> str:
        """Half."""
        return "\ud83d!"

    script = Script(long=[call("read"), "a"], half=[call("half"), "a"])
    long, half_pair = play(script, player_of([read, half], max_result_tokens=60))
    (text,) = contents(long, "tool")
    assert text.startswith("start x")
    assert text.endswith("x end")
    assert " [shortened] " in text
    assert len(QWEN(text)["input_ids"]) <= 60
    assert (long.shortened, half_pair.shortened) == (1, 0)
    assert contents(half_pair, "tool") == ["?!"]


def test_a_late_step_ends_the_episode_and_its_thread():
    class Slow(Game):
        def step(self, text):
            while True:
                time.sleep(0.001)

    before = {*threading.enumerate()}
    (episode,) = play(Script(one=["a", "b"]), player_of((), Slow, tool_timeout_s=0.1))
    assert (episode.end, episode.turns, episode.reward) == ("failed", 1, None)
    assert Slow.made[0].closed == 1
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
        assert not thread.is_alive()


class Fragile(Game):
    """Is not reset for the second row."""

    def reset(self, row, seed):
        if row["row_id"] == 1:
            raise RuntimeError("no server")
        return super().reset(row, seed)


def test_environments_are_closed_once_however_an_episode_ends():
    with pytest.raises(EpisodeError, match="for 1 of 2 episodes: RuntimeError: no server"):
        player_of((), Fragile).begin(rows_of(["one", "two"]))
    assert [game.closed for game in Fragile.made] == [1, 1]

    def interrupt(ids, most):
        raise KeyboardInterrupt

    player = player_of((), Game)
    episodes = player.begin(rows_of(["one", "two"]))
    with pytest.raises(KeyboardInterrupt):
        player.play(episodes, interrupt)
    player.close(episodes)
    assert [game.closed for game in Game.made] == [1, 1]


def test_training_begins_a_batch_again_whose_environments_could_not_be_reset(monkeypatch, capsys):
    """But not the first one: then it is more likely a mistake than a server that is restarted."""
    down = {"two"}

    class Restarted(Game):
        def reset(self, row, seed):
            if (name := row["prompt"][0]["content"].split()[-1]) in down:
                down.remove(name)
                raise ConnectionError("no server")
            return super().reset(row, seed)

    monkeypatch.setattr("grpo_cli.training.rollout.episodes._PAUSES_S", (0.01,))
    rollouts = EpisodeSampler(
        SimpleNamespace(processing_class=None), None, player_of((), Restarted)
    )
    rollouts.begin(rows_of(["one"]))
    assert len(rollouts.begin(rows_of(["two", "three"]))) == 2
    assert [game.closed for game in Restarted.made] == [0, 1, 1, 0, 0]
    assert "for 1 of 2 episodes: ConnectionError: no server" in capsys.readouterr().err
    down.add("one")
    with pytest.raises(EpisodeError, match="no server"):
        EpisodeSampler(
            SimpleNamespace(processing_class=None), None, player_of((), Restarted)
        ).begin(rows_of(["one"]))


def test_an_unreadable_reward_fails_its_episode_and_the_run_only_if_all_are():
    class Judge(Game):
        def reward(self):
            return "won" if "bad" in self.heard else 1

    right, wrong = play(Script(right=["end"], wrong=["bad", "end"]), player_of((), Judge))
    assert (right.end, right.reward) == ("done", 1.0)
    assert (wrong.end, wrong.reward) == ("failed", None)
    with pytest.raises(EpisodeError, match="for 1 of 1 episodes: TypeError"):
        play(Script(wrong=["bad", "end"]), player_of((), Judge))
    assert Judge.made[0].closed == 1


def test_a_process_samples_as_many_and_as_long_answers_as_the_others():
    answers, asked = iter(["a", "an answer that is cut off", "x"]), []

    def sample(prompt_ids, most):
        asked.append((len(prompt_ids), most))
        assert all(ids == episode.prompt_ids for ids in prompt_ids[1:])
        text = f"{next(answers)}<|im_end|>"
        return Sampled([QWEN(text, add_special_tokens=False)["input_ids"][:most]] * len(prompt_ids))

    player = player_of((), Game, max_turn_tokens=20)
    (episode,) = player.begin(rows_of(["one"]))
    others = iter([(3, 30), (2, 30), (1, 7), (0, 1)])
    player.play(
        [episode], sample, lambda *own: tuple(map(max, zip(own, next(others), strict=True)))
    )
    assert asked == [(3, 30), (2, 30), (1, 7)]
    assert (episode.end, episode.turns) == ("cut_off", 2)
    assert contents(episode, "assistant")[1] == "an answer that is cut off"[:20]
