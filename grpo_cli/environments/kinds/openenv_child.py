"""Runs environments of OpenEnv for `grpo`, in an interpreter that has it; started by its path.

Imports nothing of `grpo_cli`. `RemoteProcess` is at the other end of stdin and stdout.
"""

import sys

# This folder has modules with the names of packages.
sys.path[:1] = []

import importlib  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402
import typing  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from typing import Any  # noqa: E402

_PARALLEL = 64


class _LocalSession:
    """An instance of an environment's class, in this process."""

    def __init__(self, path: str, kwargs: "dict[str, Any]") -> None:
        from openenv.core.env_server.serialization import serialize_observation

        self._serialize = serialize_observation
        self._environment = _load(path)(**kwargs)
        self._action = typing.get_type_hints(type(self._environment).step)["action"]

    def reset(self, arguments: "dict[str, Any]") -> Any:
        return self._serialize(self._environment.reset(**arguments))

    def step(self, action: "dict[str, Any]") -> Any:
        return self._serialize(self._environment.step(self._action.model_validate(action)))

    def close(self) -> None:
        self._environment.close()


class _ServerSession:
    """A session of a server that runs elsewhere."""

    def __init__(self, url: str) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url).sync()
        self._client.connect()

    def reset(self, arguments: "dict[str, Any]") -> Any:
        return _as_json(self._client.reset(**arguments))

    def step(self, action: "dict[str, Any]") -> Any:
        return _as_json(self._client.step(action))

    def close(self) -> None:
        self._client.close()


def _as_json(result: Any) -> Any:
    return {"observation": result.observation, "reward": result.reward, "done": result.done}


def _load(path: str) -> Any:
    source, _, name = path.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)
    sys.path.append(os.path.dirname(os.path.abspath(source)))
    module_name = os.path.basename(source)[:-3]
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, source)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules[module_name] = module
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    return getattr(sys.modules[module_name], name)


_sessions: "dict[int, Any]" = {}


def _answer(request: "dict[str, Any]") -> Any:
    session, do = request["session"], request["do"]
    if do == "open":
        if request["url"]:
            _sessions[session] = _ServerSession(request["url"])
        else:
            _sessions[session] = _LocalSession(request["path"], request["kwargs"])
        return None
    if do == "close":
        return _sessions.pop(session).close()
    if do == "reset":
        return _sessions[session].reset(request["arguments"])
    return _sessions[session].step(request["action"])


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
