"""Attacks on the sandbox, each for real: the score is 0, and nothing is left of it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from grpo_cli.errors import RewardError
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, RewardContext, Score
from grpo_cli.sandbox.values import decode, encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is tested is Linux's")
runner = pytest.importorskip("grpo_cli.sandbox.runner", exc_type=ImportError)
CONTEXT = RewardContext(max_completion_length=64)
PRINTS = [{"input": "", "output": "right"}]
FULL = () if sys.platform != "linux" else runner.find_protections()
CONTAINER = tuple(each for each in ("landlock", "seccomp") if each in FULL)
"""What is left in a container that forbids namespaces."""


USER = ("user_namespaces", *CONTAINER)
"""What a user without privileges gets."""


@pytest.fixture(
    params=["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("container", "user"))]
)
def level(request, monkeypatch):
    protections = {"full": FULL, "container": CONTAINER, "user": USER}[request.param]
    if request.param == "user" and runner._try(USER):
        pytest.skip("user namespaces do not work here")
    if request.param == "container" and len(CONTAINER) < 2:
        pytest.skip("Landlock or seccomp does not work here")
    return use(monkeypatch, protections)


def use(monkeypatch, protections):
    monkeypatch.setattr(runner, "find_protections", lambda: protections)
    return protections


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """The folder in which working folders are made; nothing may be left of them or of processes."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())
    assert_nothing_runs(folder)


def assert_nothing_runs(folder):
    mark = str(folder).encode().hex().encode()
    deadline = time.monotonic() + 10
    while running := [pid for pid in list_pids() if mark in read_command(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def list_pids():
    return [name for name in os.listdir("/proc") if name.isdigit()]


def read_command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def attack(program, tests=PRINTS, **params):
    params = {"seconds_per_test": 1, **params}
    [reward] = build_rewards([RewardConfig(kind="code", **params)], CONTEXT)
    started = time.monotonic()
    batch = Batch([""], [f"```python\n{program}\n```"], columns={"tests": [tests]})
    [score] = reward.score(batch)
    assert time.monotonic() - started < 60
    return score


REFUSED = "PermissionError"
SLOW = "took longer than 0.3 s"
SIMPLE = {
    "endless loop": ("while True: pass", SLOW),
    "endless sleep": ("import time; time.sleep(1e6)", SLOW),
    "sleep with all descriptors closed": (
        "import os, time; os.closerange(0, 256); time.sleep(1e6)",
        SLOW,
    ),
    "deaf to signals": (
        "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except OSError: pass\n  except ValueError: pass\nwhile True: pass",
        SLOW,
    ),
    "flood of stdout": ("while True: print('x' * 1000)", "wrote more than 64 KiB"),
    "flood of stderr": (
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        "wrote more than 64 KiB",
    ),
    "fork bomb": ("import os\nwhile True: os.fork()", REFUSED),
    "subprocess": ("import subprocess; subprocess.run(['/bin/true'])", REFUSED),
    "exec": ("import os, sys; os.execv(sys.executable, ['x'])", REFUSED),
    "kill the parent": ("import os; os.kill(os.getppid(), 9)", REFUSED),
    "kill all": ("import os; os.kill(-1, 9)", REFUSED),
    "kill the group": ("import os; os.killpg(0, 9)", REFUSED),
    "leave the session": ("import os; os.setsid()", REFUSED),
    "limit the trainer": (
        f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1))",
        REFUSED,
    ),
    "lift the limits": (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (10**5, 10**5))",
        "",
    ),
    "socket": ("import socket; socket.socket()", REFUSED),
    "memory outside the address space": ("import os; os.memfd_create('x')", REFUSED),
    "memory bomb": ("x = bytearray(10**10)", "MemoryError"),
    "memory bomb in pieces": ("x = []\nwhile True: x.append(bytearray(10**6))", "MemoryError"),
    "shared memory bomb": (
        "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 10**7))",
        "Cannot allocate memory",
    ),
    "one big file": (
        "f = open('x', 'wb', buffering=0)\nwhile f.write(bytes(10**6)) == 10**6: pass\n"
        "f.write(bytes(10**6))",
        "OSError",
    ),
    "thread bomb": (
        "import threading, time\nwhile True:\n"
        "  threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()",
        "can't start new thread",
    ),
    "deep recursion": ("import sys; sys.setrecursionlimit(10**8)\ndef f(): f()\nf()", ""),
    "deep recursion in C": (
        "import sys; sys.setrecursionlimit(10**8)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)",
        "signal 11",
    ),
    "abort": ("import os; os.abort()", "signal"),
    "stdin closed": ("import os; os.close(0); input()", "OSError"),
    "stdout closed": ("import sys; print('right'); sys.stdout.flush(); sys.stdout.close()", None),
    "null byte": ("print('right')\n\0", "null bytes"),
    "slow to compile": ("x = " + "+".join(["1"] * 400_000), ""),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_a_program_harms_nothing(name, level):
    program, reason = SIMPLE[name]
    # Only what is to be ended by the clock may be: a busy machine takes its time over the others.
    score = attack(program, seconds_per_test=0.3 if reason == SLOW else 20 if reason else 1)
    if reason is None:
        return
    assert score.value == 0.0
    assert score.reason.startswith("0 of 1 tests: test 1: ")
    assert reason in score.reason


