"""Python scripts that train with TRL: what is read, what is left to a person, and that nothing is run."""

import re
from pathlib import Path

import pytest
import yaml

from grpo_cli.convert.conversion import convert_file, translate
from grpo_cli.convert.key_report import find, write_recipe
from grpo_cli.errors import RecipeError, UsageError
from tests.unit.convert.readings import reasons, write

SCRIPT = """\
import os, torch, trl
from pathlib import Path
from datasets import load_dataset
from peft import LoraConfig, TaskType
from lib.scores import tidy
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment, think_format_reward as shape

MODEL = "org/model"
KWARGS = {"attn_implementation": "sdpa", "dtype": torch.bfloat16}
overlong = get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=64)

def brevity(completions, **kwargs):
    return [-len(each) for each in completions]

def main(beta=0.1):
    rows = load_dataset("org/rows", "main", split="train")
    rows = rows.map(lambda row: {"prompt": row["question"]})
    args = GRPOConfig(
        output_dir=f"out/{MODEL}",
        learning_rate=2e-6,
        max_grad_norm=-1.0,
        beta=beta,
        max_steps=int(os.environ["STEPS"]),
        use_vllm=os.environ.get("VLLM") == "1",
        model_init_kwargs=KWARGS,
        reward_weights=[1, 2, 3, 4, 5, 6],
        num_generations=4,
        **extra,
    )
    args.temperature = 0.9
    GRPOTrainer(
        MODEL,
        [brevity, shape, trl.rewards.accuracy_reward, overlong, tidy, lambda completions: 0],
        args,
        rows,
        peft_config=LoraConfig(r=32, bias="none", task_type=TaskType.CAUSAL_LM, exclude_modules=["x"]),
        callbacks=[print],
        tools=None,
    ).train()

Path("was_run").touch()
if __name__ == "__main__":
    main()
"""
TAIL = (
    "GRPOTrainer(model='m/x', reward_funcs='r/m', args=args, train_dataset=load_dataset('d/x'))\n"
)


def convert(text):
    return translate(text, Path("train.py"))


def value_of(lines, expression):
    """What is read of `learning_rate=expression`; None if it is left to do."""
    report = convert(f"{lines}\nargs = GRPOConfig(learning_rate={expression})\n{TAIL}")
    left = "training.learning_rate" in report.to_do
    value = find(report.recipe, "training.learning_rate")
    assert left == (value is None)
    return value


