"""The tools `mcp`, as far as no server is needed; `integration/test_mcp_servers.py` has servers."""

import importlib.util
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
    assert issue.is_missing_package
    assert "[mcp]" in issue.fix


def test_a_command_that_cannot_be_right_is_not_started():
    pytest.importorskip("mcp")
    with pytest.raises(EpisodeError, match=r"no file gone\.py"):
        params(command=["python", "gone.py"]).open()
    assert params(command=["python", "x"]).argv() == [sys.executable, "x"]
