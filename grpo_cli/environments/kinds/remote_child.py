"""Answers requests for sessions of an environment, in the interpreter of another package; started by its path.

Its argument is a file with `open_session`, which returns an object with a method for each request, and `close`.
Imports nothing of `grpo_cli`. `RemoteProcess` is at the other end of stdin and stdout.
"""

import sys

# This folder has modules with the names of packages.
sys.path[:1] = []

import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from typing import Any  # noqa: E402

_PARALLEL = 64


_sessions: "dict[int, Any]" = {}


def _answer(request: "dict[str, Any]") -> Any:
    session, do, arguments = request["session"], request["do"], request["arguments"]
    if do == "open":
        _sessions[session] = load_file(sys.argv[1]).open_session(**arguments)
        return None
    if do == "close":
        return _sessions.pop(session).close()
    return getattr(_sessions[session], do)(**arguments)


def load_file(path: str) -> Any:
    """Import a file, unless it was."""
    name = os.path.basename(path)[:-3]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        try:
            spec.loader.exec_module(sys.modules[name])  # type: ignore[union-attr]
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def main() -> None:
    """Answer requests until stdin ends."""
    # What an environment prints goes to stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lock = threading.Lock()

    def reply(request: "dict[str, Any]") -> None:
        try:
            answer = {"result": _answer(request)}
            line = json.dumps({"id": request["id"], **answer}, default=str)
        except BaseException as error:  # of the user's code, `SystemExit` included
            text = " ".join(str(error).split()) or "no message"
            line = json.dumps({"id": request["id"], "error": f"{type(error).__name__}: {text}"})
        with lock:
            replies.write(line + "\n")
            replies.flush()

    # The first request imports what all others share.
    with ThreadPoolExecutor(_PARALLEL) as pool:
        for number, line in enumerate(sys.stdin):
            request = json.loads(line)
            if number:
                pool.submit(reply, request)
            else:
                reply(request)
        # Calls that still run are of nobody's interest.
        os._exit(0)


if __name__ == "__main__":
    main()