def test_a_script_is_read_and_what_it_computes_is_left_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    report = translate(SCRIPT, path, None, tmp_path / "recipes" / "new.yaml")
    recipe = report.recipe
    assert report.signs == [
        "GRPOConfig(…)",
        "LoraConfig(…)",
        "GRPOTrainer(…)",
        "load_dataset(…)",
    ]
    assert recipe["model"] == {
        "path": "org/model",
        "attn_implementation": "sdpa",
        "dtype": "bfloat16",
        "lora": {
            "r": 32,
            "lora_alpha": 8,
            "lora_dropout": 0.0,
            "bias": "none",
            "exclude_modules": ["x"],
            "target_modules": ["q_proj", "v_proj"],
        },
    }
    assert recipe["dataset"] == {
        "kind": "hub",
        "path": "org/rows",
        "name": "main",
        "split": "train",
    }
    assert recipe["rewards"] == [
        {"kind": "python", "path": "../train.py:brevity", "weight": 1},
        {"kind": "think_format", "weight": 2},
        {"kind": "math", "answer": "solution", "extract": ["boxed"], "weight": 3},
        {"kind": "soft_overlong", "max_length": 512, "cache": 64, "weight": 4},
        {"kind": "python", "path": "./lib/scores.py:tidy", "weight": 5},
    ]
    assert recipe["generation"] == {"num_generations": 4, "temperature": 0.9}
    assert recipe["training"] == {"learning_rate": 2e-6, "max_grad_norm": -1.0, "beta": 0.1}
    assert {key: text.partition("; ")[0] for key, text in report.to_do.items()} == {
        "training": "train.py:29 has `extra`",
        "training.max_steps": "train.py:24 has `int(os.environ['STEPS'])`",
        "generation.backend": "train.py:25 has `os.environ.get('VLLM') == '1'`",
        "rewards": "train.py:34 has `lambda completions: 0`",
        "dataset.prompt": (
            "train.py changes the rows (line 18: `rows.map(lambda row: {'prompt': row['question']})`)"
        ),
    }
    assert set(reasons(report)) == {
        "output_dir",
        "reward_funcs.5",
        "print",
    }
    (entry,) = [entry for entry in report.entries if entry.key == "print"]
    assert str(entry.location) == f"{path}:38:20"
    assert [problem.path for problem in write(report, tmp_path).problems] == []
    converted = convert_file(path, None, None)
    for key in report.to_do:
        assert re.search(rf"# TO DO: {key}( \(in part\))?: ", converted.text)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("lines", "expression", "value"),
    [
        ("LR: float = 1e-5", "LR", 1e-5),
        ("LR = 1e-5\nRATE = LR", "RATE", 1e-5),
        ("if __name__ == '__main__':\n    LR = 1e-5", "LR", 1e-5),
        ("LR = 1\nLR = 2", "LR", 2),
        ("LR = 1\nLR += 2", "LR", 3),
        ("for LR in (1, 2): pass", "LR", 2),
        ("for LR in rates: pass", "LR", None),
        ("LR = 1\nwhile x:\n    LR = 2", "LR", None),
        ("LR = 1\ndef f():\n    global LR\n    LR = 2", "LR", 1),
        ("LR = 1\ndef f():\n    global LR\n    LR = 2\nf()", "LR", 2),
        ("def f(rate, scale=2):\n    return rate * scale", "f(3)", 6),
        (
            "class C:\n    LR = 1\nclass D(C):\n    def get(self):\n        return self.LR",
            "D().get()",
            1,
        ),
        ("try:\n    import x\nexcept ImportError:\n    x, LR = None, 2\nLR = 1", "LR", 1),
        ("try:\n    import x\n    LR = 1\nexcept ImportError:\n    LR = 2", "LR", None),
        ("LR = 1\nif x:\n    raise ValueError\nelse:\n    LR = 2", "LR", 2),
        ("LR = 1\nif x:\n    LR = 1", "LR", 1),
        ("if x:\n    LR = 1", "LR", None),
        ("if x:\n    data = 1\nelse:\n    data = 1", "data", 1),
        ("if x:\n    data = 1\n    is_open = 2", "data", None),
        ("if x:\n    LR: float = 1", "LR", None),
        ("def f():\n    if x:\n        return 1\n    return 2", "f()", None),
        ("with x as LR: pass", "LR", None),
        ("from lib import LR", "LR", None),
        ("", "LR", None),
        ("", "float('1e-5')", 1e-5),
        ("", "2 * 3", 6),
        ("rates = {'a': [1, 2]}", "rates['a'][-1]", 2),
        ("", "10 ** 10 ** 10", None),
    ],
)
def test_a_name_is_followed_as_far_as_its_value_is_certain(lines, expression, value):
    assert value_of(lines, expression) == value


def test_a_name_of_a_function_hides_the_scripts():
    text = f"args = GRPOConfig(learning_rate=LR, beta=B)\n{TAIL}".replace("\n", "\n    ")
    report = convert(f"LR = 1\nB = 0.5\ndef main(LR):\n    {text}\n")
    assert "training.learning_rate" in report.to_do
    assert find(report.recipe, "training.beta") == 0.5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("KW['a'] = 2", {"a": 2}),
        ("KW.update(a=2)", {"a": 2}),
        ("KW |= {'b': 3}", {"a": 1, "b": 3}),
        ("KW = {**KW, **({'b': 3} if c else {'b': 3, 'a': 1})}", {"a": 1, "b": 3}),
        ("del KW['a']", None),
        ("KW['b'] = 2; del KW['a']", {"b": 2}),
        ("for x in xs: KW[x] = 1", {"a": 1}),
    ],
)
def test_a_mapping_is_read_as_it_is_where_it_is_used(change, expected):
    before = (
        f"KW = {{'a': 1}}\n{change}\nargs = GRPOConfig(model_init_kwargs=KW)\n{TAIL}KW['a'] = 9\n"
    )
    report = convert(before)
    assert find(report.recipe, "model.init_kwargs") == expected
    assert ("model.init_kwargs" in report.to_do) == ("KW[x]" in change)


