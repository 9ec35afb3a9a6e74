"""The seccomp filter: which system calls a program may not make.

Owns the numbers of the calls and the filter's instructions. A program may start threads, and
signal itself; it may not start processes or programs, open sockets, touch other processes, or use
the kernel's larger tools. Numbers newer than this table do not exist for it.

Source: classic BPF over `struct seccomp_data` (linux/filter.h, linux/seccomp.h); numbers of
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (Linux 6.12).
"""

import os
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NOT_PERMITTED, _NO_SUCH_CALL = 1, 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_THREAD = 0x00010000
_NEWER = 450
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's name of the architecture, and the column of the tables below."""

_DENIED = """
fork 57 -          vfork 58 -          execve 59 221      execveat 322 281   ptrace 101 117
socket 41 198      connect 42 203      accept 43 202      accept4 288 242    bind 49 200
listen 50 201      sendmsg 46 211      tkill 200 130      rt_sigqueueinfo 129 138
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
"""
"""Calls that fail with "not permitted", with their numbers on x86_64 and aarch64. Memory that
outlives or escapes the limit on address space (memfd, System V) is among them."""
_OTHERS = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261)}
"""Calls on another process by its number, which a program may make on itself only."""
_CLONE, _CLONE3 = (56, 220), 435


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
        _step(_EQUAL, _CLONE3, 0, 1),
        # The C library takes this for an old kernel, and calls clone, whose flags can be seen.
        _error(_NO_SUCH_CALL),
    ]
    for number in _numbers(column):
        code += [_step(_EQUAL, number, 0, 1), _error(_NOT_PERMITTED)]
    code += _only_if(_CLONE[column], [_step(_ANY_BIT, _THREAD, 1, 0)])
    own = [_step(_EQUAL, pid, 1, 0)]
    code += _only_if(_OTHERS["kill"][column], own) + _only_if(_OTHERS["tgkill"][column], own)
    code += _only_if(
        _OTHERS["prlimit64"][column], [_step(_EQUAL, 0, 2, 0), _step(_EQUAL, pid, 1, 0)]
    )
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _numbers(column: int) -> list[int]:
    words = _DENIED.split()
    named = [words[start + 1 + column] for start in range(0, len(words), 3)]
    return [int(number) for number in named if number != "-"]


def _only_if(number: int, tests: list[bytes]) -> list[bytes]:
    """A call that is allowed where a test of its first argument jumps over the refusal."""
    body = [*_load(_FIRST_ARGUMENT), *tests, _error(_NOT_PERMITTED), _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _load(offset: int) -> list[bytes]:
    return [_step(_LOAD, offset)]


def _error(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
