"""What a Python script changes step by step: of mappings, configs and values that are not known."""

from pathlib import Path

import pytest

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import find
from grpo_cli.errors import RecipeError

IMPORTS = """\
from dataclasses import dataclass
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
"""


def convert(lines, args="GRPOConfig(**D)", more=""):
    trainer = f"t = GRPOTrainer('m/x', 'r/m', {args}, load_dataset('d/x')"
    return translate(f"{IMPORTS}{lines}\n{trainer}{more})\n", Path("train.py"))


def training(report):
    return report.recipe.get("training") or {}


def text_of(report):
    """Everything that is named, as one text."""
    dropped = [f"{each.key}: {each.note}" for each in report.dropped]
    return "\n".join([*report.to_do.values(), *dropped])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("D = {'beta': .2, 'epsilon': .3}\ndel D['beta']", {"epsilon": 0.3}),
        ("D = {'beta': .2}\nD.setdefault('epsilon', .3)", {"beta": 0.2, "epsilon": 0.3}),
        ("D = dict(zip(['beta'], [.2]))", {"beta": 0.2}),
        ("E = {'beta': .2, 'x': 1}\nD = {k: v for k, v in E.items() if k != 'x'}", {"beta": 0.2}),
        ("D = {'beta': 1}\nD.clear()\nD.update([('delta', 1.5)])", {"delta": 1.5}),
        ("D = {'beta': .2}\nfor n in range(3): D['delta'] = 1.5\nD['delta'] = 2.5", {"beta": 0.2, "delta": 2.5}),
    ],
)  # fmt: skip
def test_changes_of_a_known_mapping_are_followed(lines, expected):
    report = convert(lines)
    assert training(report) == expected
    assert "training" not in report.to_do


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("b = 1\nwhile b < 9:\n    b = b * 2\nD = {'beta': b}", "train.py:6 has `b * 2`"),
        ("b = 1\nfor i in range(n):\n    c = b + 1\n    b = c\nD = {'beta': b}", "has `b + 1`"),
    ],
)
def test_a_value_that_a_loop_computes_from_itself_is_not_known(lines, code):
    report = convert(lines)
    assert training(report) == {}
    assert code in report.to_do["training.beta"]
    assert " or " not in report.to_do["training.beta"]


def test_a_value_that_a_loop_sets_anew_is_one_of_two():
    report = convert("b = 1\nfor i in rows():\n    b = 2\nD = {'beta': b}")
    assert "2 in the loop of line 5, or 1" in report.to_do["training.beta"]
    report = convert("D = {'beta': 1}\nfor _ in range(n): D['beta'] *= 2")
    assert "D['beta'] *= 2 in the loop of line 5, or 1" in report.to_do["training.beta"]


@pytest.mark.parametrize(
    ("lines", "expected", "named"),
    [
        ("D = more()\nD['beta'] = .2\nD.update(epsilon=.3)", {"beta": 0.2, "epsilon": 0.3}, ["`more()`"]),
        ("D = more()\nD.pop('beta')", {}, ["`more()`", "train.py:5 has `D.pop('beta')`"]),
        ("D = {'beta': .2, **more()}\nD.setdefault('delta', 1.5)\nD.update(last())\ndel D['epsilon']",
         {},
         ["0.2 unless `more()` or `last()` replaces it", "train.py:5 has `D.setdefault('delta', 1.5)`",
          "train.py:7 has `del"]),
        ("D = {'beta': .2}\nfor k in keys(): D[k] = 1", {"beta": 0.2}, ["train.py:5 has `D[k] = 1`"]),
        ("E = {'beta': .2, 'delta': 1.5}\nD = {k: v for k, v in E.items() if k in known()}", {}, ["0.2", "1.5"]),
    ],
)  # fmt: skip
def test_what_is_set_on_an_unknown_mapping_is_taken_and_the_rest_is_named(lines, expected, named):
    report = convert(lines)
    assert training(report) == expected
    assert [each for each in named if each not in text_of(report)] == []


def test_what_is_set_on_an_unknown_object_is_taken():
    lines = """\
c = get_config()
c.learning_rate = 4e-6
c.max_steps, c.beta = 12, 0.2
setattr(c, "epsilon", 0.44)
vars(c).update(delta=1.5)
l = get_lora()
l.r = 99
"""
    report = convert(lines, "c", ", peft_config=l")
    assert training(report) == {
        "learning_rate": 4e-6,
        "max_steps": 12,
        "beta": 0.2,
        "epsilon": 0.44,
        "delta": 1.5,
    }
    assert find(report.recipe, "model.lora") == {"r": 99}
    assert "get_config()" in report.to_do["training"]
    assert "get_lora()" in report.to_do["model.lora"]


def test_a_method_that_may_change_the_config_is_left_to_do():
    report = convert("c = GRPOConfig('o')\nc.set_training(9e-6).set_evaluate('steps')", "c")
    for code in ("c.set_training(9e-06)", "c.set_training(9e-06).set_evaluate('steps')"):
        assert f"`{code}`; it may change the config" in report.to_do["training"]