@pytest.mark.parametrize(
    "change",
    [
        "KW = {**KW, **({'b': more()} if c else {})}",
        "if c:\n    KW.update(b=more())",
        "KW.update({'b': more()} if c else {})",
    ],
)
def test_what_is_known_of_a_mapping_is_kept_and_the_rest_is_named(change):
    text = f"KW = {{'a': 1, 'attn_implementation': 'sdpa'}}\n{change}\n"
    report = convert(f"{text}args = GRPOConfig(model_init_kwargs=KW)\n{TAIL}")
    assert report.recipe["model"]["attn_implementation"] == "sdpa"
    assert report.recipe["model"]["init_kwargs"] == {"a": 1}
    (left,) = report.to_do.items()
    assert left[0] == "model.init_kwargs.b"
    assert "more()" in left[1]


@pytest.mark.parametrize(
    "change",
    ["KW.update(more())", "KW |= more()", "KW = {**KW, **more()}", "KW = dict(KW, **more())"],
)
def test_what_an_unknown_mapping_may_replace_is_left_to_do_with_its_value(change):
    text = f"KW = {{'attn_implementation': 'sdpa'}}\n{change}\nKW['a'] = 1\n"
    report = convert(f"{text}args = GRPOConfig(model_init_kwargs=KW)\n{TAIL}")
    assert report.recipe["model"]["init_kwargs"] == {"a": 1}
    assert set(report.to_do) == {"model.init_kwargs", "model.attn_implementation"}
    left = report.to_do["model.attn_implementation"]
    assert left.startswith("train.py:1 has `'sdpa'`, which is 'sdpa' unless `more()` replaces it; ")
    assert left.endswith("\nattn_implementation: sdpa")


def test_arguments_that_depend_on_a_condition_are_named_with_their_values():
    bits = "{'quantization_config': BitsAndBytesConfig(load_in_4bit=True)}"
    report = convert(
        "def make(beta=0.3, **more):\n    return GRPOConfig(beta=beta, **more)\n"
        f"KW = {{'attn_implementation': 'sdpa', **({bits} if small else {{}})}}\n"
        "args = make(**({'beta': 0.1, 'top_p': 0.9} if fast else {'top_p': 0.9}),\n"
        f"    model_init_kwargs=KW, **first(), **second())\n{TAIL}"
    )
    assert find(report.recipe, "generation.top_p") == 0.9
    assert find(report.recipe, "model.attn_implementation") == "sdpa"
    assert "0.1 if `fast`, or 0.3 if `not fast`" in report.to_do["training.beta"]
    assert "load_in_4bit=True" in report.to_do["model.quantization"]
    assert all(
        each.key.startswith("Bits") is False or "if `small`" in each.note for each in report.dropped
    )
    assert "first()" in report.to_do["training"]
    assert not any("known to reach" in reason for reason in reasons(report).values())


def test_what_takes_the_trainers_model_is_named_wherever_the_model_comes_from():
    report = convert(
        "model, tokenizer = load(cfg)\nif ready(cfg):\n    unfreeze(model)\n"
        "print(tokenizer.decode(x))\nlook(tokenizer.decode(x))\nmodel.config.use_cache = False\n"
        "GRPOTrainer(model, 'r/m', train_dataset=load_dataset('d/x'), processing_class=tokenizer)\n"
    )
    assert reasons(report) == {
        "unfreeze(model)": "gets the model, and may change it; its code is not read",
        "tokenizer.decode(x)": "it prepares texts outside of the training",
        "tokenizer.decode(x) (line 5)": "it prepares texts outside of the training",
        "model.config.use_cache = False": "it is off while training",
        "GRPOTrainer.processing_class": "the tokenizer is that of `model.path`; the "
        "settings of `tokenizer` are not read",
    }


def test_held_out_rows_are_not_said_to_be_shuffled():
    report = convert(
        "rows = load_dataset('d/x')\n"
        "GRPOTrainer('m/x', 'r/m', train_dataset=rows['a'].shuffle(seed=1),\n"
        "    eval_dataset=rows['b'].shuffle(seed=2).select(range(9)))\n"
    )
    assert "training shuffles" in reasons(report)["….shuffle(seed=1)"]
    assert "in the order of the data" in reasons(report)["….shuffle(seed=2)"]
    assert "dataset.eval_limit" in report.to_do


def test_arguments_in_a_mapping_are_read():
    report = convert(f"KW = {{'beta': 0.1, 'epsilon': E}}\nargs = GRPOConfig(**KW)\n{TAIL}")
    assert find(report.recipe, "training.beta") == 0.1
    assert set(report.to_do) == {"training.epsilon"}


