"""The tool `python_code`, with some of the hostile programs that the reward `code` is tested with."""

import contextlib
import sys
import tempfile

import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.registry import find_kind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is tested is Linux's")


@contextlib.contextmanager
def opened(**params):
    source = find_kind("tools", "python_code").model_validate(params).open()
    with contextlib.closing(source):
        yield source.tools[0]


def run(code, **params):
    with opened(**params) as tool:
        return tool.call(code=code)


def test_the_model_sees_what_a_program_prints():
    with opened() as tool:
        assert tool.name == "python_code"
        parameters = tool.schema["function"]["parameters"]
        assert parameters["required"] == ["code"]
        assert parameters["properties"]["code"]["type"] == "string"
        assert tool.call(code="print(6 * 7)") == "42"
        assert tool.call(code="x = 1") == "The program printed nothing."
        assert tool.call(code="print(1)\n1 / 0") == "Error: ZeroDivisionError: division by zero"
        assert "SyntaxError" in tool.call(code="print('\udc80'")
        with pytest.raises(TypeError, match="should be a string, not 3"):
            tool.call(code=3)


HOSTILE = {
    "endless loop": ("while True: pass", "took longer than 0.3 s"),
    "flood": ("while True: print('x' * 1000)", "wrote more than 1 KiB"),
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "kill the trainer": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "socket": ("import socket; socket.socket()", "PermissionError"),
    "memory bomb": ("x = bytearray(10**9)", "MemoryError"),
    "read a file of the user's": (f"open({__file__!r})", "Error"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_harms_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, reason = HOSTILE[name]
    seconds = 0.3 if name == "endless loop" else 20
    assert reason in run(code, timeout_s=seconds, output_kib=1)
    assert not list(tmp_path.iterdir())


def test_no_program_runs_on_a_machine_without_protection(monkeypatch):
    runner = pytest.importorskip("grpo_cli.sandbox.runner", exc_type=ImportError)
    monkeypatch.setattr(runner, "find_protections", tuple)
    [issue] = find_kind("tools", "python_code")().problems()
    assert issue.path == "unprotected"
    with pytest.raises(EpisodeError, match="unprotected: true"):
        run("print(1)")
    assert run("print(1)", unprotected=True) == "1"
