"""The child's side: a process that watches, and one that confines itself and runs the program.

Owns their lives and the words they send to the runner. All end when the trainer does: the watching
process, which no program can reach, is told by the kernel. A test adds a third, for the program.
"""

# `signal` itself takes longer to import than everything else here.
import _signal as signal  # type: ignore[import-not-found]
import marshal
import os
import resource
import sys

from grpo_cli.rewards.sandbox.confinement import Confinement
from grpo_cli.rewards.sandbox.execution import Job, run_job, run_program, run_test

TYPE_CHECKING = False
if TYPE_CHECKING:
    from grpo_cli.rewards.sandbox.remote import Peer

READY = b"ready"
"""Sent before the program runs; anything else is why it could not be run."""


def main() -> None:
    """Runs the job that the first argument describes, marshalled."""
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))
    status, job = settings["status"], Job(**settings["job"])
    confinement = Confinement(**settings["confinement"])
    peer: type[Peer] | None = None
    if job.is_tested:
        # Now, as the confined process cannot read it; not before, as it takes time.
        from grpo_cli.rewards.sandbox import remote

        peer = remote.Peer
    try:
        # An end that is asked for waits until it is known whom to end.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        confinement.prepare()
        if os.getppid() != settings["parent"]:
            os._exit(1)
        child = os.fork()
    except OSError as error:
        _stop(status, error)
    if child:
        _watch(child, (job.source, job.report))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        confinement.apply()
        # The first entry is where this module was found.
        sys.path = [*sys.path[1:], *confinement.packages]
        _run(job, status, confinement, peer)
    except OSError as error:
        _stop(status, error)


def _run(job: Job, status: int, confinement: Confinement, peer: "type[Peer] | None") -> None:
    """Gives up the last rights, and runs the program; with a test, in a process of its own."""
    if peer is None:
        confinement.deny_calls()
        _begin(status)
        run_job(job)
        return
    text = job.read_program()
    confinement.hide(True)
    asked, answered = os.pipe(), os.pipe()
    program = os.fork()
    if not program:
        for descriptor in (job.source, job.report, status, asked[1], answered[0]):
            os.close(descriptor)
        confinement.hide(False)
        confinement.bind_to_parent()
        confinement.deny_calls()
        run_program(text, lambda names: peer(asked[0], answered[1], names))
    for descriptor in (asked[0], answered[1]):
        os.close(descriptor)
    confinement.deny_calls()
    _begin(status)
    run_test(job, peer(answered[0], asked[1]), program)


def _begin(status: int) -> None:
    os.write(status, READY)
    os.close(status)


def _stop(status: int, error: OSError) -> None:
    os.write(status, str(error).encode(errors="replace"))
    os._exit(1)


def _watch(child: int, descriptors: tuple[int, ...]) -> None:
    """Waits for the program's process, ends what it left behind, and ends as it did."""

    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # What stays open here would keep the runner waiting for more; the status pipe does, so that
    # it waits for this process too.
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    for descriptor in descriptors:
        os.close(descriptor)
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
    """Kills descendants until none is left; on Linux they were handed to this process."""
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