@pytest.mark.parametrize(
    ("made", "expected", "left"),
    [
        ("load_dataset('d/x')", {"path": "d/x"}, set()),
        ("load_dataset('d/x', split='train[:9]')", {"path": "d/x", "split": "train[:9]"}, set()),
        ("load_dataset('d/x')['train'].shuffle()", {"path": "d/x", "split": "train"}, set()),
        (
            "load_dataset('d/x', split='dev').train_test_split(0.1)['train']",
            {"path": "d/x", "split": "dev"},
            {"eval_fraction"},
        ),
        ("load_dataset('d/x').select(range(9))", {"path": "d/x", "limit": 9}, set()),
        ("load_dataset('d/x').shuffle().select(range(9))", {"path": "d/x"}, {"limit"}),
        ("load_dataset('d/x', name=N)", {"path": "d/x"}, {"name"}),
        ("load_dataset('d/x', revision='v1')", {"path": "d/x", "revision": "v1"}, set()),
        ("load_dataset('d/x') if c else load_dataset('d/x').take(2)", None, {""}),
        ("prepare(load_dataset('d/x'))", {"path": "d/x"}, {"prompt"}),
        (
            "load_dataset('json', data_files='a.jsonl', split='train')",
            {"kind": "files", "train": "a.jsonl"},
            set(),
        ),
        ("load_dataset(args.dataset)", None, {""}),
        ("Dataset.from_list(rows)", None, {""}),
    ],
)
def test_rows_are_traced_back_to_load_dataset(made, expected, left):
    report = convert(f"rows = {made}\nGRPOTrainer('m/x', 'r/m', train_dataset=rows)\n")
    known = None if expected is None else {"kind": "hub", **expected}
    assert report.recipe.get("dataset") == known
    assert set(report.to_do) == {f"dataset.{key}".rstrip(".") for key in left}


def test_a_split_is_known_if_the_rows_are_bound_again():
    text = "rows = load_dataset('d/x')['dev']\nrows = rows.map(f)\n"
    report = convert(f"{text}GRPOTrainer('m/x', 'r/m', train_dataset=rows)\n")
    assert report.recipe["dataset"]["split"] == "dev"


def test_held_out_rows_are_a_split_of_the_same_dataset():
    text = "rows = load_dataset('d/x')\nGRPOTrainer('m/x', 'r/m', train_dataset=rows['a'], eval_dataset=E)\n"
    assert find(convert(text.replace("E)", "rows['b'])")).recipe, "dataset.eval_split") == "b"
    other = convert(text.replace("E)", "load_dataset('d/y', split='b'))"))
    assert "dataset.eval_split" in other.to_do
    named = convert(
        "GRPOTrainer('m/x', 'r/m', train_dataset=load_dataset(path='d/x'), eval_dataset=None)"
    )
    assert (named.recipe["dataset"]["path"], named.to_do) == ("d/x", {})


def test_held_out_rows_may_be_a_file_of_their_own():
    text = (
        "rows = load_dataset('json', data_files={'train': 'a.jsonl', 'dev': 'b.jsonl', 'test': 'c.jsonl'})\n"
        "rows = rows.map(f)\n"
        "GRPOTrainer('m/x', 'r/m', train_dataset=rows['train'], eval_dataset=rows['dev'])\n"
    )
    report = convert(text)
    rows = {"kind": "files", "train": "a.jsonl", "eval": "b.jsonl"}
    assert (report.recipe["dataset"], set(report.to_do)) == (rows, {"dataset.prompt"})
    other = "load_dataset('json', data_files='d.jsonl', split='train')"
    other = text.replace("rows['dev']", other).replace("rows = rows.map(f)\n", "")
    assert "dataset.eval_split" in convert(other).to_do


def test_a_missing_file_is_told_without_the_files_of_the_conversion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "rows = load_dataset('json', data_files='gone.jsonl')"
    script = tmp_path / "train.py"
    script.write_text(f"{rows}\nGRPOTrainer('m/x', 'r/m', train_dataset=rows)\n")
    (problem,) = [each for each in convert_file(script, None, None).problems if "gone" in each.seen]
    assert problem.seen.endswith(f"{tmp_path} holds `train.py`")


