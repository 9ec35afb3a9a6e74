"""The tools `mcp`, as far as no server is needed; `integration/test_mcp_servers.py` has servers."""

import importlib.util
import json
import sys

import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.registry import find_kind


def params(**values):
    return find_kind("tools", "mcp").model_validate(values)


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        ({}, "command", "there is no server"),
        ({"command": ["python"], "url": "http://a/mcp"}, "url", "both `command` and `url`"),
        ({"url": "localhost:8000"}, "url", "is not an address of HTTP"),
        ({"command": ["no-such-command"]}, "command", "there is no command 'no-such-command'"),
        ({"command": ["python", "gone.py"]}, "command", "there is no file gone.py"),
    ],
)
def test_what_cannot_be_right_is_found_without_a_server(values, path, message):
    issue = params(**values).problems()[-1]
    assert (issue.path, issue.level) == (path, "error")
    assert message in issue.seen


@pytest.mark.parametrize(
    ("run", "warnings"), [('transport="streamable-http"', 1), ('transport="stdio"', 0), ("", 0)]
)
def test_a_command_that_serves_http_is_found_without_starting_it(tmp_path, run, warnings):
    (tmp_path / "server.py").write_text(f"mcp.run({run})\n")
    issues = params(command=["python", str(tmp_path / "server.py")]).problems()
    assert ["serves HTTP" in issue.seen for issue in issues] == [True] * warnings


def test_a_missing_package_is_one_issue(monkeypatch):
    assert not params(command=["python", "-m", "server"]).problems()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [issue] = params(command=["python", "-m", "server"]).problems()
    assert issue.package
    assert "[mcp]" in issue.fix


def test_a_command_that_cannot_be_right_is_not_started():
    pytest.importorskip("mcp")
    with pytest.raises(EpisodeError, match=r"no file gone\.py"):
        params(command=["python", "gone.py"]).open()
    assert params(command=["python", "x"]).argv() == [sys.executable, "x"]


LISTS = """
import json, sys
TOOLS, CURSOR = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "initialize":
        result = {
            "protocolVersion": request["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "lists", "version": "1"},
        }
    elif request.get("method") == "tools/list":
        result = {"tools": TOOLS, **CURSOR}
    else:
        result = {}
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""
TOOL = {"name": "look", "inputSchema": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("tools", "cursor", "message"),
    [
        ([TOOL], {"nextCursor": "again"}, "does not end: a page has no new tool"),
        ([], {"nextCursor": "again"}, "Fix: leave `nextCursor` out"),
        (
            [{**TOOL, "name": f"t{n}"} for n in range(1200)],
            {},
            "lists more than 1,000 tools. Fix: serve fewer",
        ),
        ([{**TOOL, "inputSchema": {"type": 12}}], {}, r"`tools\.0\.inputSchema\.type`.* not 12"),
    ],
)
def test_lists_of_tools_that_no_model_can_use_are_refused(tmp_path, tools, cursor, message):
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(LISTS)
    command = ["python", str(tmp_path / "server.py"), json.dumps(tools), json.dumps(cursor)]
    with pytest.raises(EpisodeError, match=message) as raised:
        params(command=command).open()
    assert "Fix: " in str(raised.value)
