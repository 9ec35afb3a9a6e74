"""The Linux calls that Python has no functions for: namespaces, mounts, capabilities, Landlock.

Owns each call and its constants; which ones are made, and in what order, is `confinement.py`'s.
The layouts are those of the kernel's user-space headers (linux/landlock.h, linux/capability.h).
"""

import ctypes
import os
import struct

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_READ_ONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048
"""nosuid, nodev, noexec, noatime, nodiratime: a user namespace may not clear them on a remount."""
_RELATIME_SEEN, _RELATIME = 4096, 1 << 21
_DEATH_SIGNAL, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
KILL, TERMINATE = 9, 15
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ = 1 | 4 | 8
_LANDLOCK_FILE = 1 | 2 | 4 | 1 << 14
_CAPABILITIES_VERSION = 0x20080522
WORK = "/tmp"
"""The working folder in a private root."""


_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """A call's result; raises `OSError` that names the call where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def die_with_parent(number: int) -> None:
    """Has the kernel send this process a signal when its parent ends; to be called after changing users."""
    check(_libc.prctl(_DEATH_SIGNAL, number, 0, 0, 0), "death signal")


def set_dumpable(value: bool) -> None:
    """Sets whether processes of the same user may read this one's memory and open files."""
    check(_libc.prctl(_DUMPABLE, int(value), 0, 0, 0), "dumpable")


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ended."""
    check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "subreaper")


def forbid_new_privileges() -> None:
    """Makes set-uid programs powerless, for this process and all it starts."""
    check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")


def drop_capabilities() -> None:
    """Gives up all capabilities of this process."""
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    check(_libc.capset(header, bytes(24)), "capset")


def enter_namespaces(with_user: bool) -> None:
    """Gives this process mounts, network and names of its own, and its children their own pids.

    Args:
        with_user: Also a user namespace, which lets those without privileges do the rest.
    """
    user, group = os.geteuid(), os.getegid()
    flags = _NEW_NS | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET
    check(_libc.unshare(flags | (_NEW_USER if with_user else 0)), "unshare")
    if with_user:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def mount_private_root(folder: str, mib: int, seen: list[str]) -> None:
    """Moves into a small file system in memory, where nothing but `seen` can be read.

    Args:
        folder: Where it is mounted; an empty folder.
        mib: Largest size of all files written.
        seen: Files and folders of this machine that stay, read-only, at their own paths.
    """
    _mount("none", "/", None, _REC | _PRIVATE, None)
    options = f"size={mib}m,nr_inodes=4096,mode=755"
    _mount("tmpfs", folder, "tmpfs", 2 | 4, options)
    for path in seen:
        _show(path, folder + path)
    # It is there already where the interpreter lives under it.
    os.makedirs(folder + WORK, exist_ok=True)
    os.chmod(folder + WORK, 0o755)
    os.chroot(folder)
    os.chdir(WORK)


def _show(path: str, place: str) -> None:
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.lexists(place):
        return
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.mkdir(place)
    else:
        with open(place, "w"):
            pass
    _mount(path, place, None, _BIND, None)
    seen = os.statvfs(place).f_flag
    kept = seen & _KEPT_FLAGS | (_RELATIME if seen & _RELATIME_SEEN else 0)
    _mount("none", place, None, _BIND | _REMOUNT | _READ_ONLY | kept, None)


def _mount(source: str, place: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, place, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    check(result, f"mount {place}")


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Denies this process every file but these (Landlock; Linux 5.13).

    Args:
        readable: Files and folders that may be read, with all below them.
        writable: Folders in which anything may be done.
    """
    version = check(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock")
    # 13 rights in the first version; moving between folders and truncating came with 2 and 3.
    handled = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    attributes = struct.pack("Q", handled)
    rules = check(_libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock")
    granted = [(path, _LANDLOCK_READ) for path in readable]
    for path, rights in [*granted, *((path, handled) for path in writable)]:
        if not os.path.isdir(path):
            rights &= _LANDLOCK_FILE
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights & handled, descriptor)
        check(_libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock {path}")
        os.close(descriptor)
    check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)


def filter_calls(program: bytes) -> None:
    """Installs a seccomp filter.

    Args:
        program: Instructions of the classic packet filter, 8 bytes each.
    """
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    check(_libc.prctl(_SECCOMP, 2, header, 0, 0), "seccomp")