def test_every_change_of_the_rows_is_left_to_do_with_its_line():
    report = convert(
        "rows = load_dataset('d/x', split='train').train_test_split(0.1)\n"
        "rows = rows.map(f)\n"
        "rows = (\n    rows.filter(g)\n    .map(\n        h)\n)\n"
        "print(list(map(str, [])))\n"
        "GRPOTrainer('m/x', 'r/m', train_dataset=rows['train'], eval_dataset=rows['test'])\n"
    )
    assert set(report.to_do) == {"dataset.prompt", "dataset.path"}
    assert report.recipe["dataset"]["eval_fraction"] == 0.1
    assert "(line 2: `rows.map(f)`, line 5: `….map(h)`)" in report.to_do["dataset.prompt"]
    assert report.to_do["dataset.path"].startswith("train.py:4 has `rows.filter(g)`; ")


def test_images_are_left_to_do_if_the_script_loads_a_vision_model():
    text = "model = AutoModelForImageTextToText.from_pretrained('m/x')\n"
    trainer = "GRPOTrainer(model, 'r/m', None, load_dataset('d/x'))\n"
    assert set(convert(f"{text}{trainer}").to_do) == {"dataset.prompt.images"}


def test_settings_of_the_processor_are_taken():
    call = "AutoProcessor.from_pretrained(M, max_pixels=999, min_pixels=2 * 28, use_fast=True)"
    report = convert(f"processor = {call}\n{TAIL}")
    assert report.recipe["model"]["processor"] == {"max_pixels": 999, "min_pixels": 56}
    assert "AutoProcessor.use_fast" in reasons(report)


def test_a_model_that_the_script_loads_is_named_and_keeps_its_precision():
    text = (
        "model = AutoModel.from_pretrained('m/x', device_map='auto', a=1, revision=R).to('cuda')\n"
        "GRPOTrainer(model, 'r/m', peft_config=LoraConfig())\n"
    )
    report = convert(text)
    model = report.recipe["model"]
    assert (model["path"], model["dtype"], model["init_kwargs"]) == ("m/x", "auto", {"a": 1})
    assert model["lora"]["r"] == 8
    assert set(report.to_do) == {"dataset", "model.revision"}
    assert reasons(report)["from_pretrained.device_map"] == "the launcher places the model"
    unknown = convert("GRPOTrainer(FastModel.get(), 'r/m', GRPOConfig(), peft_config=make())")
    assert set(unknown.to_do) == {"dataset", "model.path", "model.lora"}


@pytest.mark.parametrize(
    ("made", "key", "value"),
    [
        ("get_peft_model(base, LoraConfig(r=4))", "model.lora.r", 4),
        ("FastModel.get_peft_model(base, r=4)", "model.lora.r", 4),
        ("PeftModel.from_pretrained(base, 'sft')", "model.adapter", "sft"),
        ("PeftModel.from_pretrained(base, folder)", "model.adapter", None),
        ("Auto.from_pretrained('m/x', quantization_config=bits)", "model.quantization", "4bit"),
    ],
)
def test_adapters_and_quantization_of_a_model_are_taken_or_left_to_do(made, key, value):
    text = f"bits = BitsAndBytesConfig(load_in_4bit=True)\nbase = Auto.from_pretrained('m/x')\nmodel = {made}\n"
    report = convert(f"{text}GRPOTrainer(model, 'r/m', train_dataset=load_dataset('d/x'))\n")
    assert report.recipe["model"]["path"] == "m/x"
    assert find(report.recipe, key) == value
    assert set(report.to_do) == (set() if value else {key})


@pytest.mark.parametrize(
    "end", ["GRPOTrainer('m/x', f)", "def main():\n    GRPOTrainer('m/x', f)\nmain()"]
)
def test_a_script_that_trains_when_it_is_imported_is_named(end):
    assert "would train" in convert(f"def f(completions): ...\n{end}\n").to_do["rewards"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (1\n", "train.py:1:1: is not Python"),
        ("print(1)\n", "neither a GRPOTrainer nor a GRPOConfig"),
        ("GRPOTrainer('a')\nGRPOTrainer('b')\n", r"2 times \(line 1, line 2\)"),
    ],
)
def test_what_is_no_training_script_is_refused(text, said):
    with pytest.raises(RecipeError, match=said):
        convert(text)


def test_scripts_are_trls():
    with pytest.raises(UsageError, match="only TRL"):
        translate("GRPOConfig()", Path("train.py"), "axolotl")


