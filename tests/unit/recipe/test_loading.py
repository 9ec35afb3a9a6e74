import sys

import pytest

from grpo_cli.errors import RecipeError
from grpo_cli.recipe.loading import load_recipe, load_tree
from grpo_cli.recipe.recipe import Recipe
from tests.recipe_texts import GOOD, write_recipe


def messages(path, overrides=None):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_good_recipe_loads_with_trl_defaults(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    assert recipe.training.learning_rate == 1e-6
    assert recipe.training.eval_strategy == "no"
    assert recipe.generation.num_generations == 4


def test_a_recipe_is_frozen_all_the_way_down(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.max_steps = 3


def test_the_resolved_recipe_reads_back_the_same(tmp_path):
    text = GOOD.replace("max_steps: 2", "max_steps: 2\n  beta: 0.04\n  lr_scheduler_type: cosine")
    recipe = load_recipe(write_recipe(tmp_path, text))
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert recipe.training.trl_fields()["beta"] == 0.04


def test_children_win_over_parents_and_lists_replace(tmp_path):
    write_recipe(tmp_path, GOOD, "base.yaml")
    child = write_recipe(
        tmp_path,
        "extends: base.yaml\nname: child\nrewards: [{kind: length, target: 3}]\ntraining: {max_steps: 9}\n",
    )
    recipe = load_recipe(child)
    assert (recipe.name, recipe.training.max_steps) == ("child", 9)
    assert recipe.training.per_device_train_batch_size == 4
    assert [reward.kind for reward in recipe.rewards] == ["length"]


def test_of_several_parents_the_later_wins(tmp_path):
    write_recipe(tmp_path, GOOD, "a.yaml")
    write_recipe(tmp_path, "seed: 7\ntraining: {max_steps: 5}\n", "b.yaml")
    recipe = load_recipe(write_recipe(tmp_path, "extends: [a.yaml, b.yaml]\nname: c\n"))
    assert (recipe.seed, recipe.training.max_steps, recipe.name) == (7, 5, "c")


def test_another_dataset_kind_replaces_the_parents_dataset(tmp_path):
    write_recipe(tmp_path, GOOD, "base.yaml")
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    text = "extends: base.yaml\ndataset: {kind: files, train: rows.jsonl, prompt: {user: '{{ question }}'}}\n"
    recipe = load_recipe(write_recipe(tmp_path, text))
    assert recipe.dataset.kind == "files"


def test_a_parents_mistake_is_cited_in_the_parent(tmp_path):
    write_recipe(tmp_path, GOOD.replace("max_steps: 2", "max_step: 2"), "base.yaml")
    (said,) = messages(write_recipe(tmp_path, "extends: base.yaml\n"))
    assert (
        "base.yaml:19:3: training.max_step: unknown key `max_step`. Fix: write `max_steps`" in said
    )


def test_circles_and_missing_parents_are_refused(tmp_path):
    write_recipe(tmp_path, "extends: b.yaml\n", "a.yaml")
    write_recipe(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert "extends itself" in messages(tmp_path / "a.yaml")[0]
    assert "there is no file" in messages(write_recipe(tmp_path, "extends: nobody.yaml\n"))[0]
    assert "a path or a list of paths" in messages(write_recipe(tmp_path, "extends: {a: 1}\n"))[0]


def test_paths_are_relative_to_the_file_that_wrote_them(tmp_path, monkeypatch):
    folder = tmp_path / "shared"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    base = GOOD.replace("path: tiny", "path: ./weights").replace(
        "{kind: math, answer: answer}", "{kind: python, path: rewards.py:score}"
    )
    (folder / "rewards.py").write_text("")
    write_recipe(folder, base, "base.yaml")
    recipe = load_recipe(write_recipe(tmp_path, "extends: shared/base.yaml\n"))
    assert recipe.model.path == str(folder / "weights")
    assert recipe.rewards[0].params["path"] == f"{folder / 'rewards.py'}:score"
    flagged = load_recipe(tmp_path / "recipe.yaml", ["model.path=./here"])
    assert flagged.model.path == str(tmp_path / "elsewhere" / "here")


def test_what_a_run_keeps_of_its_recipe_reads_the_same_in_any_folder(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "rewards.py").write_text("")
    own = "{kind: python, path: 'rewards.py:score'} # from: rewards.py"
    text = GOOD.replace("tiny", "./tiny  # untrained")
    text = text.replace("{kind: math, answer: answer}", own)
    parent = write_recipe(tmp_path / "base", text)
    child = write_recipe(
        tmp_path, "extends: base/recipe.yaml\nlaunch: {accelerate_config: own.yaml}\n"
    )
    for number, path in enumerate((parent, child)):
        loaded = load_tree(path, ["training.max_steps=9"])
        (tmp_path / f"{number}").mkdir()
        moved = write_recipe(tmp_path / f"{number}", loaded.write_movable())
        assert load_recipe(moved) == load_recipe(path)
    # Of a recipe that extends none, only the paths change.
    folder = tmp_path / "base"
    assert load_tree(parent).write_movable() == text.replace("./tiny", f"{folder}/tiny").replace(
        "'rewards.py", f"'{folder}/rewards.py"
    )
    assert load_tree(write_recipe(tmp_path)).write_movable() == GOOD


def test_files_of_commands_are_relative_too(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    (folder / "bin").mkdir(parents=True)
    (folder / "server.py").write_text("")
    (folder / "python").write_text("")
    (folder / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    commands = ("[python, server.py, --fast]", "[bin/python, ~x]")
    tools = "".join(f"- {{kind: mcp, command: {each}}}\n" for each in commands)
    recipe = load_recipe(write_recipe(folder, f"{GOOD}tools:\n{tools}"))
    first, second = [tuple(each.params["command"]) for each in recipe.tools]
    assert first == ("python", str(folder / "server.py"), "--fast")
    assert second == (str(folder / "bin" / "python"), "~x")


def test_hub_ids_stay_as_they_are(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, GOOD.replace("tiny", "Qwen/Qwen2.5-0.5B")))
    assert recipe.model.path == "Qwen/Qwen2.5-0.5B"


def test_no_line_of_an_override_is_dropped(tmp_path):
    path = write_recipe(tmp_path)
    (said,) = messages(path, ["description=one\nseed: 3"])
    assert "is not valid YAML" in said
    assert load_recipe(path, ['description="one\\nseed: 3"']).description == "one\nseed: 3"


def test_overrides_are_typed_and_reach_into_lists(tmp_path):
    path = write_recipe(tmp_path)
    recipe = load_recipe(
        path,
        [
            "training.learning_rate=3e-5",
            "training.eval_strategy=no",
            "rewards.0.weight=2",
            "model.lora.r=4",
            "training.warmup_steps=0.1",
            "generation.vllm={gpu_memory_utilization: 0.5}",
        ],
    )
    assert recipe.training.learning_rate == 3e-5
    assert recipe.training.eval_strategy == "no"
    assert recipe.rewards[0].weight == 2
    assert recipe.model.lora.r == 4
    assert recipe.generation.vllm.extras == {"gpu_memory_utilization": 0.5}


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("training.max_steps", "--set training.max_steps: is not `path=value`"),
        (
            "training.max_steps=x",
            "--set training.max_steps=x: training.max_steps: should be a whole number",
        ),
        ("training.maxsteps=3", "--set training.maxsteps=3: training.maxsteps: unknown key"),
        ("rewards.5.weight=1", "the list has 1 entries, numbered from 0"),
        ("name.x=1", "leads through a value that holds no keys"),
        ("dataset.kind.x=1", "set the whole of it: --set 'dataset.kind={…}'"),
        ("training.max_steps=[1", "--set training.max_steps=[1: is not valid YAML"),
    ],
)
def test_a_wrong_flag_is_cited(tmp_path, flag, said):
    assert said in messages(write_recipe(tmp_path), [flag])[0]


def test_all_problems_come_at_once_sorted_by_line(tmp_path):
    text = GOOD.replace("name: good", "nam: good").replace("path: tiny", "pth: tiny")
    text = text.replace("max_steps: 2", "max_steps: [2]")
    said = messages(write_recipe(tmp_path, text))
    lines = [int(message.split(":")[1]) for message in said]
    assert lines == sorted(lines)
    assert len(said) == 5  # two unknown keys, two missing ones, one wrong type


def test_a_kind_of_environment_may_have_a_key_that_is_named_like_a_section(tmp_path):
    path = write_recipe(tmp_path, f"{GOOD}environment: {{kind: of_a_package, tools: [search]}}\n")
    assert not any("section of its own" in str(issue) for issue in load_tree(path).problems)
    assert load_recipe(path).tools == ()


def test_booleans_are_no_numbers_and_words_are_booleans(tmp_path):
    text = GOOD.replace("max_steps: 2", "max_steps: true\n  gradient_checkpointing: no")
    said = messages(write_recipe(tmp_path, text))
    assert len(said) == 1
    assert "training.max_steps: should be a whole number (got true)" in said[0]
    recipe = load_recipe(write_recipe(tmp_path, text.replace("max_steps: true", "max_steps: 3")))
    assert recipe.training.trl_fields()["gradient_checkpointing"] is False


def test_text_that_yaml_reads_as_a_number_is_asked_for_in_quotes(tmp_path):
    (said,) = messages(write_recipe(tmp_path, GOOD.replace("name: good", "name: 123")))
    assert 'Fix: put it in quotes: "123"' in said


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text\n", "3\n"])
def test_what_is_no_mapping_is_no_recipe(tmp_path, text):
    said = messages(write_recipe(tmp_path, text))
    assert said


def test_diamonds_of_parents_are_read_once(tmp_path):
    write_recipe(tmp_path, GOOD, "f30.yaml")
    for i in range(30):
        write_recipe(tmp_path, f"extends: [f{i + 1}.yaml, f{i + 1}.yaml]\n", f"f{i}.yaml")
    assert load_recipe(tmp_path / "f0.yaml").name == "good"


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert messages(tmp_path / "a")


def test_a_mapping_by_flag_merges_as_extends_does(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path), ["training={max_steps: 9}"])
    assert (recipe.training.max_steps, recipe.training.per_device_train_batch_size) == (9, 4)


def test_a_section_whose_keys_are_commented_out_is_absent(tmp_path):
    text = GOOD[: GOOD.index("training:")] + "training:\n  # max_steps: 2\nlogging:\n"
    assert load_recipe(write_recipe(tmp_path, text)).training.max_steps == -1


def test_a_mistake_in_the_only_reward_is_one_problem(tmp_path):
    (said,) = messages(
        write_recipe(tmp_path, GOOD.replace("{kind: math", "{weight: x, kind: math"))
    )
    assert "rewards.0.weight: should be a number" in said


@pytest.mark.parametrize(
    "flag",
    [
        "rewards.0.weight=.nan",
        "training.learning_rate=.inf",
        "generation.top_p=5",
        "generation.top_k=-3",
        "training.max_steps=0",
        "training.max_steps=-5",
        "rewards.²=1",
        "extends=base.yaml",
    ],
)
def test_values_that_train_nothing_or_never_are_refused(tmp_path, flag):
    assert messages(write_recipe(tmp_path), [flag])


def test_the_resolved_recipe_of_a_run_is_a_recipe(tmp_path):
    import json

    recipe = load_recipe(write_recipe(tmp_path))
    path = tmp_path / "resolved.json"
    path.write_text(json.dumps({"schema_version": 1, "recipe": recipe.model_dump(mode="json")}))
    assert load_recipe(path) == recipe


def test_a_template_by_flag_needs_no_quotes_inside(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path), ["dataset.prompt.user={{ answer }} is what?"])
    assert recipe.dataset.prompt.user == "{{ answer }} is what?"


@pytest.mark.parametrize(
    ("adapter", "fix"),
    [
        ("runs/base/20261125-124700", "name a finished run"),
        ("./gone", "name a finished run"),
        ("someone/adapter", "hf download someone/adapter"),
    ],
)
def test_the_fix_of_a_missing_adapter_tells_folders_from_hub_ids(tmp_path, adapter, fix):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{adapter: {adapter}}}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = (each for each in caught.value.problems if each.path == "model.adapter")
    assert fix in problem.fix