@pytest.mark.parametrize("argument", ["GRPOConfig('o', beta=1)", "args=GRPOConfig('o', beta=1)"])
def test_the_config_of_the_trainer_is_the_one_that_it_got(argument):
    names = "model='m/x', reward_funcs='r/m'" if "=G" in argument else "'m/x', 'r/m'"
    lines = f"t = GRPOTrainer({names}, {argument})\nt.args.beta = 0.3\n"
    report = translate(IMPORTS + lines, Path("train.py"))
    assert training(report)["beta"] == 0.3


def test_both_branches_of_a_failed_import_are_named_and_changed():
    lines = (
        "try:\n    import x\n    D = {'optim': 'a'}\nexcept ImportError:\n    D = {'optim': 'b'}\n"
    )
    report = convert(f"{lines}D['beta'] = .2")
    assert training(report) == {"beta": 0.2}
    assert "'a'" in report.to_do["training.optim"]
    assert "'b'" in report.to_do["training.optim"]


def test_the_code_of_a_config_of_the_script_is_read():
    lines = """\
class Base(GRPOConfig):
    def __init__(self, *a, rate=1, **k):
        k["beta"] = 0.5
        super().__init__(*a, learning_rate=rate, **k)
        self.epsilon = 0.35
class C(Base):
    pass
"""
    report = convert(lines, "C('o', rate=2, delta=1.5)")
    assert training(report) == {"beta": 0.5, "learning_rate": 2, "epsilon": 0.35, "delta": 1.5}
    assert "output_dir" in text_of(report)


def test_fields_of_a_dataclass_follow_those_of_its_base():
    lines = """\
@dataclass
class C(GRPOConfig):
    top_p: float = 0.88
    def __post_init__(self):
        super().__post_init__()
        self.max_steps = 21
"""
    report = convert(lines, "C('o', learning_rate=3e-6)")
    assert training(report) == {"learning_rate": 3e-6, "max_steps": 21}
    assert find(report.recipe, "generation.top_p") == 0.88


def test_a_call_under_the_condition_of_the_trainer_is_certain():
    lines = """\
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
def train():
    model = AutoModelForCausalLM.from_pretrained("m/x", dtype=kind())
    model = get_peft_model(model, LoraConfig(r=4))
    if more:
        model = get_peft_model(model, LoraConfig(r=5))
    GRPOTrainer(model, "r/m", train_dataset=load_dataset("d/x"))
if mode() == "train":
    train()
"""
    report = translate(
        IMPORTS + lines.replace("    if more:\n    " + "    model", "#"), Path("train.py")
    )
    assert find(report.recipe, "model.lora.r") == 4
    assert "model.lora" not in report.to_do
    assert "dtype" not in report.recipe["model"]
    report = translate(IMPORTS + lines.replace("LoraConfig(r=4)", "base"), Path("train.py"))
    assert "only if `more`" in report.to_do["model.lora"]


def test_changes_of_rows_and_tokenizers_are_named_one_by_one():
    lines = """\
import pandas as pd
from datasets import Dataset
from transformers import AutoTokenizer
tok = AutoTokenizer.from_pretrained("m/x")
tok.truncation_side, tok.pad_token = "left", "<pad>"
tr, va = split(pd.read_csv("rows.csv"))
tr["prompt"] = "Q: " + tr["prompt"]
tr = tr[tr["hit"] > 1].dropna()
ds = concat([Dataset.from_pandas(tr)])
ds.set_format("torch")
"""
    trainer = "GRPOTrainer('m/x', 'r/m', train_dataset=ds, processing_class=tok)"
    text = text_of(translate(f"{IMPORTS}{lines}{trainer}", Path("train.py")))
    codes = [
        "tok.truncation_side = 'left'",
        "tok.pad_token = '<pad>'",
        "pd.read_csv('rows.csv')",
        "tr['prompt'] = ",
        "tr[tr['hit'] > 1]",
        "….dropna()",
        "ds.set_format('torch')",
    ]
    assert [code for code in codes if code not in text] == []


def test_rows_of_a_mapping_that_a_loop_fills_are_the_trainers():
    lines = "E = {}\nfor n in names(): E[n] = load_dataset('d/' + n)"
    report = convert(lines, "GRPOConfig()", ", eval_dataset=E")
    assert "load_dataset('d/' + n)" in report.to_do["dataset.eval_split"]
    assert "does not reach" not in text_of(report)


def test_only_code_that_was_not_read_is_said_to_be():
    lines = """\
from datasets import load_dataset as ld
def load_dataset(path): return ld(path)
class Boss:
    def __call__(self): return LoraConfig(r=1)
def old(): return LoraConfig(r=2)
def run(): return load_dataset("d/x")
run()
Boss()()
"""
    report = convert(lines, "GRPOConfig()")
    notes = {each.key: each.note for each in report.dropped}
    for code in ("LoraConfig(r=1)", "LoraConfig(r=2)"):
        assert notes[code] == "not read: no way to this code was followed"
    assert not any(key.startswith("load_dataset") for key in notes)


