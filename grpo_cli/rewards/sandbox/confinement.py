"""What a child gives up before it runs a program: rights, sight, memory, time.

Owns the order of the steps. Every step that was asked for works or the child stops; which steps
work on a machine is found out by the runner.
"""

import os
import resource
import sys

from grpo_cli.rewards.sandbox import kernel
from grpo_cli.rewards.sandbox.filters import build_filter

OPEN_FILES = 64
TASKS = 128
"""Threads and processes, where the user id is the program's own and can be counted by."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


class Confinement:
    """What a child does to itself before the program runs.

    Attributes:
        protections: The steps to take; what each does is said in `runner.py`.
        folder: The working folder; the mount point of the program's root where there is one.
        user: The user and group id for `other_user`.
        memory_mib: Largest address space.
        file_mib: Largest file, and all files together in a private root.
        cpu_s: Most CPU time.
        packages: Folders of installed packages that may be imported.
    """

    def __init__(
        self,
        protections: tuple[str, ...],
        folder: str,
        user: int,
        memory_mib: int,
        file_mib: int,
        cpu_s: int,
        packages: tuple[str, ...],
    ) -> None:
        self.protections = protections
        self.folder = folder
        self.user = user
        self.memory_mib = memory_mib
        self.file_mib = file_mib
        self.cpu_s = cpu_s
        self.packages = packages

    @property
    def is_namespaced(self) -> bool:
        """Whether the program has a root folder and process numbers of its own."""
        return "namespaces" in self.protections or "user_namespaces" in self.protections

    def prepare(self) -> None:
        """The steps that must be taken before the process is made in which the program runs."""
        if sys.platform != "linux":
            return
        kernel.adopt_orphans()
        if self.is_namespaced:
            kernel.enter_namespaces(with_user="user_namespaces" in self.protections)
        # Not before: the kernel forgets it when rights change. The watching process is asked to
        # end, and ends the program first, which may have asked the kernel to forget its own.
        kernel.die_with_parent(kernel.TERMINATE)

    def apply(self) -> None:
        """The steps of the process itself, but for `deny_calls`."""
        self.bind_to_parent()
        place = self.folder
        if self.is_namespaced:
            kernel.mount_private_root(self.folder, self.file_mib, self._seen())
            place = kernel.WORK
        if "other_user" in self.protections:
            os.chown(place, self.user, self.user)
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        if sys.platform == "linux":
            kernel.forbid_new_privileges()
            kernel.drop_capabilities()
        self.bind_to_parent()
        self._limit()
        if "landlock" in self.protections:
            kernel.restrict_files(self._seen(), [place])

    def bind_to_parent(self) -> None:
        """Has the kernel end this process when its parent ends; once more after every fork."""
        if sys.platform == "linux":
            kernel.die_with_parent(kernel.KILL)

    def hide(self, is_hidden: bool) -> None:
        """Keeps other processes of the user from looking into this one, or lets them again."""
        if sys.platform == "linux":
            kernel.set_dumpable(not is_hidden)

    def deny_calls(self) -> None:
        """The last step, after which this process starts no other."""
        if "seccomp" in self.protections:
            code = build_filter(os.getpid())
            if code is None:
                raise OSError("seccomp: the calls of this kind of machine are not known")
            kernel.filter_calls(code)

    def _seen(self) -> list[str]:
        """The system's libraries, the interpreter and the packages; parents before children."""
        inner = (sys.base_prefix, sys.base_exec_prefix, *self.packages)
        # Where a path is a link, what it leads to must be there too.
        both = (path for given in inner for path in (given, os.path.realpath(given)))
        real = {path for path in both if path != "/" and os.path.isdir(path)}
        fixed = [path for path in (*_SYSTEM, *_DEVICES) if os.path.lexists(path)]
        roots = tuple(f"{path}/" for path in (*_SYSTEM, *real))
        return [*fixed, *sorted(path for path in real if not path.startswith(roots))]

    def _limit(self) -> None:
        mib = 1024 * 1024
        limits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_mib * mib,
            "RLIMIT_FSIZE": self.file_mib * mib,
            "RLIMIT_NOFILE": OPEN_FILES,
        }
        if sys.platform == "linux":
            # Counted for all processes of the user, who needs the rest.
            limits["RLIMIT_SIGPENDING"] = TASKS
        if "other_user" in self.protections:
            limits["RLIMIT_NPROC"] = TASKS
        for name, wanted in limits.items():
            _set_limit(getattr(resource, name), wanted)


def _set_limit(which: int, wanted: int) -> None:
    """Lowers a limit; it may already be lower."""
    _, hardest = resource.getrlimit(which)
    value = wanted if hardest == resource.RLIM_INFINITY else min(wanted, hardest)
    try:
        resource.setrlimit(which, (value, value))
    except (ValueError, OSError):
        # macOS refuses to limit address space; Linux refuses nothing that is lower.
        if sys.platform == "linux":
            raise
