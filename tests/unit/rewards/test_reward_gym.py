import functools
import json

import pytest

from grpo_cli.errors import RewardError
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, RewardContext

reasoning_gym = pytest.importorskip("reasoning_gym")

CONTEXT = RewardContext(max_completion_length=64)


def entry(task, index=0):
    return reasoning_gym.create_dataset(task, seed=7, size=5)[index]


def score(row, completion, **params):
    return judge(row, completion, **params).value


def judge(row, completion, **params):
    [judged] = judge_all([(row, completion)], make_reward(**params))
    return judged


def judge_all(pairs, reward):
    rows, completions = zip(*pairs, strict=True)
    columns = {name: [row[name] for row in rows] for name in ("question", "answer", "metadata")}
    columns["metadata"] = [
        each if isinstance(each, str) else json.dumps(each) for each in columns["metadata"]
    ]
    return reward.score(Batch([""] * len(rows), list(completions), columns=columns))


@functools.cache
def make_reward(**params):
    """A reward whose processes, which import all tasks, are started once."""
    [reward] = build_rewards([RewardConfig(kind="reasoning_gym", **params)], CONTEXT)
    return reward


def tasks():
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


@pytest.mark.slow
def test_scores_survive_the_way_through_json():
    differ = []
    for task in tasks():
        row = entry(task)
        meta = row["metadata"]
        answer = row["answer"] or meta.get("example_answer") or meta.get("example_correct_answer")
        if answer is None:
            continue
        scorer = reasoning_gym.get_score_answer_fn(task)
        direct = scorer(answer.strip(), row)
        if score(row, answer) != direct:
            differ.append((task, direct))
    assert not differ


def test_malformed_answers_never_raise():
    texts = ["", "garbage", "1", "[1", "{}", "-", "1 2\n3", "(", "\\boxed{"]
    names = ("prime_factorization", "game_of_life", "boxnet", "chain_sum", "countdown")
    pairs = [(entry(name), text) for name in names for text in texts]
    assert all(judged.value <= 0.5 for judged in judge_all(pairs, make_reward()))


def test_extraction_and_task():
    row = entry("chain_sum")
    said = f"Adding up: 1 + 1 = 2, so it is {row['answer']}."
    assert score(row, said) < 1.0
    assert score(row, said, extract="last_number") == 1.0
    tagged = f"<answer>{row['answer']}</answer>"
    assert score(row, tagged, extract=("boxed", "answer_tag")) == 1.0
    assert score(row, f"  {row['answer']}\n", task="chain_sum") == 1.0
    assert score(row, f"<think>hm</think>{row['answer']}") == 1.0


def test_metadata_may_be_a_mapping():
    row = entry("chain_sum")
    [reward] = build_rewards([RewardConfig(kind="reasoning_gym")], CONTEXT)
    columns = {"answer": [row["answer"]], "metadata": [row["metadata"]]}
    assert reward.score(Batch([""], [row["answer"]], columns=columns))[0].value == 1.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "metadata is not JSON"),
        ("[]", "metadata should be a mapping"),
        ("{}", "names no source_dataset"),
        ('{"source_dataset": "chain_summ"}', "no task 'chain_summ'. Fix: task: chain_sum"),
        ('{"source_dataset": "prime_factorization"}', "ValueError: invalid literal"),
    ],
)
def test_broken_rows_are_errors_not_zeros(metadata, message):
    row = {"question": "q", "answer": "x", "metadata": metadata}
    with pytest.raises(RewardError, match="row 1 of the batch") as caught:
        score(row, "y")
    assert message in str(caught.value)


def test_unknown_task_is_refused_at_once():
    with pytest.raises(RewardError, match="no task 'count_down'"):
        build_rewards([RewardConfig(kind="reasoning_gym", task="count_down")], CONTEXT)


CODE = [
    ("spiral_matrix", "open('PWNED', 'w').write('')"),
    ("n_queens", "[open('PWNED', 'w')]"),
    ("countdown", "exec(chr(111)+chr(112))"),
    ("countdown", "9**9**9**9"),
    ("puzzle24", "factorial(99999999)"),
    ("simple_integration", "().__class__"),
]


def test_answers_run_no_code(tmp_path, monkeypatch):
    # Processes of its own, which start in this folder.
    monkeypatch.chdir(tmp_path)
    [reward] = build_rewards([RewardConfig(kind="reasoning_gym")], CONTEXT)
    for judged in judge_all([(entry(task), code) for task, code in CODE], reward):
        assert (judged.value, judged.reason) == (0.0, "answer is not one the scorer may evaluate")
    assert not list(tmp_path.iterdir())
