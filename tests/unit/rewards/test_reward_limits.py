"""`timeout_s` and the processes behind it: real hangs, real deaths, in order, on any thread."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from grpo_cli.errors import RewardError
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, RewardContext
from grpo_cli.rewards.pool import WorkerPool, count_workers

CONTEXT = RewardContext(max_completion_length=64)
FUNCTIONS = """
import os, signal, time

def slow(completions, trainer_state, log_metric, seconds=None, **kwargs):
    found = []
    for text in completions:
        if text == "hang":
            while True: pass
        if text == "sleep": time.sleep(60)
        if text == "die":
            # The pool must have heard that the row has begun.
            time.sleep(0.3)
            os._exit(7)
        if text == "boom": raise ZeroDivisionError("no luck")
        if text == "step": text = str(trainer_state.global_step)
        found.append(float(text))
    return found
"""


def build(*configs):
    return build_rewards([RewardConfig(**config) for config in configs], CONTEXT)


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FUNCTIONS)
    return {"kind": "python", "path": f"{path}:slow", "timeout_s": 1.0}


def values(scores):
    return [score.value for score in scores]


def batch(*texts, **columns):
    return Batch(["p"] * len(texts), list(texts), columns=columns)


def test_rows_that_hang_or_die_are_failures_and_the_others_are_scored_in_order(own):
    [reward] = build({**own, "on_error": "skip"})
    texts = ["1", "hang", "2", "die", "sleep", "boom", "3", "x"]
    scores = reward.score(batch(*texts, row_id=[10, 11, 12, 13, 14, 15, 16, 17]))
    assert values(scores) == [1.0, None, 2.0, None, None, None, 3.0, None]
    assert [score.failed for score in scores] == [value is None for value in values(scores)]
    assert [score.late for score in scores] == [text in ("hang", "sleep") for text in texts]
    assert "took longer than 1 s" in scores[1].reason
    assert "row 12 (rewards.0): " in scores[1].reason
    assert "exit code 7" in scores[3].reason
    assert "failed on row 15 (rewards.0): " in scores[4].reason
    assert "ZeroDivisionError: no luck" in scores[5].reason
    assert "failed on row 16 (rewards.0, own.py:14): " in scores[5].reason
    assert values(reward.score(batch("4", "5"))) == [4.0, 5.0]


def test_by_default_a_timeout_of_ones_own_function_ends_the_run(own):
    [reward] = build(own)
    with pytest.raises(RewardError, match=r"failed on row 2 of the batch.*took longer than 1 s"):
        reward.score(batch("1", "hang"))
    with pytest.raises(RewardError, match="no luck") as caught:
        reward.score(batch("1", "boom"))
    assert "raise ZeroDivisionError" in str(caught.value)


LOADERS = """
import functools, os, time

@functools.cache
def model():
    time.sleep(1.5)
    return float

def loads_first(completions, **kwargs):
    return [model()(text) if text != "hang" else time.sleep(600) for text in completions]

def loads_late(completions, **kwargs):
    # An empty completion, and the first rows, show nothing of what the others need.
    found = []
    for text in completions:
        if text.startswith("import"):
            import slow_package
            text = "3"
        found.append(float(text))
    return found