BRANCHES = """\
import argparse
import torch.nn as nn

class Config(GRPOConfig):
    beta: float = 0.04

class Trainer(GRPOTrainer):
    def __init__(self, scale, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

def build(cli):
    config = Config(output_dir="o", num_generations=4)
    if cli.debug:
        config.max_steps = 2
    config.learning_rate = cli.lr
    return config

class Run:
    def __init__(self, cli):
        self.cli = cli
        self.model = AutoModelForCausalLM.from_pretrained("org/m", torch_dtype="bfloat16")
        self.model.config.use_cache = False

    def rows(self):
        rows = load_dataset("org/rows", split="train")
        if self.cli.debug:
            rows = rows.select(range(8))
        return rows

    def train(self):
        keywords = dict(model=self.model, args=build(self.cli), train_dataset=self.rows())
        if self.cli.lora:
            keywords["peft_config"] = LoraConfig(r=4)
        trainer = Trainer(2.0, reward_funcs="r/m", **keywords)
        trainer.add_callback(Mine())
        trainer.train()
        trainer.push_to_hub("name")

def main():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("g")
    group.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--no-lora", dest="lora", action="store_false")
    parser.add_argument("--debug", action="store_true")
    Run(parser.parse_args()).train()
"""


def test_functions_classes_and_branches_are_followed_and_all_of_them_is_named():
    report = convert(BRANCHES)
    recipe = report.recipe
    assert recipe["training"] == {"beta": 0.04}
    assert (recipe["model"]["path"], recipe["model"]["dtype"]) == ("org/m", "bfloat16")
    assert recipe["model"]["lora"]["r"] == 4
    assert set(report.to_do) == {
        "model.lora",
        "training.max_steps",
        "training.learning_rate",
        "dataset.limit",
    }
    assert "only if `self.cli.lora`" in report.to_do["model.lora"]
    assert "(2 if `cli.debug`, or not set if `not cli.debug`)" in report.to_do["training.max_steps"]
    rate = report.to_do["training.learning_rate"]
    assert "has `config.learning_rate = cli.lr`, which is 5e-06 unless `--lr` is given" in rate
    assert rate.endswith("\nlearning_rate: 5.0e-06")
    assert "only if `self.cli.debug`" in report.to_do["dataset.limit"]
    assert set(reasons(report)) == {
        "output_dir",
        "trainer.add_callback(Mine())",
        "trainer.push_to_hub('name')",
        "self.model.config.use_cache = False",
        "self.scale = 2.0",
    }


def test_what_the_code_of_a_trainer_of_the_script_gives_its_base_is_taken():
    report = convert(
        "class Mine(GRPOTrainer):\n"
        "    def __init__(self, rows, lr, scale=2, **more):\n"
        "        more['args'] = GRPOConfig(learning_rate=lr, max_steps=7)\n"
        "        more['args'].beta = 0.5\n"
        "        super().__init__('m/x', 'r/m', train_dataset=rows, **more)\n"
        "        self.args.epsilon = 0.3\n"
        "        self.scale = scale\n"
        "Mine(load_dataset('d/x'), 1e-6, scale=3, args=GRPOConfig(beta=9), odd=4).train()\n"
    )
    values = {"learning_rate": 1e-6, "max_steps": 7, "beta": 0.5, "epsilon": 0.3}
    assert (report.recipe["training"], report.to_do) == (values, {})
    assert report.recipe["dataset"]["path"] == "d/x"
    assert set(reasons(report)) == {"self.scale = 3", "GRPOConfig(beta=9)", "GRPOTrainer.odd"}


def test_a_base_that_is_called_by_its_name_gets_its_arguments():
    report = convert(
        "class Mine(trl.GRPOTrainer):\n"
        "    def __init__(self, model, args, **more):\n"
        "        trl.GRPOTrainer.__init__(self, model, 'r/m', args, **more)\n"
        "Mine('m/x', GRPOConfig(beta=0.5), train_dataset=load_dataset('d/x'))\n"
    )
    assert (report.recipe["training"], report.to_do) == ({"beta": 0.5}, {})


def test_all_mappings_of_a_call_are_named():
    report = convert(f"for g in grid:\n    args = GRPOConfig(**more(), **g)\n    {TAIL}")
    assert "`more()`" in report.to_do["training"]
    assert "has `g`" in report.to_do["training"]


