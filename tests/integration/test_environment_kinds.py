"""Environments with the real packages behind them."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.registry import find_kind

pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_server(command, port):
    """Start a server, and wait until it listens."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


OPENENV = """\
import random, sys
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: str


class Hint(Observation):
    text: str


class Numbers(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = random.Random(seed).randint(1, 9)
        return Hint(text="guess")

    def step(self, action: Guess, timeout_s=None, **kwargs):
        guess = int(action.number)
        right = guess == self.number
        text = "higher" if guess < self.number else "lower"
        return Hint(text=text, done=right, reward=float(right))

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    import uvicorn

    app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=16)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""
OPENENV_PYTHON = os.environ.get("OPENENV_PYTHON", f"{sys.prefix}/openenv/bin/python")
"""`make test-remote-environments` makes the second."""


def play_openenv(source, seed):
    game = source.make()
    assert game.reset({}, seed) == "guess"
    low, high, is_done = 1, 9, False
    while not is_done:
        number = (low + high) // 2
        hint, is_done = game.step(str(number))
        low, high = (number + 1, high) if hint == "higher" else (low, number - 1)
    assert game.reward() == 1.0
    game.close()
    return number


@pytest.mark.skipif(
    not os.path.exists(OPENENV_PYTHON),
    reason="OpenEnv is not installed beside: make test-remote-environments",
)
def test_openenv_itself_by_a_class_and_by_a_server(tmp_path):
    script = tmp_path / "numbers_env.py"
    script.write_text(OPENENV)
    port = free_port()
    kind = find_kind("environment", "openenv")
    by_class = {"path": f"{script}:Numbers"}
    by_server = {"url": f"http://127.0.0.1:{port}"}
    server = start_server([OPENENV_PYTHON, str(script), str(port)], port)
    try:
        numbers = []
        for place in (by_class, by_server):
            source = kind(python=OPENENV_PYTHON, action="number", **place).open()
            with ThreadPoolExecutor(8) as pool:
                numbers.append(list(pool.map(partial(play_openenv, source), range(8))))
            game = source.make()
            game.reset({}, 1)
            with pytest.raises(EpisodeError):
                game.step("five")
            source.close()
        assert numbers[0] == numbers[1]
        assert len({*numbers[0]}) > 2
    finally:
        server.kill()
        server.wait()


VERIFIERS = """\
import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Guess(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        last = trace.branches[-1].messages[-1].content or ""
        return float(last.strip() == str(self.data.number))

    @vf.reward
    async def brief(self, trace) -> float:
        return float(trace.num_turns < 4)


class Numbers(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 10):
            yield Guess(Data(prompt="guess", system_prompt="From 1 to 9.", number=number))


class HintsConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Hints(vf.Env[HintsConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                hint = "higher" if int(segment.last_reply) < task.data.number else "lower"
                segment = await interaction.turn(hint)


__all__ = ["Numbers", "Hints"]
"""
VERIFIERS_PYTHON = os.environ.get("VERIFIERS_PYTHON", f"{sys.prefix}/verifiers/bin/python")
"""`make test-remote-environments` makes the second."""
needs_verifiers = pytest.mark.skipif(
    not os.path.exists(VERIFIERS_PYTHON),
    reason="verifiers is not installed beside: make test-remote-environments",
)


def open_verifiers(taskset, **config):
    kind = find_kind("environment", "verifiers")
    return kind(python=VERIFIERS_PYTHON, taskset=taskset, config=config).open()


def play_hints(source, seed):
    game = source.make()
    assert game.reset({}, seed) == "From 1 to 9.\n\nguess"
    low, high, turns, is_done = 1, 9, 0, False
    while not is_done:
        number, turns = (low + high) // 2, turns + 1
        hint, is_done = game.step(str(number))
        low, high = (number + 1, high) if hint == "higher" else (low, number - 1)
    assert game.reward() == {"right": 0.5, "brief": float(turns < 4)}
    game.close()
    return number


@needs_verifiers
def test_verifiers_itself_with_episodes_of_several_turns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hints.py").write_text(VERIFIERS)
    source = open_verifiers("hints")
    try:
        unfinished = source.make()
        unfinished.reset({}, 1)
        with ThreadPoolExecutor(8) as pool:
            numbers = list(pool.map(partial(play_hints, source), range(12)))
        assert numbers == [*range(1, 10), 1, 2, 3]
        assert unfinished.reward() == 0.0
        unfinished.close()
        game = source.make()
        game.reset({}, 1)
        with pytest.raises(EpisodeError, match="invalid literal"):
            game.step("five")
        with pytest.raises(EpisodeError, match="invalid literal"):
            game.reward()
        game.close()
    finally:
        source.close()


@needs_verifiers
def test_verifiers_itself_with_one_turn_or_several_conversations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbers9.py").write_text(VERIFIERS.replace(', "Hints"', ""))
    source = open_verifiers("numbers9")
    try:
        game = source.make()
        game.reset({}, 4)
        assert game.step("5") == ("", True)
        assert game.reward() == {"right": 0.5, "brief": 1.0}
        game.close()
    finally:
        source.close()
    source = open_verifiers("numbers9", id="best_of_n")
    try:
        game = source.make()
        game.reset({}, 4)
        with pytest.raises(EpisodeError, match="about another conversation than before"):
            game.step("5")
        game.close()
    finally:
        source.close()
    with pytest.raises(EpisodeError, match="taskset 'gone' not found"):
        open_verifiers("gone")
