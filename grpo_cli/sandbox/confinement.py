"""What a child gives up before it runs a program: rights, files, memory, time, system calls.

Every requested step works or the child stops; the runner finds out which steps work on a machine. The Linux calls
that Python has no functions for follow the kernel's headers (linux/landlock.h, linux/capability.h).

What the seccomp filter does not name is refused. A program may compute, wait, start threads, signal itself, and
use files; it may not change what Landlock does not cover (rights, owners, times, attributes, locks), nor reach
other processes, other sockets, or what processes share (System V, queues). Source: classic BPF over
`struct seccomp_data` (linux/filter.h, linux/seccomp.h); numbers of arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h (Linux 6.12).
"""

import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

OPEN_FILES = 64
TASKS = 128
"""Threads and processes, if the user id is the program's own and can be counted by."""
WORK = "/tmp"
"""The working folder in a private root."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_MIB = 1024 * 1024

_NEW_NS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048
"""nosuid, nodev, noexec, noatime, nodiratime: a user namespace may not clear them on a remount."""
_RELATIME_SEEN, _RELATIME = 4096, 1 << 21
_DEATH_SIGNAL, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_SIGKILL, _SIGTERM = 9, 15
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ = 1 | 4 | 8
_LANDLOCK_FILE = 1 | 2 | 4 | 1 << 14
_CAPABILITIES_VERSION = 0x20080522

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NOT_PERMITTED, _NO_SUCH_CALL = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_NEWER = 450
_ALL = 0xFFFFFFFF
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's name of the architecture, and the column of the tables below."""

_ALLOWED = """
read 0 63  write 1 64  close 3 57  lseek 8 62  pread64 17 67  pwrite64 18 68  readv 19 65
writev 20 66  preadv 295 69  pwritev 296 70  preadv2 327 286  pwritev2 328 287  dup 32 23  dup2 33 -
dup3 292 24  pipe 22 -  pipe2 293 59  sendfile 40 71  copy_file_range 326 285  fsync 74 82
fdatasync 75 83  ftruncate 77 46  creat 85 -  stat 4 -  fstat 5 80  lstat 6 -  newfstatat 262 79
statx 332 291  statfs 137 43  fstatfs 138 44  access 21 -  faccessat 269 48  faccessat2 439 439
getdents 78 -  getdents64 217 61  getcwd 79 17  chdir 80 49  fchdir 81 50  rename 82 -
renameat 264 38  renameat2 316 276  mkdir 83 -  mkdirat 258 34  rmdir 84 -  link 86 -  linkat 265 37
unlink 87 -  unlinkat 263 35  symlink 88 -  symlinkat 266 36  readlink 89 -  readlinkat 267 78
umask 95 166  poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create 213 -
epoll_create1 291 20  epoll_ctl 233 21  epoll_wait 232 -  epoll_pwait 281 22  epoll_pwait2 441 441
eventfd2 290 19  sendto 44 206  recvfrom 45 207  shutdown 48 210  getsockname 51 204
getpeername 52 205  getsockopt 55 209  mmap 9 222  mremap 25 216  munmap 11 215  mprotect 10 226
madvise 28 233  msync 26 227  brk 12 214  rt_sigaction 13 134  rt_sigprocmask 14 135
rt_sigreturn 15 139  rt_sigpending 127 136  rt_sigtimedwait 128 137  rt_sigsuspend 130 133
sigaltstack 131 132  pause 34 -  nanosleep 35 101  clock_nanosleep 230 115  clock_gettime 228 113
clock_getres 229 114  gettimeofday 96 169  time 201 -  times 100 153  alarm 37 -  getitimer 36 102
setitimer 38 103  exit 60 93  exit_group 231 94  wait4 61 260  waitid 247 95  futex 202 98
set_robust_list 273 99  set_tid_address 218 96  restart_syscall 219 128  rseq 334 293
arch_prctl 158 -  getpid 39 172  gettid 186 178  getppid 110 173  getpgid 121 155  getpgrp 111 -
getsid 124 156  getuid 102 174  geteuid 107 175  getgid 104 176  getegid 108 177  getresuid 118 148
getresgid 120 150  getgroups 115 158  capget 125 90  getpriority 140 141  getrlimit 97 163
setrlimit 160 164  getrusage 98 165  sysinfo 99 179  uname 63 160  getcpu 309 168  getrandom 318 278
sched_yield 24 124  sched_getaffinity 204 123  sched_getparam 143 121  sched_getscheduler 145 120
sched_get_priority_max 146 125  sched_get_priority_min 147 126
"""
"""Calls that are allowed whatever their arguments, with their numbers on x86_64 and aarch64. All
others fail with "not permitted", among them memory outside the limit on address space (memfd, System
V), disk space taken at once (fallocate), and timers, locks and queues, which the kernel counts for all
of a user's processes or not at all."""
_MISSING = (435, 436, 437)
"""Calls that fail as on an old kernel, so that libraries use what can be checked: clone3 (clone),
close_range, which can part a thread's open files from its process's, and openat2 (openat)."""
_OPENED = (0, 1, 2, 3, 0x201, 0x202), 0x203
_CONDITIONAL: "tuple[tuple[Any, ...], ...]" = (
    # clone: a thread that shares open files.
    ((56, 220), (0, (0x00010000 | 0x00000400,), 0x00010000 | 0x00000400)),
    # prctl: a thread's name, and names of memory.
    ((157, 167), (0, (15, 16, 0x53564D41), _ALL)),
    # fcntl: copies of descriptors, and flags. Other commands have files signal other processes, lock files that
    # others use, or make pipes larger.
    ((72, 25), (1, (0, 1, 2, 3, 4, 1030), _ALL)),
    # ioctl: is it a terminal, of what size, bytes to read, (non)blocking, (not) kept by exec. FIOSETOWN and
    # others do as F_SETOWN does.
    ((16, 29), (1, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), _ALL)),
    # socketpair: streams that reach nobody else; with datagrams, each message may name its receiver.
    ((53, 199), (0, (1,), _ALL), (1, (1,), 0xF)),
    # open and openat, unless a file is emptied though not written: Landlock notices it only since Linux 6.2.
    ((2, None), (1, *_OPENED)),
    ((257, 56), (2, *_OPENED)),
)
"""Calls that are allowed if the masked lower half of each argument (from 0) has one of the given values."""
_ON_ITSELF = (((62, 129), ()), ((234, 131), ()), ((302, 261), (0,)))
"""kill, tgkill and prlimit: allowed if their first argument is the process itself, or one of these values."""