F_SETOWN_ATTACK = """
import ctypes, fcntl, os, signal, struct, time
read, write = os.pipe()
pid = {pid}
for ask in (
    lambda: fcntl.fcntl(read, fcntl.F_SETOWN, pid),
    lambda: fcntl.fcntl(read, 15, struct.pack("ii", 1, pid)),
    lambda: ctypes.CDLL(None).ioctl(read, 0x8901, struct.pack("i", pid)),
):
    try: ask()
    except OSError: pass
for ask in (
    lambda: fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL),
    lambda: fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC),
    lambda: os.write(write, b"x"),
):
    try: ask()
    except OSError: pass
time.sleep(0.2)
"""


def test_files_signal_nobody(level):
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        score = attack(F_SETOWN_ATTACK.replace("{pid}", str(sleeper.pid)), seconds_per_test=20)
        assert score.value == 0.0
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


META = """
import ctypes, os
path = {path!r}.encode()
libc = ctypes.CDLL(None)
for act in (
    lambda: os.chmod(path, 0o777),
    lambda: os.utime(path, (1, 1)),
    lambda: os.chown(path, 1, 1),
    lambda: os.setxattr(path, "user.grpo", b"x"),
    lambda: os.truncate(path, 0),
    lambda: libc.chmod(path, 0o777),
    lambda: libc.syscall(452, -100, path, 0o777, 0),
):
    try: act()
    except OSError: pass
"""


def test_rights_times_and_owners_of_files_cannot_be_changed(level, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_USERS", [os.getuid()])
    victim = tmp_path / "victim"
    victim.write_text("kept")
    before = victim.stat()
    attack(META.replace("{path!r}", repr(str(victim))), seconds_per_test=20)
    after = victim.stat()
    assert (after.st_mode, after.st_mtime, after.st_uid) == (
        before.st_mode,
        before.st_mtime,
        before.st_uid,
    )
    assert not os.listxattr(victim)
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("flags", ["os.O_RDONLY | os.O_TRUNC", "3 | os.O_TRUNC"])
def test_files_that_may_be_read_cannot_be_emptied(flags, level, tmp_path, monkeypatch):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "module.py").write_text("kept")
    monkeypatch.setattr(runner, "_package_folders", lambda: (str(library),))
    program = f"import os\nos.open({str(library / 'module.py')!r}, {flags})"
    assert attack(program, packages=True, seconds_per_test=20).value == 0.0
    assert (library / "module.py").read_text() == "kept"


