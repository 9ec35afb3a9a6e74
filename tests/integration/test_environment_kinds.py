"""Kinds of tools and environments with the real packages and processes behind them."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.dialogue import Dialogue
from grpo_cli.environments.player import Player
from grpo_cli.environments.registry import find_kind
from grpo_cli.recipe.episode import EpisodeConfig
from tests.unit.environments.scripted import QWEN, Script, call, play

pytestmark = pytest.mark.slow

MCP_SERVER = """\
import asyncio, os, signal, subprocess, sys
from mcp.server.mcpserver import MCPServer

if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
server = MCPServer("facts")

@server.tool()
def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b

@server.tool()
def pid() -> int:
    '''Return the server's process.'''
    return os.getpid()

@server.tool()
def fail() -> str:
    '''Fail.'''
    raise ValueError("never")

@server.tool()
async def wait(seconds: float) -> str:
    '''Wait.'''
    await asyncio.sleep(seconds)
    return os.environ.get("WORD", "unset")

server.run(TRANSPORT)
"""
# Uses a server, and then does nothing.
HOST = """\
import sys, time
from grpo_cli.environments.kinds.mcp import McpToolParams
source = McpToolParams(command=sys.argv[1:]).open()
print({tool.name: tool for tool in source.tools}["pid"].call(), flush=True)
time.sleep(1000)
"""


def write_server(folder, transport="'stdio'"):
    path = folder / "server.py"
    path.write_text(MCP_SERVER.replace("TRANSPORT", transport))
    return path


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


def open_mcp(**params):
    source = find_kind("tools", "mcp").model_validate(params).open()
    return source, {tool.name: tool for tool in source.tools}


def test_an_mcp_server_that_is_killed_in_a_call_is_started_again(tmp_path):
    server = str(write_server(tmp_path))
    source, tools = open_mcp(command=["python", server], env={"WORD": "word"})
    try:
        schema = tools["add"].schema["function"]
        assert schema["description"] == "Add two numbers."
        assert schema["parameters"]["required"] == ["a", "b"]
        assert tools["add"].call(a=1, b=2) == "3"
        with pytest.raises(EpisodeError, match="valid integer"):
            tools["add"].call(a="one", b=2)
        with pytest.raises(EpisodeError, match="fail"):
            tools["fail"].call()

        # Calls of many threads wait together.
        started = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            assert {*pool.map(lambda _: tools["wait"].call(seconds=2), range(16))} == {"word"}
            assert time.monotonic() - started < 20
            first = int(tools["pid"].call())
            pending = [pool.submit(tools["wait"].call, seconds=600) for _ in range(4)]
            time.sleep(1)
            psutil.Process(first).kill()
            for each in pending:
                with pytest.raises(EpisodeError, match="the server ended during the call"):
                    each.result(60)
        second = int(tools["pid"].call())
        assert second != first
    finally:
        source.close()
    assert not psutil.pid_exists(second)


def test_an_mcp_server_offers_what_is_allowed(tmp_path):
    command = ["python", str(write_server(tmp_path))]
    source, tools = open_mcp(command=command, allow=["add"])
    source.close()
    assert list(tools) == ["add"]
    with pytest.raises(EpisodeError, match=r"no tool 'ad'. Fix: write add"):
        open_mcp(command=command, allow=["ad"])
    (tmp_path / "server.py").write_text("import no_such_module")
    with pytest.raises(EpisodeError, match="No module named 'no_such_module'"):
        open_mcp(command=command)
    (tmp_path / "server.py").write_text("import time; time.sleep(1000)")
    with pytest.raises(EpisodeError, match=r"no answer in 0.5 s \(`timeout_s`\)"):
        open_mcp(command=command, timeout_s=0.5)


def test_an_mcp_server_and_its_children_die_with_a_killed_worker(tmp_path):
    command = [sys.executable, str(write_server(tmp_path)), "deaf"]
    host = subprocess.Popen([sys.executable, "-c", HOST, *command], stdout=subprocess.PIPE)
    server = psutil.Process(int(host.stdout.readline()))
    family = [server, *server.children()]
    assert len(family) == 2
    host.kill()
    host.wait()
    host.stdout.close()
    assert not psutil.wait_procs(family, timeout=60)[1]


def test_an_mcp_server_elsewhere(tmp_path):
    port = free_port()
    script = write_server(tmp_path, f"'streamable-http', port={port}")
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(EpisodeError, match="cannot be reached"):
        open_mcp(url=url)

    def start():
        return start_server([sys.executable, script], port)

    process = start()
    try:
        source, tools = open_mcp(url=url)
        assert tools["add"].call(a=1, b=2) == "3"
        process.kill()
        process.wait()
        with pytest.raises(EpisodeError):
            tools["add"].call(a=1, b=2)
        process = start()
        assert tools["add"].call(a=1, b=2) == "3"
        source.close()
    finally:
        process.kill()
        process.wait()


STATEFUL_SERVER = """\
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
count = 0