def test_a_key_that_the_script_does_not_have_says_nothing_of_the_version():
    lines = """\
from unsloth import FastLanguageModel
m, t = FastLanguageModel.from_pretrained("m/x", max_seq_length=512, fast_inference=True)
GRPOTrainer(m, "r/m", GRPOConfig(), load_dataset("d/x"))
"""
    report = translate(IMPORTS + lines, Path("train.py"))
    assert find(report.recipe, "generation.vllm.max_model_length") == 512
    assert "training.beta" in report.notes


@pytest.mark.parametrize("origin", ["other.trainers", ".near"])
def test_a_trainer_of_another_package_is_read_if_it_is_asked_for(origin, tmp_path):
    path = tmp_path / "train.py"
    trains = "GRPOTrainer('m/x', 'r/m', GRPOConfig(beta=1), load_dataset('d/x'))"
    lines = f"{IMPORTS}from {origin} import GRPOTrainer\n{trains}\n"
    with pytest.raises(RecipeError, match=r"GRPOTrainer from .*not TRL.*--from trl"):
        translate(lines, path)
    assert training(translate(lines, path, "trl")) == {"beta": 1}
    (tmp_path / "near.py").write_text("import trl\nclass GRPOTrainer(trl.GRPOTrainer): pass\n")
    if origin == ".near":
        assert training(translate(lines, path)) == {"beta": 1}


def test_a_config_of_a_generator_is_read():
    lines = """\
from contextlib import contextmanager
def build(rate):
    yield GRPOConfig('o', learning_rate=rate)
@contextmanager
def scope():
    yield GRPOConfig('o', beta=.3)
with scope() as c:
    c.epsilon = .4
"""
    assert training(convert(lines, "next(build(2e-6))")) == {"learning_rate": 2e-6}
    assert training(convert(lines, "c")) == {"beta": 0.3, "epsilon": 0.4}


@pytest.mark.parametrize("name", ["MyTrainerV2", "custom.RhoGRPOTrainerV14", "StrictTrainer"])
def test_a_class_that_gets_a_config_of_grpo_is_the_trainer(name):
    text = f"import custom\n{name}(model='m/x', args=GRPOConfig(beta=.2), train_dataset=load_dataset('d/x'))"
    report = translate(f"{IMPORTS}{text}\n", Path("train.py"))
    assert (training(report), report.recipe["model"]["path"]) == ({"beta": 0.2}, "m/x")


def test_settings_that_reach_nothing_that_was_read_are_named():
    lines = """\
OLD = {"learning_rate": 9e-6, "label": "a"}
class Log:
    def on_log(self, logs): return {"beta": self.beta, "loss": logs["loss"]}
def other():
    return make(max_steps=7)
"""
    keys = {each.key for each in convert(lines, "GRPOConfig()").dropped}
    assert keys == {"learning_rate = 9e-06", "max_steps = 7"}


def test_results_and_values_of_a_part_are_no_noise():
    lines = """\
from transformers import AutoTokenizer
c = GRPOConfig()
seed_all(c.seed); log(c.output_dir)
tok = AutoTokenizer.from_pretrained("m/x")
tok("text").to("cuda"); look(tok.eos_token)
ds = load_dataset("d/x")
lengths = ds.map(tokens)
ds = ds.map(prompts).select(where(lengths["n"] < quantile(lengths["n"]))[0])
ds[0]
t = GRPOTrainer('m/x', 'r/m', c, ds, processing_class=tok)
m = t.train().metrics
m["rows"] = len(ds); t.log_metrics("train", m); m.get("loss")
"""
    report = translate(IMPORTS + lines, Path("train.py"))
    assert {each.key for each in report.dropped} == {
        "tok('text')",
        "ds.map(tokens)",
        "t.log_metrics('train', m)",
    }
    assert {*report.to_do} == {"dataset.prompt", "dataset.limit"}
    assert "ds.map(prompts)" in report.to_do["dataset.prompt"]
    assert "lengths" not in report.to_do["dataset.prompt"]
    assert "split" not in report.recipe["dataset"]


def test_a_change_of_rows_is_named_once_however_often_it_is_called():
    lines = """\
def rows(split):
    data = load_dataset("d/x", split=split)
    return data.map(lambda row: {"prompt": row["q"]})
for split in ("a", "b"):
    rows(split)
"""
    trainer = "GRPOTrainer('m/x', 'r/m', train_dataset=rows('a'), eval_dataset=rows('b'))"
    report = translate(f"{IMPORTS}{lines}{trainer}\n", Path("train.py"))
    assert text_of(report).count("data.map(") == 1
