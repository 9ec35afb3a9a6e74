"""Which settings count: the hashes and the list of differences say the same."""

import pytest

from grpo_cli.recipe.comparison import fingerprint_settings, list_training_differences
from grpo_cli.recipe.recipe import Recipe
from tests.run_folders import PLAIN


def made(**changes):
    return Recipe.model_validate({**PLAIN, **changes})


FREE = [
    {"name": "other"},
    {"seed": 7},
    {"description": "words"},
    {"logging": {"report_to": ["wandb"], "log_completions": False}},
    {"launch": {"num_processes": 1, "use_cpu": True, "main_process_port": 29500}},
    {"training": {"max_steps": 40, "save_strategy": "no"}},
    {"training": {"max_steps": 40, "learning_rate": 1e-6}},
    {"training": {"max_steps": 40, "stop_when": ["nan_loss"]}},
    {"evaluation": {"batch_size": 4}},
    {"generation": {"vllm": {"mode": "server", "base_url": "http://10.0.0.2:8000"}}},
    {"expect": {"metrics": [{"metric": "reward", "step": 1, "band": [0, 1]}]}},
]
BOUND = [
    ("model", {"model": {"path": "org/model", "dtype": "float32"}}),
    ("dataset", {"dataset": {**PLAIN["dataset"], "limit": 3}}),
    ("rewards", {"rewards": [{"kind": "math", "answer": "q", "weight": 2}]}),
    ("generation", {"generation": {"temperature": 0.7}}),
    ("generation", {"generation": {"vllm": {"importance_sampling_correction": False}}}),
    ("training", {"training": {"max_steps": 41}}),
    ("evaluation", {"evaluation": {"limit": 10}}),
    ("launch", {"launch": {"num_processes": 2}}),
    ("logging", {"logging": {"logging_steps": 10}}),
]


@pytest.mark.parametrize("changes", FREE, ids=str)
def test_what_changes_nothing_of_the_training_is_left_out(changes):
    assert fingerprint_settings(made(**changes)) == fingerprint_settings(made())
    assert list_training_differences(made(), made(**changes)) == []


@pytest.mark.parametrize(("section", "changes"), BOUND, ids=lambda value: str(value))
def test_what_changes_the_training_changes_its_section_alone(section, changes):
    before, after = fingerprint_settings(made()), fingerprint_settings(made(**changes))
    names = before.keys() | after.keys()
    assert {name for name in names if before.get(name) != after.get(name)} == {section}
    (difference,) = list_training_differences(made(), made(**changes))
    assert difference.path.startswith(section)


def test_where_files_lie_plays_no_part():
    def at(folder, file="train.jsonl"):
        dataset = {"kind": "files", "train": f"{folder}/{file}", "prompt": {"user": "{{ q }}"}}
        rewards = [{"kind": "python", "path": f"{folder}/mine.py:score"}]
        return made(dataset=dataset, rewards=rewards)

    assert fingerprint_settings(at("/home/a")) == fingerprint_settings(at("/data/b"))
    assert list_training_differences(at("/home/a"), at("/data/b")) == []
    assert list_training_differences(at("/home/a"), at("/home/a", "other.jsonl"))
    assert fingerprint_settings(at("/a")) != fingerprint_settings(at("/a", "other.jsonl"))
