"""The seccomp filter: which system calls a program may make.

Owns the numbers of the calls and the filter's instructions. What is not named here is refused. A
program may compute, wait, start threads, signal itself, and use files; what of files Landlock does
not cover (rights, owners, times, attributes, locks) is not named, and neither is anything of other
processes, other sockets, what processes share (System V, queues), or the kernel's larger tools.
Numbers newer than this table do not exist for it.

Source: classic BPF over `struct seccomp_data` (linux/filter.h, linux/seccomp.h); numbers of
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (Linux 6.12).
"""

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NOT_PERMITTED, _NO_SUCH_CALL = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_NEWER = 450
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
others fail with "not permitted": memory that outlives or escapes the limit on address space (memfd,
System V), disk space that is taken at once (fallocate), and timers, locks and queues, which the
kernel counts for all of a user's processes or not at all, are among those that are missed."""
_MISSING = (435, 436, 437)
"""Calls that fail as on an old kernel, so that libraries use what can be checked: clone3 (clone),
close_range, which can part a thread's open files from its process's, and openat2 (openat)."""
_PRCTL, _FCNTL, _IOCTL, _SOCKETPAIR = (157, 167), (72, 25), (16, 29), (53, 199)
_CLONE, _PRLIMIT = (56, 220), (302, 261)
_KILL_CALLS = ((62, 129), (234, 131))
_OPEN_CALLS: "tuple[tuple[tuple[int | None, int | None], int], ...]" = (
    ((2, None), 1),
    ((257, 56), 2),
)
"""open and openat, and which argument holds the flags."""
_CLONED = 0x00010000 | 0x00000400
"""A thread that shares open files: the runner counts the files of a process once."""
_OPTIONS = (15, 16, 0x53564D41)
"""The options of prctl that are allowed: a thread's name, and names of memory."""
_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""The commands of fcntl that are allowed: copies of descriptors, and flags. Others have files signal
other processes, lock files that others use, or make pipes larger."""
_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""The requests of ioctl that are allowed: is it a terminal, of what size, bytes to read, (non)blocking,
(not) kept by exec. FIOSETOWN and others do as F_SETOWN does."""
_UNIX, _STREAM, _TYPE = 1, 1, 0xF
"""Pairs of sockets that reach nobody else; with datagrams, each message may name its receiver."""
_TRUNCATE, _ACCESS = 0x200, 3
"""Opening a file that is emptied though not written: Landlock notices it only since Linux 6.2."""
_OPENED = (0, 1, 2, 3, _TRUNCATE | 1, _TRUNCATE | 2)


def build_filter(pid: int) -> bytes | None:
    """The filter's instructions for a process; None where the machine's calls are not known.

    Args:
        pid: The process, in its own namespace.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None or struct.calcsize("P") != 8:
        return None
    architecture, column = machine
    code = [
        *_load(_ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        *_load(_NUMBER),
        # Numbers from 2^30 are x86's third set of calls, and so refused as well.
        _step(_AT_LEAST, _NEWER, 0, 1),
        _error(_NO_SUCH_CALL),
    ]
    for number in _MISSING:
        code += [_step(_EQUAL, number, 0, 1), _error(_NO_SUCH_CALL)]
    for number in _numbers(column):
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    for kill in _KILL_CALLS:
        code += _check(kill[column], _Condition(0, [pid]))
    code += _check(_PRLIMIT[column], _Condition(0, [0, pid]))
    code += _check(_CLONE[column], _Condition(0, [_CLONED], _CLONED))
    code += _check(_PRCTL[column], _Condition(0, _OPTIONS))
    code += _check(_FCNTL[column], _Condition(1, _COMMANDS))
    code += _check(_IOCTL[column], _Condition(1, _REQUESTS))
    pair = _Condition(0, [_UNIX]), _Condition(1, [_STREAM], _TYPE)
    code += _check(_SOCKETPAIR[column], *pair)
    for numbers, argument in _OPEN_CALLS:
        if (opening := numbers[column]) is not None:
            code += _check(opening, _Condition(argument, _OPENED, _TRUNCATE | _ACCESS))
    return b"".join([*code, _error(_NOT_PERMITTED)])


def _numbers(column: int) -> list[int]:
    words = _ALLOWED.split()
    named = [words[start + 1 + column] for start in range(0, len(words), 3)]
    return [int(number) for number in named if number != "-"]


class _Condition:
    """That an argument of a call, the masked bits of its lower half, has one of these values."""

    def __init__(self, argument: int, values: "Sequence[int]", mask: int = 0xFFFFFFFF) -> None:
        self.argument = argument
        self.values = values
        self.mask = mask


def _check(number: int, *conditions: _Condition) -> list[bytes]:
    """A call that is allowed only if all conditions hold."""
    body = []
    for each in conditions:
        body += [*_load(_ARGUMENTS + 8 * each.argument), _step(_AND, each.mask)]
        # Each test jumps over the rest of the tests and the answer for all other values.
        size = len(each.values)
        body += [_step(_EQUAL, value, size - place) for place, value in enumerate(each.values)]
        body.append(_error(_NOT_PERMITTED))
    body.append(_step(_RETURN, _ALLOW))
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _load(offset: int) -> list[bytes]:
    return [_step(_LOAD, offset)]


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
