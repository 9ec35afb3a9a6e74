"""The child: a process that watches, and one that confines itself, runs the program and reports.

A test runs in a third process, which the program cannot change, and calls the program's functions from there. All
end when the trainer does: the kernel tells the watching process, which no program can reach.
"""

# `signal` itself takes longer to import than everything else here.
import _signal as signal  # type: ignore[import-not-found]
import builtins
import marshal
import os
import resource
import sys
from types import SimpleNamespace

from grpo_cli.sandbox import confinement
from grpo_cli.sandbox.values import text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

    from grpo_cli.sandbox.rules import TestPeer

MODULE = "solution"
"""What a test imports the program's names from."""
READY = b"ready\n"
"""Begins the report before the program runs; anything else is why it could not be run."""
_REASON = 200
"""Longest reason, in characters."""
_leave = os._exit
"""Kept from before the program ran, which may replace it."""


def main() -> None:
    """Run the job that the first argument describes, marshalled.

    Its keys are those of `confinement.confine`, the descriptors `report` and `source` (a program of `size` bytes,
    and a marshalled check of `check_size`, 0 for none), and `parent`.
    """
    job = SimpleNamespace(**marshal.loads(bytes.fromhex(sys.argv[1])))
    # The interpreter starts without `site`, which defines these two.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    if job.check_size:
        # Now, as the confined process cannot read it; not before, as it takes time.
        from grpo_cli.sandbox import rules, unit_tests  # noqa: F401
    try:
        # A signal to end waits until it is known which process to end.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        confinement.prepare(job.protections)
        if os.getppid() != job.parent:
            os._exit(1)
        child = os.fork()
        if not child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            confinement.confine(job)
            # The first entry is where this module was found.
            sys.path = [*sys.path[1:], *job.packages]
            _run(job)
    except OSError as error:
        os.write(job.report, str(error).encode(errors="replace"))
        os._exit(1)
    if child:
        _watch(child, job.source)


def _run(job: SimpleNamespace) -> None:
    """Give up the last rights, and run the program; with a test, in a process of its own."""
    text = _read(job.source, job.size)
    if not job.check_size:
        confinement.deny_calls(job.protections)
        os.write(job.report, READY)
        os.close(job.source)
        _run_alone(text, job.report)
        return
    confinement.hide(True)
    requests, replies = os.pipe(), os.pipe()
    program = os.fork()
    if not program:
        for descriptor in (job.source, job.report, requests[1], replies[0]):
            os.close(descriptor)
        confinement.hide(False)
        confinement.bind_to_parent()
        confinement.deny_calls(job.protections)
        _serve_program(text, requests[0], replies[1])
    for descriptor in (requests[0], replies[1]):
        os.close(descriptor)
    confinement.deny_calls(job.protections)
    os.write(job.report, READY)
    _run_test(job, replies[0], requests[1], program)