CALLS = (
    # What processes share is found by numbers, and needs no right to a file.
    "shmat(0, None, 0)",
    "shmctl(0, 0, None)",
    "semop(0, note, 1)",
    "semctl(0, 0, 16, 7)",
    "msgsnd(0, note, 8, 0o4000)",
    "msgrcv(0, note, 8, 0, 0o4000)",
    "msgctl(0, 0, None)",
    "mq_unlink(b'/grpo-attack')",
    # A datagram may name any socket of the machine as its receiver.
    "socketpair(1, 2, 0, note)",
    "setsockopt(0, 1, 7, note, 4)",
    "bind(0, note, 2)",
    # Whoever may read a file may lock it.
    "flock(file, 2)",
    "lockf(file, 2, 1)",
    "fcntl(file, 37, note)",
    "fcntl(file, 1024, 1)",
    # Counted for the user or the machine.
    "timer_create(0, None, note)",
    "inotify_init()",
    "fanotify_init(0, 0)",
    "syncfs(file)",
    # What no program of a task needs.
    "getxattr(b'/', b'user.x', note, 64)",
    "name_to_handle_at(-100, b'/', note, note, 0)",
    "open_by_handle_at(-100, note, 0)",
    "vmsplice(pipe[1], note, 1, 0)",
    "signalfd(-1, note, 0)",
    "mlockall(2)",
    "ptrace(0, 0, 0, 0)",
    "process_vm_readv(1, note, 1, note, 1, 0)",
    "sched_setaffinity(0, 8, note)",
    "setgroups(0, None)",
    "clock_settime(0, note)",
    "adjtimex(note)",
    "sethostname(b'x', 1)",
    "swapoff(b'x')",
    "mknod(b'y', 0o010600, 0)",
    "personality(0)",
    "fallocate(file, 0, 0, 1)",
)
CALLER = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
file, pipe, note = os.open("x", os.O_CREAT | os.O_RDWR), os.pipe(), ctypes.create_string_buffer(256)
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
allowed = []
"""


def test_calls_that_no_program_needs_are_refused(level):
    program = CALLER + "".join(
        f"if libc.{call} >= 0 or ctypes.get_errno() not in REFUSED: allowed += [{call[:20]!r}]\n"
        for call in CALLS
    )
    score = attack(f"{program}print(*allowed or ['right'])", seconds_per_test=20)
    assert score.value == 1.0, score.reason


def test_pairs_of_sockets_reach_nobody_else(level):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind("")
        server.setblocking(False)
        for kind in ("DGRAM", "STREAM", "SEQPACKET"):
            program = (
                f"import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_{kind})\n"
                f"a.sendto(b'x', {server.getsockname()!r})"
            )
            assert "Error" in attack(program, seconds_per_test=20).reason
            with pytest.raises(BlockingIOError):
                server.recv(1)


THREADS = """
import threading, time
threading.stack_size(32768)
for _ in range(700): threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
time.sleep(1e6)
"""


def test_threads_are_counted(level):
    reason = attack(THREADS, seconds_per_test=30, memory_mib=2048).reason
    assert "ran more than 128 threads" in reason or "can't start new thread" in reason


def test_files_of_a_process_cannot_be_hidden(level):
    for call in ("prctl(4, 0, 0, 0, 0)", "prctl(1, 0, 0, 0, 0)", "close_range(90, 99, 2)"):
        program = f"import ctypes, sys\nprint('wrong' if ctypes.CDLL(None).{call} else 'right')"
        assert "printed 'wrong'" in attack(program, seconds_per_test=20).reason, call


def test_many_small_files_are_stopped(level):
    program = "n = 0\nwhile True:\n  n += 1\n  with open(str(n), 'wb') as f: f.write(bytes(50_000))"
    score = attack(program, seconds_per_test=10)
    assert score.value == 0.0
    assert "No space left" in score.reason or "wrote files of more than 8 MiB" in score.reason


FILLER = """
import os, time
for _ in range(25):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
for n in range(100):
    with open(str(n), "wb") as file: file.write(bytes(4 * 2**20))
    time.sleep(0.01)
