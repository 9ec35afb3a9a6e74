"""The environment `reasoning_gym`, with tasks of reasoning-gym itself."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.registry import find_kind

reasoning_gym = pytest.importorskip("reasoning_gym")


def begin(task="gcd", source=None, **params):
    entry = reasoning_gym.create_dataset(task, seed=7, size=5)[0]
    row = {**entry, "metadata": json.dumps(entry["metadata"])}
    environment = (source or open_kind(**params)).make()
    assert environment.reset(row, seed=1) is None
    return environment


@functools.cache
def open_kind(**params):
    return find_kind("environment", "reasoning_gym").model_validate(params).open()


def test_the_last_try_counts_with_its_discount():
    environment = begin(tries=3, discount=0.5)
    [gold] = environment.gold()
    assert environment.step("no idea") == ("wrong, try again", False)
    assert environment.reward() < 0.1
    assert environment.step(gold) == ("right", True)
    assert environment.reward() == 0.5


def test_tries_end():
    environment = begin(tries=2)
    assert environment.reward() == 0
    assert environment.step("-1")[1] is False
    assert environment.step("-2") == ("wrong", True)


@pytest.mark.parametrize("place", ["text", "boxed", "hashes", "answer_tag", "last_number"])
def test_gold_wins_wherever_answers_are_looked_for(place):
    environment = begin(extract=place)
    [gold] = environment.gold()
    assert environment.step(gold) == ("right", True)
    assert environment.reward() == 1.0


def test_partial_credit_is_told():
    environment = begin("letter_jumble")
    words = environment.gold()[0].split()
    hint, is_done = environment.step(" ".join(["x", *words[1:]]))
    assert hint.startswith("wrong, try again (score 0.")
    assert not is_done


def test_answers_that_would_run_code_are_wrong_on_all_threads_at_once():
    source = open_kind()
    games = [begin("countdown", source) for _ in range(4)]
    attack = "__import__('os').system('touch /tmp/harm')"
    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(lambda game: game.step(attack), games)} == {("wrong, try again", False)}
        golds = [game.gold()[0] for game in games]
        steps = pool.map(lambda game, gold: game.step(gold), games, golds)
        assert {*steps} == {("right", True)}


def test_rows_of_another_dataset_are_refused():
    kind = find_kind("environment", "reasoning_gym")
    assert kind().required_columns() == ("answer", "metadata")
    with pytest.raises(EpisodeError, match="no column `answer`"):
        open_kind().make().reset({"prompt": "?"}, seed=1)
    with pytest.raises(EpisodeError, match="names no source_dataset"):
        open_kind().make().reset({"answer": "1", "metadata": {}}, seed=1)
