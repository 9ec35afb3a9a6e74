"""The environment `verifiers` with a stand-in for it, which `integration/test_environment_kinds.py` has."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.registry import find_kind

# What `verifiers_child.py` imports, and an environment that asks without a harness.
STAND_IN = {
    "clients": """
class Client: pass
class EvalClientConfig:
    def __init__(self, **values): pass
class ModelContext:
    def __init__(self, model, client): self.model, self.client = model, client
""",
    "configs/agent": "class AgentConfig: pass",
    "configs/harness": "class HarnessConfig: pass",
    "errors": "class RolloutError(Exception): pass",
    "harness": """
class Harness:
    def __class_getitem__(cls, config): return cls
""",
    "interception/server": "resolve_client = None",
    "runtimes": "ProgramResult = tuple",
    "utils/loaders": """
import contextlib, uuid
from types import SimpleNamespace as Record
from verifiers.v1.interception import server

class Config:
    model_fields = {}
    @staticmethod
    def model_validate(values): return values

def env_config_type(taskset, env): return Config

class Dialect:
    def validate_response(self, raw): return raw
    def parse_response(self, raw): return Record(text=raw["choices"][0]["message"]["content"])

class Env:
    def __init__(self, config):
        self.forgets = config["taskset"]["id"] == "forgets"
        self.taskset = type("Taskset", (list,), {"bounded": True})(range(1, 10))

    @contextlib.asynccontextmanager
    async def serving(self): yield

    async def run_episode(self, task, context, on_trace):
        trace = Record(id=uuid.uuid4().hex, errors=[], rewards={})
        on_trace(trace)
        client = server.resolve_client(context.client)
        messages = [{"role": "user", "content": "guess"}]
        while True:
            answer = await client.get_response(Dialect(), {"messages": messages}, None, trace.id)
            if int(answer.text) == task:
                trace.rewards = {"right": Record(value=0.5), "skipped": None}
                return Record(ok=True, errors=[], traces=[trace])
            hint = "higher" if int(answer.text) < task else "lower"
            said = [{"role": "assistant", "content": answer.text}]
            said = [] if self.forgets else said
            messages = [*messages, *said, {"role": "user", "content": hint}]

load_environment = Env
""",
}


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    root = tmp_path / "site" / "verifiers" / "v1"
    for name, text in STAND_IN.items():
        file = root / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def params(**values):
    values = {"python": sys.executable, "taskset": "numbers", **values}
    return find_kind("environment", "verifiers").model_validate(values)


def play(source, seed):
    game = source.make()
    assert game.reset({}, seed) == "guess"
    assert game.reward() == 0.0
    low, high, is_done = 1, 9, False
    while not is_done:
        number = (low + high) // 2
        hint, is_done = game.step(str(number))
        low, high = (number + 1, high) if hint == "higher" else (low, number - 1)
    assert game.reward() == {"right": 0.5}
    with pytest.raises(EpisodeError, match="the episode is over"):
        game.step("1")
    game.close()
    return number


def test_episodes_wait_for_their_answers_side_by_side():
    source = params().open()
    try:
        unfinished = source.make()
        unfinished.reset({}, 1)
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda seed: play(source, seed), range(12))) == [
                *range(1, 10),
                *range(1, 4),
            ]
        unfinished.close()
    finally:
        source.close()


def test_an_episode_that_fails_has_no_reward():
    source = params().open()
    try:
        game = source.make()
        game.reset({}, 1)
        with pytest.raises(EpisodeError, match="invalid literal"):
            game.step("five")
        with pytest.raises(EpisodeError, match="invalid literal"):
            game.reward()
        game.close()
    finally:
        source.close()


def test_a_conversation_that_is_not_continued_is_refused():
    source = params(taskset="forgets").open()
    try:
        game = source.make()
        game.reset({}, 4)
        with pytest.raises(EpisodeError, match="another conversation than before"):
            game.step("1")
        game.close()
    finally:
        source.close()


def test_what_an_interpreter_prints_as_it_starts_is_no_reply(tmp_path):
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hello\\n1', flush=True)")
    source = params().open()
    try:
        assert play(source, 4) == 5
    finally:
        source.close()


def test_what_cannot_be_started_is_named(tmp_path, monkeypatch):
    [issue] = params(python="./gone/python").problems()
    assert issue.path == "python"
    with pytest.raises(
        EpisodeError, match=r"has ended: exit code 0\. Fix: name the interp"
    ) as caught:
        params(python="/bin/echo").open()
    assert caught.value.path == "python"
    # An interpreter with nothing in it has no httpx either.
    (tmp_path / "httpx.py").write_text("""raise ModuleNotFoundError("No module named 'httpx'")""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EpisodeError, match=r"No module named 'verifiers'.* -m pip install verif"):
        params().open()
