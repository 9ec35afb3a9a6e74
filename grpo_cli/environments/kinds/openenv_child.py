"""Sessions with environments of OpenEnv, in an interpreter that has it; `remote_child.py` loads this file.

Imports nothing of `grpo_cli`.
"""

import importlib
import os
import sys
import typing
from typing import Any


def open_session(path: "str | None", url: "str | None", kwargs: "dict[str, Any]") -> Any:
    """Make an instance of a class, or connect to a server."""
    return _ServerSession(url) if url else _LocalSession(str(path), kwargs)


class _LocalSession:
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
    return getattr(sys.modules["__main__"].load_file(source), name)