_libc = ctypes.CDLL(None, use_errno=True)


def is_namespaced(protections: "tuple[str, ...]") -> bool:
    """Return whether the program has a root folder and process numbers of its own."""
    return "namespaces" in protections or "user_namespaces" in protections


def prepare(protections: "tuple[str, ...]") -> None:
    """Take the steps that come before the process is forked in which the program runs."""
    if sys.platform != "linux":
        return
    _prctl(_SUBREAPER, 1)
    if is_namespaced(protections):
        _enter_namespaces(with_user="user_namespaces" in protections)
    # Not before: the kernel forgets it when rights change. The watching process is asked to
    # end, and ends the program first, which may have asked the kernel to forget its own.
    _prctl(_DEATH_SIGNAL, _SIGTERM)


def confine(settings: "Any") -> None:
    """Take the steps of the process itself, except `deny_calls`.

    Args:
        settings: `protections`, `folder` (the working folder, and the mount point of a private root),
            `user` (the id for `other_user`), `memory_mib`, `file_mib`, `cpu_s`, and `packages` (folders of
            installed packages).
    """
    bind_to_parent()
    protections, folder = settings.protections, settings.folder
    if is_namespaced(protections):
        _mount_private_root(folder, settings.file_mib, _readable_paths(settings.packages))
        folder = WORK
    if "other_user" in protections:
        os.chown(folder, settings.user, settings.user)
        os.setgroups([])
        os.setresgid(settings.user, settings.user, settings.user)
        os.setresuid(settings.user, settings.user, settings.user)
    if sys.platform == "linux":
        _prctl(_NO_NEW_PRIVILEGES, 1)
        header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
        _check(_libc.capset(header, bytes(24)), "capset")
    bind_to_parent()
    _set_limits(settings)
    if "landlock" in protections:
        # Read again, as the program's user.
        _restrict_files(_readable_paths(settings.packages), [folder])


def bind_to_parent() -> None:
    """Have the kernel end this process when its parent ends; to be repeated after a fork or new user."""
    if sys.platform == "linux":
        _prctl(_DEATH_SIGNAL, _SIGKILL)


def hide(is_hidden: bool) -> None:
    """Keep other processes of the user from reading this one's memory and files, or let them again."""
    if sys.platform == "linux":
        _prctl(_DUMPABLE, int(not is_hidden))


def deny_calls(protections: "tuple[str, ...]") -> None:
    """Install the seccomp filter: the last step, after which this process starts no other."""
    if "seccomp" not in protections:
        return
    program = _build_filter(os.getpid())
    if program is None:
        raise OSError("seccomp: the calls of this kind of machine are not known")
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _check(_libc.prctl(_SECCOMP, 2, header, 0, 0), "seccomp")


def _readable_paths(packages: "tuple[str, ...]") -> "list[str]":
    """Return the system's libraries, the interpreter and the packages; parents before children."""
    inner = (sys.base_prefix, sys.base_exec_prefix, *packages)
    # If a path is a link, what it leads to must be there too.
    both = [path for each in inner for path in (each, os.path.realpath(each))]
    real = {path for path in both if path != "/" and os.path.isdir(path)}
    fixed = [path for path in (*_SYSTEM, *_DEVICES) if os.path.lexists(path)]
    roots = tuple(f"{path}/" for path in (*_SYSTEM, *real))
    return [*fixed, *sorted(path for path in real if not path.startswith(roots))]