def _watch(child: int, source: int) -> None:
    """Wait for the program's process, end what it left behind, and end as it did."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # What stays open here keeps the runner waiting; the report does, so that it waits for this process too.
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.close(source)
    _, status = os.waitpid(child, 0)
    _end_orphans()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _end_orphans() -> None:
    """Kill descendants until none is left; on Linux this process inherits orphans."""
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended:
                with open(f"/proc/self/task/{os.getpid()}/children") as children:
                    for pid in children.read().split():
                        os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
        except ChildProcessError:
            return


def _run_alone(text: bytes, report: int) -> None:
    """Run a program whose output counts; end as the interpreter does."""
    module = _make_module("__main__")
    try:
        exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        _fail(report, _describe(error))


def _serve_program(text: bytes, requests: int, replies: int) -> None:
    """Run a program, and then what its test asks for, until the test ends."""
    from grpo_cli.sandbox.peer import ProgramPeer

    module = _make_module("program")
    peer = ProgramPeer(requests, replies, module)
    try:
        exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
        peer.tell("ready")
        peer.serve()
    except BaseException as error:
        peer.tell("fault", _describe(error)[:_REASON])
    _leave(1)


def _run_test(job: SimpleNamespace, replies: int, requests: int, program: int) -> None:
    """Run a test, which calls what the program in process `program` defined."""
    from grpo_cli.sandbox.rules import TestPeer

    check = marshal.loads(_read(job.source, job.check_size))
    peer = TestPeer(replies, requests, "\n".join(step["code"] for step in check["steps"]))
    sys.argv = ["program.py"]
    try:
        kind, *fault = peer.receive()
        if kind != "ready":
            _fail(job.report, str(fault[0]))
        for fault in _run_check(peer, check):
            _report(job.report, fault)
        _leave(0)
    except BaseException as error:
        if not peer.has_ended:
            _fail(job.report, peer.refusal or _describe(error))
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        ended = f"the program ended itself (exit code {code})"
        _fail(job.report, f"ended by signal {-code}" if code < 0 else ended)


def _run_check(peer: "TestPeer", check: "dict[str, Any]") -> "Iterator[str]":
    """Run tests and yield why each failed; empty for one that passed."""
    found = peer.names(check["names"])
    if not found:
        raise NameError(f"name {check['names'][0]!r} is not defined")
    names = _make_test_names(found, check, peer)
    data = [name for name, value in found.items() if not callable(value)]
    peer.share(data, vars(sys.modules[MODULE]), names, assigned=check["assigned"])
    if any("seed" in step["code"] for step in check["steps"]):
        _seed_both(peer)
    for step in check["steps"]:
        fault = ""
        try:
            _run_step(step, names)
        except BaseException as error:
            if not step["asserts"]:
                raise
            fault = _describe(error) or "an exception"
        if peer.has_ended:
            raise EOFError
        # Whatever the test made of it.
        fault, peer.refusal = peer.refusal or fault, ""
        if step["asserts"]:
            yield fault
            if check["stop"] and fault:
                return


def _seed_both(peer: "TestPeer") -> None:
    """Have `random.seed` also set what is random in the program."""
    import random

    seed = random.seed
    random.seed = lambda *args: (seed(*args), peer.ask("call", 1, args, ()))[0]


def _make_test_names(
    found: "dict[str, Any]", check: "dict[str, Any]", peer: "TestPeer"
) -> "dict[str, Any]":
    """Return the names that tests begin with: what the program defines, which they can also import."""
    from grpo_cli.sandbox import unit_tests

    module, solution = type(sys)("test"), type(sys)(MODULE)
    solution.__dict__.update(found)
    names = module.__dict__
    # Names of Python's own are of the program only where the test imports them.
    names.update({name: value for name, value in found.items() if name not in dir(builtins)})
    counter = unit_tests.Assertions(check["compare"], peer)
    names.update({"__builtins__": builtins, "__file__": "test.py"})
    names.update({unit_tests.COUNTER: counter, unit_tests.RESULTS: counter})
    names.update({name: getattr(counter, name) for name in "all any eval filter map zip".split()})
    sys.modules.update({MODULE: solution}, test=module, __main__=module, pytest=unit_tests)
    return names


def _run_step(step: "dict[str, Any]", names: "dict[str, Any]") -> None:
    from grpo_cli.sandbox import unit_tests

    assertions = names[unit_tests.COUNTER]
    before = assertions.start()
    exec(compile(step["code"], "test.py", "exec", dont_inherit=True), names)
    unit_tests.run(names, step["collected"])
    if step["asserts"]:
        assertions.require(before)
    assertions.require_no_failure()


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _make_module(name: str) -> "ModuleType":
    """Return the module a program runs as; nothing else of ours stays to be imported."""
    for each in [each for each in sys.modules if each.startswith("grpo_cli")]:
        del sys.modules[each]
    module = type(sys)(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    sys.argv = ["program.py"]
    return module


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the program ended itself (exit code {error.code})"
    name, message = type(error).__name__, text_of(error)
    if name == "AssertionError" and message:
        return message
    return f"{name}: {message}" if message else name


def _fail(report: int, reason: str) -> None:
    _report(report, reason)
    _leave(1)


def _report(report: int, fault: str) -> None:
    # The sign tells a test that failed even if its exception has no name.
    line = "-" * bool(fault) + " ".join(fault[:_REASON].splitlines())
    os.write(report, line.encode(errors="replace") + b"\n")