"""


def test_files_deeper_than_a_path_can_say_are_stopped(level):
    reason = attack(FILLER, seconds_per_test=10).reason
    assert "No space left" in reason or "wrote files of more than 8 MiB" in reason


def test_a_folder_that_is_locked_counts_as_full(tmp_path, monkeypatch):
    assert not runner.is_over(str(tmp_path), 10**6)
    assert not runner.is_over(str(tmp_path / "gone"), 10**6)

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(runner.os, "scandir", refuse)
    assert runner.is_over(str(tmp_path), 10**6)


TREES = {
    "locked": "os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)",
    "deep": "for _ in range(1100): os.mkdir('d' * 20); os.chdir('d' * 20)",
    "links": "os.symlink({victim!r}, 'link'); os.mkdir('d'); os.symlink('..', 'd/up')",
    "gone": "os.rmdir(os.getcwd())",
    "swapped": "os.rename(os.getcwd(), os.getcwd() + 'x'); os.symlink({victim!r}, os.getcwd()[:-1])",
}


@pytest.mark.parametrize("name", TREES)
def test_working_folders_vanish_whatever_they_hold(name, level, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    program = TREES[name].replace("; ", "\n").replace("for _ in range(1100): ", "")
    if name == "deep":
        program = "for _ in range(1100):\n  os.mkdir('d' * 20)\n  os.chdir('d' * 20)"
    score = attack(f"import os\n{program.replace('{victim!r}', repr(str(victim)))}")
    assert score.value == 0.0
    assert (victim / "kept").read_text() == "kept"


def test_files_of_others_cannot_be_deleted_or_read(level, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("right")
    tests = [{"input": "", "output": "right"}]
    reading = attack(f"print(open({str(secret)!r}).read())", tests)
    assert reading.value == 0.0
    assert "Error" in reading.reason
    attack(f"import shutil; shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)")
    attack(f"open({str(secret)!r}, 'w').close()")
    assert secret.read_text() == "right"
    for path in ("/etc/passwd", "/root", str(Path.home()), "/proc/self/environ", "/sys/kernel"):
        act = "os.listdir(path)" if os.path.isdir(path) else "open(path).read()"
        score = attack(f"import os\npath = {path!r}\n{act}\nprint('right')")
        assert score.value == 0.0, path


def test_the_environment_is_empty(level, monkeypatch):
    monkeypatch.setenv("GRPO_SECRET", "right")
    score = attack("import os; print(os.environ.get('GRPO_SECRET'))")
    assert "printed 'None'" in score.reason
    for place in ("environ", "cmdline", "mem", "fd/0", "maps"):
        score = attack(f"print(open('/proc/{os.getpid()}/{place}', 'rb').read())")
        assert score.value == 0.0
        assert "Error" in score.reason


def test_the_network_cannot_be_reached(level, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
        assert REFUSED in attack(program).reason
        if "namespaces" in level:
            use(monkeypatch, ("namespaces",))
            assert "OSError" in attack(program).reason
        with pytest.raises(TimeoutError):
            server.accept()


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1e6)
    os._exit(0)
os._exit(0)
"""
NAMESPACED = [("namespaces", "other_user"), ("user_namespaces",)]


@pytest.mark.parametrize("protections", [(), *NAMESPACED], ids=["limits", "root", "user"])
def test_daemons_end_with_the_program_without_seccomp_too(protections, monkeypatch):
    if runner._try(protections):
        pytest.skip("does not work here")
    use(monkeypatch, protections)
    assert attack(DAEMON, unprotected=True).value == 0.0
    endless = DAEMON.replace("os._exit(0)\n", "") + "time.sleep(1e6)"
    assert attack(endless, unprotected=True).value == 0.0


def test_a_fork_bomb_without_seccomp_is_counted_and_ended(monkeypatch):
    if runner._try(NAMESPACED[0]):
        pytest.skip("needs root")
    use(monkeypatch, NAMESPACED[0])
    program = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert attack(program, seconds_per_test=0.3).reason.endswith(SLOW)


def test_many_small_files_in_user_namespaces_have_a_size_too(monkeypatch):
    if runner._try(NAMESPACED[1]):
        pytest.skip("user namespaces do not work here")
    use(monkeypatch, NAMESPACED[1])
    program = "n = 0\nwhile True:\n  n += 1\n  open(f'/x{n}', 'wb').write(bytes(50_000))"
    assert "Error" in attack(program).reason


