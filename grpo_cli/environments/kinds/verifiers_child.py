"""Episodes of environments of `verifiers`, in an interpreter that has it; `remote_child.py` loads this file.

`verifiers` plays an episode by itself and asks a model for each answer. Here the question becomes an observation,
and the answer comes from `step`. Imports nothing of `grpo_cli`.

Source: `verifiers.v1.env.Env.run_episode`, `verifiers.v1.harness.Harness.launch` and
`verifiers.v1.interception.server.resolve_client` (verifiers 0.4.0).
"""

import asyncio
import itertools
import os
import queue
import sys
import threading
import time
from functools import cache
from types import ModuleType
from typing import Any

sys.path.append(os.getcwd())

from verifiers.v1.clients import Client, EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.errors import RolloutError
from verifiers.v1.harness import Harness
from verifiers.v1.interception import server
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import env_config_type, load_environment

_MODEL = "grpo"
_HARNESS = "grpo_harness"
_MOST_TASKS = 1000
"""Tasks that are read of an infinite taskset."""


class ChatHarness(Harness[HarnessConfig]):
    """Asks the model once for each turn of the user's, in this process, and offers no tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: "dict[str, str]",
        data: Any,
    ) -> Any:
        """Send the conversation to the model's endpoint."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [each.model_dump(exclude_none=True) for each in prompt or ()]
        reply = await _http_client().post(
            f"{endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": ctx.model, "messages": messages},
        )
        return ProgramResult(int(reply.is_error), "", reply.text if reply.is_error else "")


@cache
def _http_client() -> Any:
    import httpx  # not above: without `verifiers`, that is the module to miss

    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)


class StepClientConfig(EvalClientConfig):
    """The model that is trained."""


class StepClient(Client):
    """Answers with what `step` gets."""

    async def get_response(
        self,
        dialect: Any,
        body: "dict[str, Any]",
        sampling: Any,
        session_id: "str | None" = None,
        turn: Any = None,
        headers: Any = None,
    ) -> Any:
        """Hand a request to the session that plays the episode."""
        text = await _asking[str(session_id)].ask_model(str(session_id), body)
        message = {"role": "assistant", "content": text}
        raw = {
            "id": _MODEL,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": _MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def _install() -> None:
    """Let `verifiers` find the classes above."""
    module = ModuleType(_HARNESS)
    module.__dict__.update({"ChatHarness": ChatHarness, "__all__": ["ChatHarness"]})
    sys.modules[_HARNESS] = module
    resolve = server.resolve_client

    def resolve_client(config: Any) -> Any:
        return StepClient() if isinstance(config, StepClientConfig) else resolve(config)

    server.resolve_client = resolve_client


class _World:
    """The environment, which all sessions share, on an event loop of its own."""

    def __init__(self, config: "dict[str, Any]") -> None:
        _install()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        kind = env_config_type(config["taskset"]["id"], config.get("id", ""))
        # Its agents talk and run here unless it says otherwise.
        own = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}}
        agents = {
            name: {**own, **config.get(name, {})}
            for name, field in kind.model_fields.items()
            if isinstance(field.default, AgentConfig)
        }
        self.env = load_environment(kind.model_validate({**config, **agents}))
        self.context = ModelContext(_MODEL, StepClientConfig(api_key_var="GRPO_NO_KEY"))
        taskset = self.env.taskset
        self.tasks = list(taskset if taskset.bounded else itertools.islice(taskset, _MOST_TASKS))
        if not self.tasks:
            raise ValueError("the taskset has no tasks")
        self._serving = self.env.serving()
        asyncio.run_coroutine_threadsafe(self._serving.__aenter__(), self.loop).result()


_asking: "dict[str, _Session]" = {}
"""The sessions by the ids of their traces."""
_worlds: "list[_World]" = []
_lock = threading.Lock()


def open_session(config: "dict[str, Any]") -> Any:
    """Make a session; the first one makes the environment."""
    with _lock:
        if not _worlds:
            _worlds.append(_World(config))
    return _Session(_worlds[0])


class _Session:
    """An episode, which waits for the model's answers."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._events: queue.Queue[Any] = queue.Queue()
        self._history: list[tuple[str, str]] = []
        self._fault = ""
        self._trace = ""
        self._own: list[str] = []
        self._answer: asyncio.Future[str] | None = None
        self._run: Any = None

    # --- requests ------------------------------------------------------------------------------

    def reset(self, seed: int) -> Any:
        """Begin the episode of a task; return what the model is asked first."""
        tasks = self._world.tasks
        self._run = asyncio.run_coroutine_threadsafe(
            self._play(tasks[seed % len(tasks)]), self._world.loop
        )
        return self._wait()

    def step(self, text: str) -> Any:
        """Answer; return what the model is asked next, or how the episode ended."""
        if self._answer is None:
            raise RuntimeError("the episode is over")
        answer, self._answer = self._answer, None
        self._world.loop.call_soon_threadsafe(answer.set_result, text)
        return self._wait()

    def close(self) -> None:
        """End the episode, wherever it is."""
        if self._run is not None:
            self._run.cancel()
        for trace in self._own:
            _asking.pop(trace, None)

    def _wait(self) -> Any:
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    # --- on the event loop ---------------------------------------------------------------------

    async def _play(self, task: Any) -> None:
        try:
            world = self._world
            episode = await world.env.run_episode(task, world.context, on_trace=self._remember)
            self._events.put(self._read(episode))
        except BaseException as error:
            self._events.put(error)
            raise

    def _remember(self, trace: Any) -> None:
        _asking[trace.id] = self
        self._own.append(trace.id)

    def _read(self, episode: Any) -> Any:
        errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
        if self._fault or not episode.ok:
            raise RuntimeError(self._fault or (errors[-1].message if errors else "no reason given"))
        rewards = [trace.rewards for trace in episode.traces if trace.id == self._trace]
        if not rewards:
            raise RuntimeError("the environment has not asked the model")
        parts = {name: part.value for name, part in rewards[0].items() if part is not None}
        return {"text": "", "done": True, "reward": parts}

    async def ask_model(self, trace: str, body: "dict[str, Any]") -> str:
        """Return the model's answer to a request."""
        messages = [(each["role"], _read_text(each)) for each in body["messages"]]
        known = len(self._history)
        self._fault = self._find_fault(messages, body)
        if self._fault:
            raise RolloutError(self._fault)
        self._trace, self._history = trace, messages
        answer = self._answer = asyncio.get_running_loop().create_future()
        text = "\n\n".join(text for _, text in messages[known:])
        self._events.put({"text": text, "done": False, "reward": None})
        reply: str = await answer
        self._history.append(("assistant", reply))
        return reply

    def _find_fault(self, messages: "list[tuple[str, str]]", body: "dict[str, Any]") -> str:
        """Return why a request cannot be played; empty if it can."""
        known, new = messages[: len(self._history)], messages[len(self._history) :]
        if body.get("tools"):
            return "it offers tools, which are not supported"
        if known != self._history or not new:
            return (
                "it asks the model about another conversation than before; only those that continue one can be "
                "played. Let `config` give other agents a client and a model of their own"
            )
        if roles := {role for role, _ in new} - {"system", "user"}:
            return f"it asks with messages of the role {', '.join(sorted(roles))}"
        return ""


def _read_text(message: "dict[str, Any]") -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise RolloutError("a message is not text alone")
    return "".join(part["text"] for part in content)