def test_a_setting_of_a_config_that_depends_on_a_condition_is_kept():
    made = "args = GRPOConfig(top_k=1) if x else GRPOConfig(top_k=2)\nargs.beta = 0.5\n"
    report = convert(f"{made}{TAIL}")
    assert report.recipe["training"] == {"beta": 0.5}
    assert "top_k=2" in report.to_do["training"]


def test_examples_of_what_is_to_do_are_a_valid_recipe_if_they_are_uncommented(tmp_path):
    text = (
        "import os\nport = int(os.getenv('PORT', '9'))\nbits = os.getenv('BITS', '') != ''\n"
        "args = GRPOConfig(use_vllm=True, vllm_server_port=port, beta=float(os.getenv('B', '1')),\n"
        "    vllm_tensor_parallel_size=port, seed=port)\n"
        "GRPOTrainer(os.getenv('M', 'm/x'), 'r/m', args, load_dataset('d/x'))\n"
    )
    report = convert(text)
    written = write_recipe(report, "train.py")
    keys = "model|path|vllm|server_port|tensor_parallel_size|training|beta|seed"
    recipe = yaml.safe_load(re.sub(rf"(?m)^( *)# (?= *({keys}):( \S+)?$)", r"\1", written))
    assert recipe["model"]["path"] == "m/x"
    assert recipe["generation"]["vllm"] == {"tensor_parallel_size": 9, "server_port": 9}
    assert (recipe["training"], recipe["seed"]) == ({"beta": 1.0}, 9)


def test_nothing_is_said_about_settings_that_were_not_read():
    text = "args = {}GRPOTrainer('m/x', 'r/m', args, load_dataset('d/x'))\n"
    for made in (
        "TrlParser(GRPOConfig).parse_args_and_config()[0]\n",
        "GRPOConfig(**more)\n",
        "f()\n",
    ):
        report = convert(text.format(made))
        assert set(report.to_do) == {"training"}
        assert "generation" not in report.recipe
        assert report.notes == {}


@pytest.mark.parametrize(
    "change", ["args = dataclasses.replace(args, beta=1)", "args = tune(args)", "tune(args, 1)"]
)
def test_what_may_change_the_config_is_left_to_the_user(change):
    text = f"args = GRPOConfig(num_generations=4)\n{change}\nargs.epsilon = 0.3\n"
    report = convert(f"{text}setattr(args, 'top_p', 0.5)\n{TAIL}")
    assert set(report.to_do) == {"training"}
    assert f"train.py:2 has `{change.removeprefix('args = ')}`; it may" in report.to_do["training"]
    assert report.recipe["training"] == {"epsilon": 0.3}
    assert report.recipe["generation"] == {"num_generations": 4, "top_p": 0.5}
    assert report.notes == {}


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("reward_function=f", "did you mean `reward_funcs`?"),
        ("tokenizer=f", "did you mean `processing_class`?"),
        ("bf16=True", "recipes have `training.bf16`"),
        ("nonsense=1", "GRPOTrainer has no such argument"),
    ],
)
def test_arguments_that_the_trainer_does_not_have_are_named(argument, reason):
    report = convert(f"from trl import GRPOTrainer\nGRPOTrainer('m/x', 'r/m', {argument})\n")
    assert reason in reasons(report)[f"GRPOTrainer.{argument.partition('=')[0]}"]


def test_vllms_sampling_parameters_have_a_home():
    made = "SamplingParams(top_k=40, stop='</a>', seed=7)"
    report = convert(f"args = GRPOConfig(use_vllm=True, vllm_sampling_params={made})\n{TAIL}")
    generation = report.recipe["generation"]
    assert (generation["top_k"], generation["generation_kwargs"]) == (
        40,
        {"stop_strings": ["</a>"]},
    )
    assert set(reasons(report)) == {"SamplingParams.seed"}


def test_a_tokenizers_template_is_taken():
    text = "tok = AutoTokenizer.from_pretrained('m/x')\ntok.chat_template = '{{ messages }}'\n"
    report = convert(f"{text}{TAIL.replace('args=args', 'processing_class=tok')}")
    assert find(report.recipe, "model.chat_template") == "{{ messages }}"