WRAPPED = [
    "assert abs(f(3) - 9) < 1",
    "import math\nassert math.isclose(f(3), 9)",
    "assert math.isclose(f(3), 9)",
    "assert math.isclose(f(3), 9) == True",
    "assert math.fabs(f(3) - 9) < 1",
    "assert (f(3) == 9) is True",
    "for a, b in zip(map(f, [2, 3]), [4, 9]):\n    assert a == b",
    "assert [f(x) for x in range(3)] == [x * x for x in range(3)]",
]
ASSERTS = ["assert f(2) == 4", "assert abs(f(3) - 9) < 1", "assert f(4) == 16"]
FORGERS = {
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "exit later": "def f(x): raise SystemExit(0)",
    "hard exit later": "import os\ndef f(x): os._exit(0)",
    "prints": "def f(x): return 0\nprint('3 of 3 tests', 'passed', 'OK')",
    "writes everywhere": """
import os
for fd in range(64):
    for said in (b'ready', b'{"passed": true}', b'["ready"]', b'{"value": true}'):
        try: os.write(fd, b'\\n' + said + b'\\n')
        except OSError: pass
os._exit(0)
""",
    "no assertion errors": "import builtins\nbuiltins.AssertionError = type('E', (), {})\n"
    "def f(x): return 0",
    "equal to all": "class Any:\n  def __eq__(self, o): return True\ndef f(x): return Any()",
    "equal integer": "class Any(int):\n  def __eq__(self, o): return True\ndef f(x): return Any()",
    "traces": "import sys\nsys.settrace(lambda *a: sys.exit(0))\ndef f(x): return 0",
    "no eval": "import builtins\nbuiltins.eval = lambda *a: 4\nbuiltins.exec = lambda *a: None\n"
    "builtins.compile = builtins.exec",
    "own builtins": "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 0",
    "own names": "def abs(x): return 0\ndef f(x): return 0",
    "builtins of its own": '__builtins__ = {"abs": lambda x: 0}\ndef f(x): return 0',
    "builtins in the module": "import sys\nclass B(dict):\n  def __getitem__(self, n): return lambda *a: 0\n"
    "sys.modules['program'].__builtins__ = B()\ndef f(x): return 0",
    "own modules": "import sys, math\nclass M:\n  isclose = staticmethod(lambda *a, **k: True)\n"
    "  fabs = staticmethod(lambda x: 0)\nsys.modules['math'] = math = M()\ndef f(x): return 0",
    "patched modules": "import math\nmath.isclose = lambda *a, **k: True\nmath.fabs = lambda x: 0\n"
    "def f(x): return 0",
    "patched when called": "def f(x):\n  import builtins, math\n  builtins.abs = math.fabs = lambda x: 0\n"
    "  math.isclose = lambda *a, **k: True\n  return 0",
    "frames": "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
    "    frame.f_globals['abs'] = frame.f_builtins['abs'] = lambda x: 0\n    frame = frame.f_back\n  return 0",
    "compares as it likes": "class Any:\n  def __getattr__(self, n): return lambda *a: self\n"
    "  __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda s, o: True\n"
    "  __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = lambda s, *a: s\n  __float__ = lambda s: 0.0\n"
    "def f(x): return Any()",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "thread": "import threading, os, time\ndef g():\n  time.sleep(0.1)\n  for n in range(3, 64):\n"
    "    try: os.write(n, b'\\n{\"passed\": true}\\n')\n    except OSError: pass\n  os._exit(0)\n"
    "threading.Thread(target=g, daemon=True).start()\ndef f(x):\n  time.sleep(0.5)\n  return 0",
    "no assertions to see": "import gc\nfor d in [o for o in gc.get_objects() if type(o) is dict]:\n"
    "  if 'kind' in d: d['setup'] = ''\ndef f(x): return 0",
    "differs from nothing": "class Any:\n  __sub__ = __rsub__ = lambda s, o: 0\ndef f(x): return Any()",
    "differs later": "class None_:\n  __abs__ = __float__ = lambda s: 0.0\n"
    "class Any:\n  __sub__ = __rsub__ = lambda s, o: None_()\ndef f(x): return Any()",
    "more names than asked": "import sys\nframe = sys._getframe()\n"
    "while 'peer' not in frame.f_locals: frame = frame.f_back\n"
    "given = {'__import__': lambda *a: math, 'abs': lambda x: 0, 'zip': lambda *a: []}\n"
    "class math: isclose = fabs = staticmethod(lambda *a: 0)\ndef f(x): return 0\n"
    "frame.f_locals['peer']._actions['names'] = lambda names: {'f': f, '__builtins__': given}",
    "stops loops": "def f(x): raise StopIteration",
    "own marshal": "import marshal\nmarshal.loads = lambda b: {'kind': 'run', 'setup': ''}",
}


