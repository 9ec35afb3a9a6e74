import dataclasses
import random
import textwrap

import pytest
from pydantic import ValidationError

from grpo_cli.errors import RewardError, SetupError
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, RewardContext
from grpo_cli.rewards.kinds.python import PythonParams

CONTEXT = RewardContext(max_completion_length=64)


@pytest.fixture
def write(tmp_path):
    def write_file(source, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write_file


def run(path, batch, **kwargs):
    [reward] = build_rewards([RewardConfig(kind="python", path=str(path), **kwargs)], CONTEXT)
    return [score.value for score in reward.score(batch)]


MESSAGES = [{"role": "assistant", "content": "hi"}]
BATCH = Batch(
    prompts=["p", "q"],
    completions=["a", MESSAGES],
    completion_ids=[[1], [2, 3]],
    columns={"answer": ["x", "y"], "row_id": [10, 11]},
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(completions, **kwargs): return [len(c) for c in completions]", [1.0, 1.0]),
        (
            "def f(completions): return [float(isinstance(c, list)) for c in completions]",
            [0.0, 1.0],
        ),
        ("def f(answer): return [a == 'x' for a in answer]", [1.0, 0.0]),
        ("def f(prompts, completion_ids): return [len(i) for i in completion_ids]", [1.0, 2.0]),
        ("def f(**kwargs): return [None, len(kwargs)]", [None, 8.0]),
        ("def f(completions, log_metric): log_metric('m', 1.0); return [1, 2]", [1.0, 2.0]),
        (
            "def f(completions, trainer_state): return [trainer_state.max_steps] * 2",
            [1, 1],
        ),
        ("async def f(completions, **kwargs): return [1, 2]", [1.0, 2.0]),
        (
            "import numpy as np\ndef f(**kwargs): return np.array([1, 2], dtype='float32')",
            [1.0, 2.0],
        ),
        ("def f(completions): return (i for i in range(2))", [0.0, 1.0]),
        ("class F:\n  def __call__(self, completions): return [3, 4]\nf = F()", [3.0, 4.0]),
    ],
)
def test_calls_as_trl_does(write, source, expected):
    assert run(f"{write(source)}:f", BATCH) == expected


def test_passes_kwargs(write):
    path = write("def f(completions, *, bonus, **kwargs): return [bonus] * len(completions)")
    assert run(f"{path}:f", BATCH, kwargs={"bonus": 2.5}) == [2.5, 2.5]


def test_a_function_that_changes_its_arguments_changes_no_other_call(write):
    path = write("""
        def f(completions, answer, bonus, **kwargs):
            answer[0] += "!"
            bonus.append(0)
            return [len(answer[0]), len(bonus)]
    """)
    for _ in range(2):
        assert run(f"{path}:f", BATCH, kwargs={"bonus": [1]}) == [2.0, 2.0]
    assert BATCH.columns["answer"] == ["x", "y"]


def test_random_numbers_follow_from_the_seed_and_leave_the_processs_alone(write):
    path = write("""
        import random, numpy, torch
        def f(completions): return [random.random() + numpy.random.rand(), torch.rand(()).item()]
    """)
    import numpy
    import torch

    def state():
        return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

    run(f"{path}:f", BATCH)
    before = state()
    first, again, other = (
        run(f"{path}:f", dataclasses.replace(BATCH, seed=seed)) for seed in ("a", "a", "b")
    )
    assert first == again != other
    assert state() == before


def test_half_a_state_or_one_among_several_processes_is_refused(write):
    source = "def f(completions): return [0, 0]\nf.state_dict = dict\n"
    with pytest.raises(RewardError, match=r"state_dict\(\) alone"):
        run(f"{write(source)}:f", BATCH)
    path = write(f"{source}f.load_state_dict = print", "other.py")
    with pytest.raises(RewardError, match="remove `timeout_s`"):
        run(f"{path}:f", BATCH, timeout_s=5)


def test_dataset_columns_cannot_displace_trls(write):
    path = write("def f(completions, prompts, **kwargs): return [len(c) for c in completions]")
    batch = Batch(["p"], ["four"], columns={"completions": ["x" * 9], "prompts": ["y"]})
    assert run(f"{path}:f", batch) == [4.0]