def _set_limits(settings: "Any") -> None:
    limits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": settings.cpu_s,
        "RLIMIT_AS": settings.memory_mib * _MIB,
        "RLIMIT_FSIZE": settings.file_mib * _MIB,
        "RLIMIT_NOFILE": OPEN_FILES,
    }
    if sys.platform == "linux":
        # Counted for all processes of the user, who needs the rest.
        limits["RLIMIT_SIGPENDING"] = TASKS
    if "other_user" in settings.protections:
        limits["RLIMIT_NPROC"] = TASKS
    for name, value in limits.items():
        number = getattr(resource, name)
        _, hardest = resource.getrlimit(number)
        lowered = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
        try:
            resource.setrlimit(number, (lowered, lowered))
        except (ValueError, OSError):
            # macOS refuses to limit address space; Linux refuses nothing that is lower.
            if sys.platform == "linux":
                raise


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _enter_namespaces(with_user: bool) -> None:
    """Give this process mounts, network and names of its own, and its children their own pids.

    With a user namespace, users without privileges may do the rest.
    """
    user, group = os.geteuid(), os.getegid()
    flags = _NEW_NS | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET
    _check(_libc.unshare(flags | (_NEW_USER if with_user else 0)), "unshare")
    if with_user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _mount_private_root(folder: str, mib: int, readable: "list[str]") -> None:
    """Move into a file system of `mib` in memory, in which only `readable` stays, read-only."""
    _mount("none", "/", None, _REC | _PRIVATE, None)
    _mount("tmpfs", folder, "tmpfs", 2 | 4, f"size={mib}m,nr_inodes=4096,mode=755")
    for path in readable:
        _show(path, folder + path)
    # It is there already if the interpreter lives under it.
    os.makedirs(folder + WORK, exist_ok=True)
    os.chmod(folder + WORK, 0o755)
    os.chroot(folder)
    os.chdir(WORK)


def _show(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(target):
        return
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, None, _BIND, None)
    flags = os.statvfs(target).f_flag
    kept = flags & _KEPT_FLAGS | (_RELATIME if flags & _RELATIME_SEEN else 0)
    _mount("none", target, None, _BIND | _REMOUNT | _READ_ONLY | kept, None)


def _mount(source: str, target: str, kind: "str | None", flags: int, options: "str | None") -> None:
    texts = [text and text.encode() for text in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"mount {target}")


def _restrict_files(readable: "list[str]", writable: "list[str]") -> None:
    """Deny this process every file but these, with all below them (Landlock; Linux 5.13)."""
    version = _check(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock")
    # 13 rights in the first version; moving between folders and truncating came with 2 and 3.
    handled = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    attributes = struct.pack("Q", handled)
    rules = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock")
    granted = [(path, _LANDLOCK_READ) for path in readable]
    for path, rights in [*granted, *((path, handled) for path in writable)]:
        if not os.path.isdir(path):
            rights &= _LANDLOCK_FILE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights & handled, descriptor)
        _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock {path}")
        os.close(descriptor)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)


def _build_filter(pid: int) -> bytes | None:
    """Return the seccomp filter for process `pid` (in its own namespace); None for an unknown machine."""
    machine = _MACHINES.get(os.uname().machine)
    if machine is None or struct.calcsize("P") != 8:
        return None
    architecture, column = machine
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        # Numbers from 2^30 are x86's third set of calls, and so refused as well.
        _step(_AT_LEAST, _NEWER, 0, 1),
        _error(_NO_SUCH_CALL),
    ]
    for number in _MISSING:
        code += [_step(_EQUAL, number, 0, 1), _error(_NO_SUCH_CALL)]
    for number in _numbers(column):
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    own = [(numbers, (0, (*values, pid), _ALL)) for numbers, values in _ON_ITSELF]
    for numbers, *conditions in (*_CONDITIONAL, *own):
        if numbers[column] is not None:
            code += _allow_if(numbers[column], *conditions)
    return b"".join([*code, _error(_NOT_PERMITTED)])


def _numbers(column: int) -> list[int]:
    words = _ALLOWED.split()
    named = [words[start + 1 + column] for start in range(0, len(words), 3)]
    return [int(number) for number in named if number != "-"]


def _allow_if(number: int, *conditions: "tuple[int, Sequence[int], int]") -> list[bytes]:
    body = []
    for argument, values, mask in conditions:
        body += [_step(_LOAD, _ARGUMENTS + 8 * argument), _step(_AND, mask)]
        # Each test jumps over the rest of the tests and the answer for all other values.
        size = len(values)
        body += [_step(_EQUAL, value, size - place) for place, value in enumerate(values)]
        body.append(_error(_NOT_PERMITTED))
    body.append(_step(_RETURN, _ALLOW))
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