@pytest.mark.parametrize("name", FORGERS)
def test_passing_cannot_be_claimed(name):
    score = attack(FORGERS[name], ASSERTS, credit="share")
    assert score.value < 1.0
    assert attack(FORGERS[name], ASSERTS).value == 0.0
    # Every test starts processes of its own, so one after the other in a batch.
    [reward] = build_rewards([RewardConfig(kind="code", seconds_per_test=20)], CONTEXT)
    size, program = len(WRAPPED), f"```python\n{FORGERS[name]}\n```"
    columns = {"tests": [[each] if "\n" not in each else each for each in WRAPPED]}
    scores = reward.score(Batch([""] * size, [program] * size, columns=columns))
    assert [each.value for each in scores] == [0.0] * size, scores


def test_a_right_program_passes_what_no_forger_does():
    program = "import math\ndef f(x): return x * x"
    for tests in WRAPPED:
        assert attack(program, tests, seconds_per_test=20) == Score(1.0, "1 of 1 tests")


def test_items_of_an_object_do_not_end_the_loops_of_a_test():
    program = "class Row:\n  def __getitem__(s, i): raise StopIteration\ndef f(x): return Row()"
    tests = "assert all(map(lambda x: f(x)[0] == x, [2, 3])) and Row"
    assert "raised StopIteration" in attack(program, tests, seconds_per_test=20).reason


def test_objects_work_with_numbers_but_answer_none_with_a_number():
    program = (
        "class V:\n  def __init__(s, x): s.x = x\n  def __mul__(s, n): return V(s.x * n)\n"
        "  def __eq__(s, o): return s.x == o.x\n  def __str__(s): return f'V{s.x}'\n"
        "  def __iter__(s): return iter([s.x])\n  def __matmul__(s, o): return s.x * o.x\n"
        "  def __abs__(s): return s.x\ndef f(x): return V(x)"
    )
    for test in (
        "assert V(2) * 3 == V(6)",
        "assert str(V(2) * 3) == 'V6' and list(V(2) * 3) == [6] and (V(2) * 3).x == 6",
        "assert abs(V(2)) + 1 == 3 and V(2) @ V(3) == 6 and abs(V(2) * 3) == 6",
    ):
        assert attack(program, [test], seconds_per_test=20).value == 1.0, test
    assert "was given a value" in attack(program, ["assert abs(f(2) * 3) == 6 and V"]).reason


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): raise ValueError('\\x1b[2J\\ud800\\nend')",
        'import os\ndef f(x):\n  for n in range(3, 64):\n    try: os.write(n, b\'\\n{"value": '
        '["o", "\\\\u001b[2J\\\\ud800"]}\')\n    except OSError: pass\n  os._exit(0)',
    ],
)
def test_reasons_can_be_printed(program):
    score = attack(program, ["assert f(2) == 4"], seconds_per_test=20)
    assert score.value == 0.0
    assert score.reason.isprintable()
    assert "end" in score.reason or "an object of class unknown" in score.reason


