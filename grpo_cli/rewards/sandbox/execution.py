"""Running one program inside its confinement, and one check of what it defined.

Owns what a program finds when it starts, and the report. A value is asked of the program's own
process: such a report is a claim, which the runner compares with what is expected. A test runs in
another process, which the program cannot change, and calls the program's functions from there.
"""

import builtins
import marshal
import os
import sys

from grpo_cli.rewards.sandbox.values import encode, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from grpo_cli.rewards.sandbox.remote import Peer

_REASON = 200
"""Longest reason, in characters."""
# Kept from before the program ran, which may replace the originals.
_set_trace, _set_profile, _load = sys.settrace, sys.setprofile, marshal.loads
_read_some, _write, _leave = os.read, os.write, os._exit
_BUILTINS = dict(vars(builtins))


class Job:
    """What to run.

    Attributes:
        source: Descriptor of a file: the program's text, and the check (marshalled).
        size: Bytes of the program's text.
        check_size: Bytes of the check; without one (0), the program's output is all that counts.
        is_tested: Whether the check is a test, which runs in a process of its own.
        report: Descriptor the report is written to.
    """

    def __init__(
        self, source: int, size: int, check_size: int, is_tested: bool, report: int
    ) -> None:
        self.source = source
        self.size = size
        self.check_size = check_size
        self.is_tested = is_tested
        self.report = report

    def read_program(self) -> bytes:
        """The program's text; read first."""
        return _read(self.source, self.size)


def run_job(job: Job) -> None:
    """Runs the program; without a check, ends as the interpreter does.

    With one, the program's own end is a failure, and its threads are not waited for.
    """
    text = job.read_program()
    if not job.check_size:
        os.close(job.source)
    module = _make_module("program" if job.check_size else "__main__")
    try:
        exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
        if job.check_size:
            _set_trace(None)
            _set_profile(None)
            builtins.__dict__.update(_BUILTINS)
            check = _load(_read(job.source, job.check_size))
            _report(job.report, _run_check(check, module))
            _leave(0)
    except SystemExit as error:
        if not job.check_size:
            raise
        _fail(job.report, _describe(error))
    except BaseException as error:
        _fail(job.report, _describe(error))


def run_program(text: bytes, make_peer: "Callable[[dict[str, Any]], Peer]") -> None:
    """Runs a program, and then what its test asks for, until the test ends."""
    module = _make_module("program")
    peer = make_peer(module.__dict__)
    try:
        exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
        _set_trace(None)
        _set_profile(None)
        peer.tell("ready")
        peer.serve()
    except BaseException as error:
        peer.tell("fault", _describe(error)[:_REASON])
    _leave(1)


def run_test(job: Job, peer: "Peer", program: int) -> None:
    """Runs a test, which calls what the program defined.

    Args:
        job: The job, of whose source the program was read.
        peer: Speaks with the program's process.
        program: Its process number.
    """
    from grpo_cli.rewards.sandbox.remote import Ended, describe_remote

    check = _load(_read(job.source, job.check_size))
    sys.argv = ["program.py"]
    try:
        if fault := peer.await_program():
            _fail(job.report, fault)
        codes = [compile(check["setup"], "test.py", "exec", dont_inherit=True)]
        if check["text"]:
            codes.append(compile(check["text"], "test.py", "eval", dont_inherit=True))
        names = {"__name__": "test", "__builtins__": builtins, **peer.names(codes)}
        exec(codes[0], names)
        content: dict[str, object] = {"passed": True}
        if check["text"]:
            content = {"value": encode(eval(codes[1], names), describe_remote)}
        _report(job.report, content)
        _leave(0)
    except Ended:
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        end = (
            f"ended by signal {-code}"
            if code < 0
            else f"the program ended itself (exit code {code})"
        )
        _fail(job.report, end)
    except BaseException as error:
        _fail(job.report, _describe(error))


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size and (part := _read_some(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _make_module(name: str) -> "ModuleType":
    """The module a program runs as; nothing else of ours stays to be imported."""
    for each in [each for each in sys.modules if each.startswith("grpo_cli")]:
        del sys.modules[each]
    module = type(sys)(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    sys.argv = ["program.py"]
    # The interpreter starts without `site`, which defines these two.
    for usual in ("exit", "quit"):
        setattr(builtins, usual, sys.exit)
    return module


def _run_check(check: "dict[str, Any]", module: "ModuleType") -> dict[str, object]:
    """The value a check asks for."""
    names = module.__dict__
    exec(compile(check["setup"], "test.py", "exec", dont_inherit=True), names)
    if check["kind"] == "value":
        return {"value": encode(eval(compile(check["text"], "test.py", "eval"), names))}
    return {"value": encode(_find(check["text"], names)(*check["arguments"]))}


def _find(name: str, names: "dict[str, Any]") -> "Any":
    """The function to call: the program's own, or a method of its class `Solution`."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)
    if name not in names:
        raise NameError(f"name {name!r} is not defined")
    return names[name]


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, SystemExit):
        return f"the program ended itself (exit code {error.code})"
    try:
        message = str(error)
    except BaseException:
        return name
    return f"{name}: {message}" if message else name


def _fail(report: int, reason: str) -> None:
    _report(report, {"error": reason[:_REASON]})
    _leave(1)


def _report(report: int, content: dict[str, object]) -> None:
    rest = b"\n" + write_json(content).encode()
    while rest:
        rest = rest[_write(report, rest) :]