def test_async_calls_share_one_loop(write):
    path = write("""
        import asyncio
        loops = []
        async def f(completions, **kwargs):
            loops.append(asyncio.get_running_loop())
            return [float(loops[0] is loops[-1])] * len(completions)
    """)
    [reward] = build_rewards([RewardConfig(kind="python", path=f"{path}:f")], CONTEXT)
    assert [reward.score(BATCH)[0].value for _ in range(3)] == [1.0, 1.0, 1.0]


def test_modules_and_neighbours_can_be_imported(write, tmp_path, monkeypatch):
    write("def g(completions): return [7.0] * len(completions)", "neighbour_a.py")
    path = write("from neighbour_a import g as f")
    assert run(f"{path}:f", BATCH) == [7.0, 7.0]
    write("def g(completions): return [8.0] * len(completions)", "neighbour_b.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert run("neighbour_b:g", BATCH) == [8.0, 8.0]


@pytest.mark.parametrize(
    ("signature", "columns"),
    [
        ("completions, **kwargs", ()),
        ("prompts, completions, answer, **kwargs", ("answer",)),
        ("completions, answer, level=3, *, tests, mode='x', **kwargs", ("answer", "tests")),
        ("completions, completion_ids, trainer_state, log_extra, log_metric", ()),
        ("completions, bonus", ()),
    ],
)
def test_required_columns_are_read_without_running_the_file(write, signature, columns):
    path = write(f"raise RuntimeError('must not run')\ndef f({signature}): return []")
    params = PythonParams(path=f"{path}:f", kwargs={"bonus": 1})
    assert params.columns().required == columns


@pytest.mark.parametrize(
    ("body", "columns"),
    [
        ("gold = kwargs['solution']\n    return gold", ("solution",)),
        ('"a text"\n    return [g == 1 for g in kwargs["x"]]', ("x",)),
        ("gold = kwargs['x'] if 'x' in kwargs else []\n    return gold", ()),
        ("if 'x' not in kwargs: return []\n    return kwargs['x']", ()),
        ("kwargs = {'x': 1}\n    return kwargs['x']", ()),
    ],
)
def test_columns_that_are_read_by_their_names_are_required(write, body, columns):
    path = write(f"def f(completions, **kwargs):\n    {body}\n")
    assert PythonParams(path=f"{path}:f").columns().required == columns


@pytest.mark.parametrize(
    ("source", "function", "kwargs", "where", "message"),
    [
        ("def brevity(completions): ...", "brevty", {}, "path", "no function 'brevty'"),
        ("class F: ...", "F", {}, "path", "is a class"),
        ("def f(:", "f", {}, "path", "mine.py:1 is not valid Python"),
        ("def f(completion): ...", "f", {}, "path", "needs 'completion', which TRL does not pass"),
        ("def f(completions): ...", "f", {"x": 1}, "kwargs.x", "takes no argument 'x'"),
        ("def f(completions, limit=1): ...", "f", {"limt": 1}, "kwargs.limt", "no argument 'limt'"),
        ("def f(**k): ...", "f", {"prompts": 1}, "kwargs.prompts", "TRL passes 'prompts' itself"),
    ],
)
def test_problems(write, source, function, kwargs, where, message):
    params = PythonParams(path=f"{write(source)}:{function}", kwargs=kwargs)
    [issue] = params.problems()
    path, said, fix = issue.path, issue.seen, issue.fix
    assert path == where
    assert message in said
    assert fix


@pytest.mark.parametrize(
    "source",
    [
        "def f(completions, **kwargs): ...",
        "async def f(completions): ...",
        "from functools import partial\nf = partial(print)",
        "try:\n  from x import f\nexcept ImportError:\n  def f(completions): ...",
        "from json import *",
        "if True:\n  def f(completions): ...",
    ],
)
def test_no_problems(write, source):
    assert PythonParams(path=f"{write(source)}:f").problems() == []


def test_problems_of_places(tmp_path):
    [issue] = PythonParams(path=f"{tmp_path}/none.py:f").problems()
    message = issue.seen
    assert "there is no file" in message
    [issue] = PythonParams(path="no_such_module_anywhere:f").problems()
    message = issue.seen
    assert "no module 'no_such_module_anywhere'" in message
    assert PythonParams(path="json.decoder:scanstring").problems() == []
    [issue] = PythonParams(path="json.decoder:nope").problems()
    message = issue.seen
    assert "no function 'nope'" in message


def test_a_problem_names_the_near_function(write):
    path = write("def brevity(completions): ...\ndef other(completions): ...")
    [issue] = PythonParams(path=f"{path}:brevty").problems()
    fix = issue.fix
    assert fix == "name brevity"


@pytest.mark.parametrize("path", ["mine.py", "mine.py:", ":f", "mine.py:not a name"])
def test_malformed_paths_are_refused(path):
    with pytest.raises(ValidationError, match=r"should be file\.py:function"):
        PythonParams(path=path)


STATEFUL = """
class Seen:
    def __call__(self, **kwargs): return [1.0]
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
f = Seen()
"""
F = "\ndef f(completions): ..."


@pytest.mark.parametrize(
    ("source", "options", "key", "fix"),
    [
        (f"import no_such_package{F}", {}, "path", "install the package that has it"),
        (f"from .words import WORDS{F}", {}, "path", "write words.py there"),
        (f"open('words.txt'){F}", {}, "path", r"`Path\(__file__\)\.parent"),
        (f"raise SystemExit{F}", {}, "path", 'under `if __name__ == "__main__":`'),
        (f"import os; os.environ['NO_SUCH']{F}", {}, "path", "the last line of the traceback"),
        ("f = object()", {}, "path", "name a function"),
        ("g = 1", {}, "path", r"write `def f\(completions"),
        ("from math import *", {}, "path", "define it, or name another"),
        (STATEFUL, {"timeout_s": 5}, "timeout_s", "remove `timeout_s`"),
    ],
)
def test_a_reward_that_cannot_be_built_names_its_key_and_a_fix(write, source, options, key, fix):
    with pytest.raises((RewardError, SetupError), match=rf"\. Fix: .*{fix}") as caught:
        run(f"{write(source)}:f", BATCH, **options)
    assert caught.value.path.startswith("rewards.0")
    assert key in f"{caught.value.path} {caught.value}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("if True: import does_not_exist_anywhere", "No module named 'does_not_exist_anywhere'"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_an_error_in_the_file_is_shown_as_itself(write, source, text):
    path = write(f"{source}{F}")
    with pytest.raises(RewardError) as caught:
        run(f"{path}:f", BATCH)
    message = str(caught.value)
    assert "reward 'f' (python) could not be loaded" in message
    assert text in message
    assert "mine.py" in message
    assert "grpo_cli" not in message
    assert "importlib" not in message


@pytest.mark.parametrize(
    ("signature", "tool"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "verl"),
        ("queries, prompts, labels", "OpenRLHF"),
        ("queries, prompts, labels, **kwargs", "OpenRLHF"),
        ("prompt, completion, answer, state", "verifiers"),
        ("args, sample, **kwargs", "slime"),
        ("prompt, completions, prompt_ids, completion_ids, answer", "AReaL"),
        ("completions, queries, labels", ""),
        ("completions, state, prompts", ""),
    ],
)
def test_a_function_of_another_tool_is_told_from_missing_columns(write, signature, tool):
    params = PythonParams(path=f"{write(f'def f({signature}): ...')}:f")
    told = [each.seen for each in params.problems()]
    assert [f"has the signature of {tool}" in each for each in told] == [True] * bool(tool)
    assert (params.columns().required == ()) is bool(tool)


def test_a_file_is_read_once_whatever_is_asked_of_it(write):
    path = write("async def f(completions, completion_ids, answer, **kwargs): return []")
    params = PythonParams(path=f"{path}:f")
    assert params.problems() == []
    path.unlink()
    assert params.details().waits
    assert params.details().reads_tokens
    assert params.columns().required == ("answer",)
