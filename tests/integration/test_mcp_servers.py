"""Tools and environments of real MCP servers."""

import base64
import io
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from mcp_types import ImageContent, TextContent
from PIL import Image

from grpo_cli.env_test.instances import Trial, try_environment, watch_output
from grpo_cli.environments.calls import Caller
from grpo_cli.environments.contract import EpisodeError, Tool
from grpo_cli.environments.dialogue import Dialogue
from grpo_cli.environments.kinds.mcp import _read_part
from grpo_cli.environments.player import Player
from grpo_cli.environments.registry import find_kind
from grpo_cli.recipe.episode import EpisodeConfig
from tests.integration.conftest import Workshop
from tests.integration.test_environment_kinds import free_port, start_server
from tests.tiny_agents import make_agent
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
    with pytest.raises(EpisodeError, match=r"no answer in 0.5 s. Fix: raise `timeout_s`"):
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
import os, sys
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("counter")
counts = {}

def session(ctx):
    request = ctx.request_context.request
    return request.headers["mcp-session-id"] if request else "stdio"

@server.tool()
def begin(ctx: Context, start: int, seed: int) -> str:
    '''Begin.'''
    counts[session(ctx)] = start
    return f"The count is {start}."

@server.tool()
def add(ctx: Context, a: int, b: int = 0) -> str:
    '''Add to the count.'''
    if a == 0 or "frail" in sys.argv:
        print("out of numbers", file=sys.stderr)
        os._exit(3)
    counts[session(ctx)] += a + b
    return str(counts[session(ctx)])

@server.tool()
def score(ctx: Context) -> dict[str, float]:
    '''Return the score.'''
    count = counts[session(ctx)]
    return {"right": float(count == 10), "near": count / 100}

@server.tool()
def word() -> str:
    '''Return the count in words.'''
    return "ten"

if "http" in sys.argv:
    server.run("streamable-http", port=int(sys.argv[-1]))
else:
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
        one=[call("add", a=4), call("add", a=5), "ten"],
        two=[call("add", a=1), "three"],
        dies=[call("add", a=0), call("add", a=1), "gone"],
    )
    try:
        episodes = player.begin(rows)
        assert episodes[1].prompt[-1]["content"] == "episode two\n\nThe count is 2."
        assert [tool.name for tool in episodes[0].tools] == ["add", "word"]
        player.play(episodes, script)
    finally:
        source.close()
    right, wrong, dead = episodes
    assert right.reward == {"right": 1.0, "near": 0.1}
    assert wrong.reward == {"right": 0.0, "near": 0.03}
    assert [each.end for each in episodes] == ["answer", "answer", "failed"]
    told = [each["content"] for each in dead.messages if each["role"] == "tool"]
    assert all("the server ended during the call: out of numbers" in each for each in told)
    assert {*psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("values", "level", "path", "seen"),
    [
        (
            {"command": "frail"},
            "error",
            "environment",
            "add() failed: the server ended during the call: out of numbers",
        ),
        (
            {"rows": "begin"},
            "error",
            "environment.reset",
            "reset() failed: the tool begin needs `start`, and the columns are `prompt`, `begin`",
        ),
        (
            {"reward": "word"},
            "error",
            "environment.reward",
            "reward() failed: the tool word returned 'ten', not a number",
        ),
    ],
)
def test_a_fault_of_an_mcp_server_gets_one_issue(tmp_path, caplog, values, level, path, seen):
    (tmp_path / "counter.py").write_text(STATEFUL_SERVER)
    command = ["python", str(tmp_path / "counter.py"), values.get("command", "")]
    params = {"command": command, "reset": "begin", "reward": values.get("reward", "score")}
    row = {"prompt": [{"role": "user", "content": "count"}], values.get("rows", "start"): 1}
    trial = Trial("environment", timeout_s=60.0)
    with watch_output(trial):
        source = find_kind("environment", "mcp").model_validate(params).open()
        try_environment(trial, source, [row], seed=1, max_turns=4)
        source.close()
    [issue] = trial.issues.values()
    assert (issue.level, issue.path) == (level, path)
    assert issue.seen.startswith(seen)
    assert "correct reset" not in issue.fix
    assert not caplog.records


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


RECIPE = """\
name: count
model: {{path: {model}, dtype: float32}}
dataset:
  kind: inline
  prompt: {{user: a}}
  rows: [{{start: 1, place: here}}, {{start: 2, place: elsewhere}}]
environment:
  - {{kind: mcp, when: place == "here", command: [python, counter.py], reset: begin, reward: score}}
  - {{kind: mcp, when: place == "elsewhere", url: "URL", reset: begin, reward: score}}
episode: {{max_turns: 4, max_turn_tokens: 8, tool_timeout_s: 60}}
rewards: [{{kind: environment}}]
generation: {{num_generations: 4, max_completion_length: 120}}
training: {{per_device_train_batch_size: 8, max_steps: 2, gradient_checkpointing: false}}
launch: {{use_cpu: true}}
"""


def test_a_training_acts_in_mcp_servers_here_and_elsewhere(tmp_path, once):
    (tmp_path / "counter.py").write_text(STATEFUL_SERVER)
    workshop = Workshop(tmp_path, once("agent", make_agent))
    port = free_port()
    server = start_server([sys.executable, tmp_path / "counter.py", "http", f"{port}"], port)
    try:
        workshop.write(RECIPE.replace("URL", f"http://127.0.0.1:{port}/mcp"))
        done = workshop.grpo("train", tmp_path / "recipe.yaml")
    finally:
        server.kill()
        server.wait()
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (workshop.run / "completions" / "rank_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    places = [record["prompt"][-1]["content"] for record in records]
    assert sorted(places) == 2 * ["a\n\nThe count is 1."] + 2 * ["a\n\nThe count is 2."]
    added = set()
    for record in records:
        start = int(record["prompt"][-1]["content"][-2])
        for episode in record["episodes"]:
            calls = [call[1] for call in episode["calls"] if call[0] == "add"]
            assert set(calls) <= {""}
            assert episode["reward"]["near"] == pytest.approx((start + 3 * len(calls)) / 100)
            added.add(len(calls))
    assert len(added) > 1


def test_images_of_results_are_read_if_the_recipe_has_images():
    file = io.BytesIO()
    Image.new("RGBA", (5, 4), "red").save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode("ascii")
    image = ImageContent(type="image", data=data, mime_type="image/png")
    parts = list(map(_read_part, (image, TextContent(type="text", text="a wall"))))
    look = Tool("look", {}, lambda: parts)
    [seen, text] = Caller(reads_images=True).call(look, {})
    assert (seen["image"].size, seen["image"].mode, text["text"]) == ((5, 4), "RGB", "a wall")
    assert Caller().call(look, {}) == "[image]\na wall"