@pytest.mark.parametrize(
    ("lines", "notes"),
    [
        ("", {"training.beta": "0.0 (0.04 before TRL 0.19)"}),
        ("beta=0.5", {"training.beta": None}),
        ("importance_sampling_level='token'", {"training.beta": None}),
        ("use_vllm=True", {"generation.vllm.mode": "colocate (server before TRL 1.0)"}),
        ("max_prompt_length=64", {"max_prompt_length": "exists only before TRL 0.28"}),
        ("max_prompt_length=64", {"dataset.max_prompt_length": "64 (TRL cut longer prompts"}),
    ],
)
def test_defaults_that_changed_are_noted_unless_the_config_is_newer(lines, notes):
    report = convert(f"args = GRPOConfig({lines})\n{TAIL}")
    for key, text in notes.items():
        assert (report.notes.get(key) or "").startswith(text or "")
        assert (key in report.notes) == (text is not None)


LOADED = "GRPOTrainer(model, 'r/m', args, load_dataset('d/x'))\n"


def test_defaults_that_an_unread_value_may_replace_are_not_claimed():
    text = (
        "@dataclass\nclass C:\n    lr: float = 1e-6\n"
        "cli = C(**vars(parse()))\nargs = GRPOConfig(learning_rate=cli.lr)\n"
        "base = FastModel.from_pretrained('m/x', fast_inference=settings.fast)\n"
        f"model = FastModel.get_peft_model(base, **settings.lora)\n{LOADED}"
    )
    report = convert(text)
    assert "which is 1e-06 unless `parse()` replaces it" in report.to_do["training.learning_rate"]
    assert report.recipe["model"]["lora"] == {}
    assert "settings.lora" in report.to_do["model.lora"]
    assert "settings.fast" in report.to_do["generation.backend"]
    assert "generation" not in report.recipe


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("def other():\n    return AutoModel.from_pretrained('m/y')", "AutoModel.from_pretrained"),
        ("GRPOTrainer.compute_loss = mine", "GRPOTrainer.compute_loss = mine"),
        (
            "for name, weight in model.named_parameters():\n    weight.requires_grad = False",
            "weight.requires_grad = False",
        ),
        ("calls = [A()]\nif x:\n    calls.append(B())", "B()"),
    ],
)
def test_code_beside_the_usual_way_is_named(lines, key):
    made = "args = GRPOConfig()\nmodel = AutoModel.from_pretrained('m/x')\n"
    calls = LOADED.replace("))\n", "), callbacks=calls)\n") if "calls" in lines else LOADED
    report = convert(f"{made}{lines}\n{calls}")
    assert any(name.startswith(key) for name in reasons(report)), reasons(report)


def test_a_list_of_splits_is_one_split_for_each_name():
    rows = "train, test = load_dataset('d/x', split=['train[:9]', 'test[:3]'])\n"
    report = convert(f"{rows}GRPOTrainer('m/x', 'r/m', train_dataset=train, eval_dataset=test)\n")
    assert report.recipe["dataset"]["split"] == "train[:9]"
    assert report.recipe["dataset"]["eval_split"] == "test[:3]"


def test_an_adapter_that_is_left_to_do_keeps_the_bases_precision():
    text = (
        "base = AutoModel.from_pretrained('m/x', torch_dtype=torch.bfloat16)\n"
        f"model = PeftModel.from_pretrained(base, folder)\nargs = GRPOConfig()\n{LOADED}"
    )
    assert convert(f"import torch\n{text}").recipe["model"]["dtype"] == "bfloat16"


def test_held_out_rows_that_are_made_otherwise_are_not_called_the_same():
    start = "lambda row: {'prompt': SYSTEM.format(question=row['question']), 'answer': "
    text = (
        f"train = load_dataset('d/x', split='a').map({start}last(row)}})\n"
        f"test = load_dataset('d/x', split='b').map({start}row['answer']}})\n"
        "GRPOTrainer('m/x', 'r/m', train_dataset=train, eval_dataset=test)\n"
    )
    (reason,) = [why for key, why in reasons(convert(text)).items() if ".map(" in key]
    assert "write this into `dataset.prompt` too" in reason


def test_a_tokenizer_of_a_function_that_is_not_read_is_named():
    text = (
        "from tools import load\n"
        "GRPOTrainer('m/x', 'r/m', processing_class=load(), train_dataset=load_dataset('d/x'))"
    )
    assert "the settings of `load()`" in reasons(convert(text))["GRPOTrainer.processing_class"]
    loaded = text.replace("load()", "AutoTokenizer.from_pretrained('m/x')")
    assert "GRPOTrainer.processing_class" not in reasons(convert(loaded))
