"""Running one program inside its confinement, and one check of what it defined.

Owns what a program finds when it starts, and the report. Whatever runs here runs beside the
program, which can see and change it: a report is a claim, and the runner judges it.
"""

import builtins
import marshal
import os
import sys

from grpo_cli.rewards.sandbox.values import encode, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_REASON = 200
_PROOF = 64
"""Longest reason, in characters, and proof, in bytes."""
# Kept from before the program ran, which may replace the originals.
_set_trace, _set_profile, _load = sys.settrace, sys.setprofile, marshal.loads
_read_some, _write, _leave = os.read, os.write, os._exit
_BUILTINS = dict(vars(builtins))


class Job:
    """What to run.

    Attributes:
        source: Descriptor of a file: the program's text, the check (marshalled), the proof.
        size: Bytes of the program's text.
        check_size: Bytes of the check; without one (0), the program's output is all that counts.
            The proof is what the report of a check repeats that passed.
        report: Descriptor the report is written to.
    """

    def __init__(self, source: int, size: int, check_size: int, report: int) -> None:
        self.source = source
        self.size = size
        self.check_size = check_size
        self.report = report


def run_job(job: Job) -> None:
    """Runs the program; without a check, ends as the interpreter does.

    With one, the program's own end is a failure, and its threads are not waited for.
    """
    text = _read(job.source, job.size)
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
            # The proof is read only now: a program that does not go looking for it cannot know it.
            report = _run_check(check, module) or {"proof": _read(job.source, _PROOF).decode()}
            _report(job.report, report)
            _leave(0)
    except SystemExit as error:
        if not job.check_size:
            raise
        _fail(job.report, f"the program ended itself (exit code {error.code})")
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


def _run_check(check: "dict[str, Any]", module: "ModuleType") -> dict[str, object] | None:
    """The value a check asks for; None for one that passes by raising nothing."""
    names = module.__dict__
    setup = compile(check["setup"], "test.py", "exec", dont_inherit=True)
    if check["kind"] == "run":
        exec(setup, _without_shadows(names, setup.co_names))
        return None
    exec(setup, names)
    if check["kind"] == "value":
        return {"value": encode(eval(compile(check["text"], "test.py", "eval"), names))}
    return {"value": encode(_find(check["text"], names)(*check["arguments"]))}


def _without_shadows(names: "dict[str, Any]", used: tuple[str, ...]) -> "dict[str, Any]":
    """A program's names for an assertion, which wants Python's own `abs`, not the program's.

    An assertion that uses nothing else of the program tests a function of such a name.
    """
    own = {name: value for name, value in names.items() if name not in _BUILTINS}
    return own if any(name in own for name in used) else names


def _find(name: str, names: "dict[str, Any]") -> "Any":
    """The function to call: the program's own, or a method of its class `Solution`."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)
    if name not in names:
        raise NameError(f"name {name!r} is not defined")
    return names[name]


def _describe(error: BaseException) -> str:
    name = type(error).__name__
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