SEARCHER = """
import gc, sys, os
found = []
# Put together late, lest the compiler leave it among the constants.
parts = [{half!r}, str(6 * 7)]
def look(x):
    if isinstance(x, (str, bytes)) and len(x) < 10**6 and ''.join(parts) in str(x):
        found.append(x)
frame = sys._getframe()
while frame:
    for values in (frame.f_locals, frame.f_globals):
        for each in list(values.values()): look(each)
    frame = frame.f_back
for each in gc.get_objects():
    for inner in gc.get_referents(each): look(inner)
for fd in range(3, 64):
    try: look(os.pread(fd, 10**6, 0))
    except OSError: pass
look(' '.join(sys.orig_argv)); look(str(os.environ))
print(len(found))
"""


def test_the_expected_output_is_nowhere_in_the_process():
    tests = [{"input": "", "output": "needle-in-hay42"}]
    score = attack(SEARCHER.replace("{half!r}", repr("needle-in-hay")), tests, seconds_per_test=10)
    assert "printed '0'" in score.reason


def test_no_descriptors_are_inherited(work):
    with open(work.parent / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        program = (
            "import os\nn = 0\nfor fd in range(1024):\n"
            "  try: os.fstat(fd); n += 1\n  except OSError: pass\nprint(n)"
        )
        # The three standard ones, and the report's.
        assert attack(program, [{"input": "", "output": "4"}]).value == 1.0


HOST = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from grpo_cli.sandbox import runner
protections = tuple(sys.argv[2:])
program = b"import ctypes, time; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(1e6)"
check = runner.Check("f(1)") if protections[:1] == ("tested",) else None
runner._run(program, runner.Limits(seconds=500), b"", check, protections[check is not None:])
"""
KILLED = [FULL, (), ("user_namespaces",), ("tested", *FULL), ("tested",)]


@pytest.mark.parametrize("level", KILLED, ids=["full", "limits", "user", "tested", "tested-limits"])
def test_programs_die_with_a_trainer_that_is_killed(work, level):
    if runner._try(tuple(each for each in level if each != "tested")):
        pytest.skip("does not work here")
    host = subprocess.Popen([sys.executable, "-c", HOST, str(work), *level], cwd=Path.cwd())
    mark = str(work).encode().hex().encode()
    deadline = time.monotonic() + 20
    while sum(mark in read_command(pid) for pid in list_pids()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert_nothing_runs(work)
    for left in work.iterdir():
        shutil.rmtree(left)


def test_programs_at_the_same_time_do_not_meet(level):
    [reward] = build_rewards([RewardConfig(kind="code", seconds_per_test=10)], CONTEXT)
    program = "import os\nopen('mine', 'x').write('x')\nprint(os.listdir('.'))"
    columns = {"tests": [[{"input": "", "output": "['mine']"}]] * 8}
    scores = reward.score(Batch([""] * 8, [f"```python\n{program}\n```"] * 8, columns=columns))
    assert [each.value for each in scores] == [1.0] * 8
    # Other tests' pools may still be ending; of this reward nothing is left.
    assert not [each for each in threading.enumerate() if each.name.startswith("grpo-code")]


def test_a_sandbox_that_cannot_be_set_up_is_an_error_not_a_score(monkeypatch):
    use(monkeypatch, ("user_namespaces", "other_user"))
    [reward] = build_rewards([RewardConfig(kind="code")], CONTEXT)
    with pytest.raises(RewardError, match="the sandbox could not be set up"):
        reward.score(Batch([""], ["print(1)"], columns={"tests": [PRINTS]}))


@pytest.mark.parametrize(
    "value", [None, True, -(10**50), 2.5, 1j, "ä\ud800", b"\0", [1, (2, {3})], {1: {"a": [None]}}]
)
def test_values_come_back_as_they_went(value):
    assert decode(encode(value, list), list) == value


@pytest.mark.parametrize(
    "written",
    [[], ["i"], ["builtins.int", 3], ["builtins.set", ["builtins.list"]], ["os.system", "ls"]],
)
def test_what_no_value_is_written_as_is_not_read(written):
    with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
        decode(written, lambda *marks: 1 / 0)
