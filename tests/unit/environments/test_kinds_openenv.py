"""The environment `openenv` with a stand-in for OpenEnv, which `integration/test_environment_kinds.py` has."""

import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.registry import find_kind

SERIALIZATION = """\
def serialize_observation(observation):
    observation = dict(observation)
    reward, done = observation.pop("reward", None), observation.pop("done", False)
    return {"observation": {**observation, "metadata": {}}, "reward": reward, "done": done}
"""
ENVIRONMENT = """\
import os, random

class Guess:
    @classmethod
    def model_validate(cls, fields):
        guess = cls()
        guess.number = int(fields["number"])
        return guess

class Numbers:
    def __init__(self, highest=9):
        print("noise of the constructor")
        self.highest = highest

    def reset(self, seed=None, start=""):
        self.number = random.Random(seed).randint(1, self.highest)
        return {"text": f"guess {start}".strip()}

    def step(self, action: Guess):
        os.write(1, b"noise of a step")
        if action.number == 0:
            os._exit(3)
        right = action.number == self.number
        return {"text": "yes" if right else "no", "reward": float(right), "done": right}

    def close(self):
        pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    package = tmp_path / "site" / "openenv" / "core" / "env_server"
    package.mkdir(parents=True)
    (package / "serialization.py").write_text(SERIALIZATION)
    (tmp_path / "numbers_env.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path


def params(folder, **values):
    path = f"{folder / 'numbers_env.py'}:Numbers"
    values = {"python": sys.executable, "path": path, "action": "number", **values}
    return find_kind("environment", "openenv").model_validate(values)


def play(source, seed):
    game = source.make()
    try:
        said = game.reset({"start": "now"}, seed)
        assert said == "guess now"
        for number in range(1, 10):
            if game.step(str(number)) == ("yes", True):
                return number, game.reward()
        return None
    finally:
        game.close()


def test_sessions_side_by_side_in_one_process(folder):
    source = params(folder, columns=["start"]).open()
    try:
        alone = [play(source, seed) for seed in range(6)]
        assert len({number for number, _ in alone}) > 2
        assert {reward for _, reward in alone} == {1.0}
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda seed: play(source, seed), range(6))) == alone
    finally:
        source.close()


def test_what_goes_wrong_in_a_session_is_told(folder):
    me = psutil.Process()
    before = {*me.children(recursive=True)}
    source = params(folder).open()
    try:
        game, other = source.make(), source.make()
        game.reset({}, 1)
        with pytest.raises(EpisodeError, match="ValueError: invalid literal"):
            game.step("five")
        with pytest.raises(EpisodeError, match="process has ended"):
            game.step("0")
        with pytest.raises(EpisodeError, match="process has ended"):
            other.reset({}, 1)
        other.close()
        # The next episode starts it again.
        assert source.make().reset({}, 1) == "guess"
    finally:
        source.close()
    assert {*me.children(recursive=True)} <= before


def test_an_answer_may_be_the_whole_action(folder):
    source = params(folder, action=None, kwargs={"highest": 1}).open()
    try:
        game = source.make()
        game.reset({}, 1)
        with pytest.raises(EpisodeError, match="as a JSON object"):
            game.step("1")
        assert game.step('{"number": 1}') == ("yes", True)
    finally:
        source.close()


def test_what_cannot_be_started_is_named(folder, monkeypatch):
    [issue] = params(folder, python="./gone/python").problems()
    assert issue.path == "python"
    [issue] = params(folder, path=f"{folder / 'numbers_env.py'}:Number").problems()
    assert "name Numbers" in issue.fix
    [issue] = params(folder, url="http://localhost:1").problems()
    assert "both" in issue.seen
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(EpisodeError, match=r"No module named 'openenv'.* -m pip install openenv"):
        params(folder).open()
