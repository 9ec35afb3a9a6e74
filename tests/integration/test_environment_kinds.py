"""Kinds of tools and environments with the real packages and processes behind them."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.registry import find_kind

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
    with pytest.raises(EpisodeError, match="no answer"):
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = write_server(tmp_path, f"'streamable-http', port={port}")
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(EpisodeError, match="cannot be reached"):
        open_mcp(url=url)

    def start():
        process = subprocess.Popen([sys.executable, script], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return process
            assert time.monotonic() < deadline
            time.sleep(0.1)

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
