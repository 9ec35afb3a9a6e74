"""The seccomp filter: which system calls a program may not make.

Owns the numbers of the calls and the filter's instructions. A program may start threads, and
signal itself; it may not start processes or programs, open sockets, touch other processes, change
the rights, owners, times or attributes of files (which Landlock does not cover), or use the
kernel's larger tools. Numbers newer than this table do not exist for it.

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

_DENIED = """
fork 57 -          vfork 58 -          execve 59 221      execveat 322 281   ptrace 101 117
socket 41 198      connect 42 203      accept 43 202      accept4 288 242    bind 49 200
listen 50 201      sendmsg 46 211      sendmmsg 307 269   tkill 200 130      rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240              pidfd_send_signal 424 424             pidfd_open 434 434
pidfd_getfd 438 438                    setsid 112 157     setpgid 109 154
process_vm_readv 310 270               process_vm_writev 311 271             kcmp 312 272
process_madvise 440 440                move_pages 279 239 migrate_pages 256 238
setpriority 141 140                    ioprio_set 251 30  sched_setaffinity 203 122
sched_setparam 142 118                 sched_setscheduler 144 119            sched_setattr 314 274
mount 165 40       umount2 166 39      pivot_root 155 41  chroot 161 51      unshare 272 97
setns 308 268      open_tree 428 428   move_mount 429 429 fsopen 430 430     fsconfig 431 431
fsmount 432 432    fspick 433 433      mount_setattr 442 442
open_by_handle_at 304 265              memfd_create 319 279                  memfd_secret 447 447
shmget 29 194      semget 64 190       msgget 68 186      mq_open 240 180
add_key 248 217    request_key 249 218 keyctl 250 219     bpf 321 280        perf_event_open 298 241
userfaultfd 323 282                    io_uring_setup 425 425                io_uring_enter 426 426
io_uring_register 427 427              fanotify_init 300 262                 personality 135 92
init_module 175 105                    finit_module 313 273                  delete_module 176 106
kexec_load 246 104 kexec_file_load 320 294                swapon 167 224     reboot 169 142
acct 163 89        quotactl 179 60     vhangup 153 58
chmod 90 -         fchmod 91 52        fchmodat 268 53    chown 92 -         fchown 93 55
lchown 94 -        fchownat 260 54     utime 132 -        utimes 235 -       futimesat 261 -
utimensat 280 88   setxattr 188 5      lsetxattr 189 6    fsetxattr 190 7    removexattr 197 14
lremovexattr 198 15                    fremovexattr 199 16                   truncate 76 45
fallocate 285 47   inotify_init 253 -  inotify_init1 294 26
"""
"""Calls that fail with "not permitted", with their numbers on x86_64 and aarch64. Memory that
outlives or escapes the limit on address space (memfd, System V) is among them, and disk space that
is taken at once (fallocate)."""
_MISSING = (435, 436, 437)
"""Calls that fail as on an old kernel, so that libraries use what can be checked: clone3 (clone),
close_range, which can part a thread's open files from its process's, and openat2 (openat)."""
_CLONE, _PRCTL, _FCNTL, _IOCTL = (56, 220), (157, 167), (72, 25), (16, 29)
_KILL_CALLS, _PRLIMIT = ((62, 129), (234, 131)), (302, 261)
_OPEN_CALLS: tuple[tuple[tuple[int | None, int | None], int], ...] = (
    ((2, None), 1),
    ((257, 56), 2),
)
"""open and openat, and which argument holds the flags."""
_CLONED = 0x00010000 | 0x00000400
"""A thread that shares open files: the runner counts the files of a process once."""
_OPTIONS = (15, 16, 0x53564D41)
"""The options of prctl that are allowed: a thread's name, and names of memory."""
_SIGNALLING = (8, 10, 15)
"""fcntl's F_SETOWN, F_SETSIG and F_SETOWN_EX: files that signal other processes."""
_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""The requests of ioctl that are allowed: is it a terminal, of what size, bytes to read, (non)blocking,
(not) kept by exec. FIOSETOWN and others do as F_SETOWN does."""
_TRUNCATE, _ACCESS = 0x200, 3
"""Opening a file that is emptied though not written: Landlock notices it only since Linux 6.2."""


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
        code += [_step(_EQUAL, number, 0, 1), _error(_NOT_PERMITTED)]
    for kill in _KILL_CALLS:
        code += _check(kill[column], 0, [pid])
    code += _check(_PRLIMIT[column], 0, [0, pid])
    code += _check(_CLONE[column], 0, [_CLONED], mask=_CLONED)
    code += _check(_PRCTL[column], 0, _OPTIONS)
    code += _check(_FCNTL[column], 1, _SIGNALLING, refuse=True)
    code += _check(_IOCTL[column], 1, _REQUESTS)
    for numbers, argument in _OPEN_CALLS:
        if (opening := numbers[column]) is not None:
            mask = _TRUNCATE | _ACCESS
            code += _check(opening, argument, [_TRUNCATE, mask], mask=mask, refuse=True)
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _numbers(column: int) -> list[int]:
    words = _DENIED.split()
    named = [words[start + 1 + column] for start in range(0, len(words), 3)]
    return [int(number) for number in named if number != "-"]


def _check(
    number: int,
    argument: int,
    values: "Sequence[int]",
    mask: int = 0xFFFFFFFF,
    refuse: bool = False,
) -> list[bytes]:
    """A call that is allowed (or refused) only if an argument, its lower half, has one of these values."""
    body = [*_load(_ARGUMENTS + 8 * argument), _step(_AND, mask)]
    # Each test jumps over the rest of the tests and the answer for all other values.
    body += [_step(_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
    allow, deny = _step(_RETURN, _ALLOW), _error(_NOT_PERMITTED)
    body += [allow, deny] if refuse else [deny, allow]
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _load(offset: int) -> list[bytes]:
    return [_step(_LOAD, offset)]


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