"""


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        pytest.param("loads_first", ["1", "2", "1", "hang", "2", "1", "2"], id="state"),
        pytest.param("loads_late", ["1", "2", "import", "2", "import", "1"], id="package"),
    ],
)
def test_what_a_reward_loads_does_not_count_against_its_limit(
    tmp_path, monkeypatch, function, texts
):
    """Neither in the first processes nor in those that replace one whose call never ended."""
    monkeypatch.setattr("grpo_cli.rewards.pool.count_workers", lambda: 2)
    (tmp_path / "loaders.py").write_text(LOADERS)
    (tmp_path / "slow_package.py").write_text("import time; time.sleep(1.5)")
    path = f"{tmp_path}/loaders.py:{function}"
    [reward] = build({"kind": "python", "path": path, "timeout_s": 0.5, "on_error": "skip"})
    for _ in range(2):
        scores = reward.score(batch(*texts))
        assert [score.late for score in scores] == [text == "hang" for text in texts]
        assert values(scores) == [
            {"hang": None, "import": 3.0}[text] if text.isalpha() else float(text) for text in texts
        ]


def test_a_call_that_is_slow_by_itself_is_ended_at_its_limit_though_none_has_completed(tmp_path):
    [late] = WorkerPool().run(note, [(tmp_path / "notes", 3.0)], 0.5)
    assert isinstance(late, TimeoutError)
    assert (tmp_path / "notes").read_text() == "begun\n"


def note(path, seconds):
    path.write_text("begun\n")
    time.sleep(seconds)
    path.write_text("begun\nended\n")


def test_the_trainers_state_comes_along(own):
    from types import SimpleNamespace

    [reward] = build(own)
    state = SimpleNamespace(global_step=12, max_steps=20, epoch=0.5, unpicklable=lambda: None)
    given = Batch(["p"], ["step"], extra={"trainer_state": state, "log_metric": print})
    assert values(reward.score(given)) == [12.0]


def test_a_pattern_that_never_ends_scores_zero_off_the_main_thread():
    [reward] = build({"kind": "regex", "pattern": r"(a+)+$", "timeout_s": 0.5})
    found = []
    texts = ["aaa", "a" * 40 + "b", "a", "a" * 40 + "c"]
    thread = threading.Thread(target=lambda: found.extend(reward.score(batch(*texts))))
    thread.start()
    thread.join(60)
    assert values(found) == [1.0, 0.0, 1.0, 0.0]
    assert found[1].reason == "took longer than 0.5 s"


def test_mathematics_that_never_ends_scores_zero_off_the_main_thread():
    [reward] = build({"kind": "math", "timeout_s": 3})
    # Hard for sympy, and not one of the forms that are refused by their text.
    endless = r"\boxed{\sum_{k=1}^{9999} \sin(k)^{k} \cos(k x)^{99} \int_0^k \sin(\sin(x^9)) dx}"
    texts = [r"\boxed{2x+1}", endless, "#### 3"]
    columns = {"answer": ["1 + 2x", r"\frac{x^7}{\sin(x)+3}", "3"]}
    found = []
    thread = threading.Thread(target=lambda: found.extend(reward.score(batch(*texts, **columns))))
    thread.start()
    thread.join(90)
    assert values(found) == [1.0, 0.0, 1.0]


def test_limits_are_the_kinds_unless_given():
    kinds = ({"kind": "math"}, {"kind": "regex", "pattern": "a"}, {"kind": "length", "target": 1})
    limits = [reward.params.time_limit() for reward in build(*kinds)]
    assert [limit and limit[:2] for limit in limits] == [(5.0, 0.0), (2.0, 0.0), None]


def pause(seconds):
    time.sleep(seconds)
    return seconds


def end(code):
    os._exit(code)


def test_a_pool_keeps_order_and_survives_its_workers(monkeypatch):
    monkeypatch.setattr("grpo_cli.rewards.pool.count_workers", lambda: 2)
    pool = WorkerPool()
    assert pool.run(pause, [(0.2,), (0.0,), (0.1,)], 5) == [0.2, 0.0, 0.1]
    late, in_time = pool.run(pause, [(30,), (0.0,)], 0.3)
    assert isinstance(late, TimeoutError)
    assert in_time == 0.0
    [ended] = pool.run(end, [(3,)], 5)
    assert str(ended) == "exit code 3"
    assert pool.run(pause, [(0.0,)], 5) == [0.0]


def test_a_call_whose_worker_was_killed_from_outside_is_made_again(monkeypatch):
    monkeypatch.setattr("grpo_cli.rewards.pool.count_workers", lambda: 1)
    pool = WorkerPool()
    [worker] = pool.run(worker_id, [()], 5)
    threading.Timer(0.5, os.kill, (worker, signal.SIGKILL)).start()
    assert pool.run(pause, [(1.0,)], 10) == [1.0]


def test_a_pool_whose_workers_are_all_killed_again_and_again_goes_on(monkeypatch):
    monkeypatch.setattr("grpo_cli.rewards.pool.count_workers", lambda: 2)
    pool = WorkerPool()
    for _ in range(4):
        workers = set(pool.run(worker_id, [()] * 8, 5))
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        assert pool.run(pause, [(0.0,)] * 20, 5) == [0.0] * 20


def worker_id():
    return os.getpid()


def test_workers_share_the_machine(monkeypatch):
    alone = count_workers()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert 1 <= count_workers() <= max(1, alone // 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_owner_leaves_no_process_behind(tmp_path):
    """Also where a worker is in an endless loop, and so never reads that its owner is gone."""
    own = tmp_path / "own.py"
    own.write_text(FUNCTIONS)
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(f"""
        import threading, time
        from grpo_cli.recipe.rewards import RewardConfig
        from grpo_cli.rewards.building import build_rewards
        from grpo_cli.rewards.contract import Batch, RewardContext

        if __name__ == "__main__":
            config = RewardConfig(kind="python", path="{own}:slow", timeout_s=100, on_error="skip")
            [reward] = build_rewards([config], RewardContext(8))
            reward.score(Batch(["p"], ["1"]))
            hang = lambda: reward.score(Batch(["p"] * 2, ["hang", "hang"]))
            threading.Thread(target=hang, daemon=True).start()
            time.sleep(1)
            print("ready", flush=True)
            time.sleep(100)
        """)
    )
    marker = f"GRPO_TEST_OWNER={tmp_path}"
    name, value = marker.split("=")
    environment = {**os.environ, name: value}
    owner = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert owner.stdout.readline().strip() == "ready"
    assert len(marked(marker)) >= 2
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 20
    while marked(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(marker) == []


def marked(marker):
    """Processes whose environment holds a text."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/environ", "rb") as environment:
                if marker.encode() in environment.read():
                    found.append(entry)
        except OSError:
            continue
    return found