@server.tool()
def begin(start: int, seed: int) -> str:
    '''Begin.'''
    global count
    count = start
    return f"The count is {start}."

@server.tool()
def add(number: int) -> str:
    '''Add to the count.'''
    global count
    if number == 0:
        os._exit(3)
    count += number
    return str(count)

@server.tool()
def score() -> dict[str, float]:
    '''Return the score.'''
    return {"right": float(count == 10), "near": count / 100}

server.run("stdio")
"""


def test_an_mcp_server_is_an_environment_with_a_process_for_each_episode(tmp_path):
    (tmp_path / "counter.py").write_text(STATEFUL_SERVER)
    command = ["python", str(tmp_path / "counter.py")]
    kind = find_kind("environment", "mcp")
    with pytest.raises(EpisodeError, match=r"no tool 'scores'. Fix: write score"):
        kind(command=command, reward="scores").open()
    before = {*psutil.Process().children(recursive=True)}
    source = kind(command=command, reset="begin", reward="score").open()
    dialogue = Dialogue(QWEN, has_tools=True)
    config = EpisodeConfig(tool_timeout_s=60)
    player = Player(config, dialogue, [], [(source, None)], max_tokens=4000, seed=3)
    rows = [
        {"prompt": [{"role": "user", "content": f"episode {name}"}], "start": start}
        for start, name in enumerate(["one", "two", "dies"], 1)
    ]
    script = Script(
        one=[call("add", number=4), call("add", number=5), "ten"],
        two=[call("add", number=1), "three"],
        dies=[call("add", number=0), call("add", number=1), "gone"],
    )
    try:
        episodes = player.begin(rows)
        assert episodes[1].prompt[-1]["content"] == "episode two\n\nThe count is 2."
        assert [tool.name for tool in episodes[0].tools] == ["add"]
        player.play(episodes, script)
    finally:
        source.close()
    right, wrong, dead = episodes
    assert right.reward == {"right": 1.0, "near": 0.1}
    assert wrong.reward == {"right": 0.0, "near": 0.03}
    assert [each.end for each in episodes] == ["answer", "answer", "failed"]
    told = [each["content"] for each in dead.messages if each["role"] == "tool"]
    assert "the server ended during the call" in told[0]
    assert "the server has ended" in told[1]
    assert {*psutil.Process().children(recursive=True)} <= before


def test_kinds_of_tools_in_the_loop_of_an_episode(tmp_path):
    source, _ = open_mcp(command=["python", str(write_server(tmp_path))])
    code = find_kind("tools", "python_code")().open()
    shared = [(tool, None) for tool in (*source.tools, *code.tools)]
    dialogue = Dialogue(QWEN, has_tools=True)
    config = EpisodeConfig(tool_timeout_s=60)
    player = Player(config, dialogue, shared, [], max_tokens=4000, seed=3)
    script = Script(
        one=[call("add", a=1, b=2), call("python_code", code="print(2 ** 10)"), "3 and 1024"],
        two=[call("python_code", code="while True: pass"), call("add", a="x", b=2), "no"],
        three=[call("wait", seconds=0.1) + "\n" + call("add", a=4, b=4), "8"],
    )
    try:
        one, two, three = play(script, player)
    finally:
        source.close()
    told = [
        [message["content"] for message in episode.messages if message["role"] == "tool"]
        for episode in (one, two, three)
    ]
    assert told[0] == ["3", "1024"]
    assert told[1][0] == "Error: took longer than 5 s"
    assert told[1][1].startswith("Error: ServerError: ")
    assert told[2] == ["unset", "8"]
    assert [each.failure for each in two.calls] == ["", "failed"]
    assert {episode.end for episode in (one, two, three)} == {"answer"}


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
