"""What scripts in public repositories do, and earlier conversions lost or reported wrongly."""

from pathlib import Path

import pytest

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import find
from tests.unit.convert.readings import reasons

TRAINER = "GRPOTrainer('m/x', 'r/m', args=GRPOConfig(), train_dataset=load_dataset('d/x'){more})"


PLAIN = TRAINER.format(more="")


def convert(lines, trainer=PLAIN):
    return translate(f"{lines}\nt = {trainer}\n", Path("train.py"))


@pytest.mark.parametrize(
    "body",
    [
        f"    t = {PLAIN}\n    break",
        f"    try:\n        t = {PLAIN}\n        break\n    except TypeError:\n        continue",
        f"    if i:\n        t = {PLAIN}\n        break",
        f"    try:\n        t = {PLAIN}\n    except E:\n        t = None\n        continue\n    t.args.beta = 0.5",
    ],
)
def test_what_a_loop_makes_before_it_ends_is_followed(body):
    text = (
        f"t = None\nfor i in range(2):\n{body}\nt.add_callback(None)\nt.args.learning_rate = 9e-5\n"
    )
    report = translate(text, Path("train.py"))
    assert "callbacks" in reasons(report)["t.add_callback(None)"]
    assert find(report.recipe, "training.learning_rate") == 9e-5
    assert find(report.recipe, "training.beta") == (0.5 if "beta" in body else None)


def test_what_the_branches_of_a_model_share_is_taken():
    load = "AutoModelForCausalLM.from_pretrained('m/x', trust_remote_code=True"
    text = (
        "from transformers import AutoModelForCausalLM\n"
        f"if fast():\n    base = {load}, attn_implementation='sdpa', device_map='auto')\n"
        f"else:\n    base = {load}, quantization_config=BitsAndBytesConfig(load_in_4bit=True))\n"
        "m = get_peft_model(base, LoraConfig(r=8, lora_alpha=99))"
    )
    report = convert(text, PLAIN.replace("'m/x'", "m"))
    model = report.recipe["model"]
    assert (model["path"], model["trust_remote_code"], model["lora"]["r"]) == ("m/x", True, 8)
    assert report.to_do.keys() == {"model.attn_implementation", "model.quantization"}
    assert "not set if `not fast()`" in report.to_do["model.attn_implementation"]
    assert reasons(report) == {"from_pretrained.device_map": "the launcher places the model"}


def test_models_of_different_branches_are_named():
    load = "AutoModelForCausalLM.from_pretrained"
    text = f"m = {load}('a/b') if fast() else {load}('c/d', attn_implementation='sdpa')"
    report = convert(text, PLAIN.replace("'m/x'", "m"))
    assert "'a/b' if `fast()`, or 'c/d'" in report.to_do["model.path"]
    assert "model.attn_implementation" in report.to_do


def test_flags_that_no_setting_reads_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\n"
        "for_ = [p.add_argument('--gamma', type=float), p.add_argument('--entity')]\n"
        "p.add_argument('--learning-rate', type=float)\n"
        "a = p.parse_args()\ndef r(completions, **kw):\n    return [a.gamma]\n"
        "rate = a.learning_rate * 2\n"
        + PLAIN.replace("'r/m'", "r").replace("()", "(learning_rate=rate)", 1),
        encoding="utf-8",
    )
    text = "python train.py --gamma 1.0 --entity me --learning-rate 0.5\n"
    report = translate(text, Path("run.sh"))
    assert find(report.recipe, "training.learning_rate") == 1.0
    assert reasons(report)["--gamma 1.0"].startswith("the script reads it")
    assert reasons(report)["--entity me"].startswith("the script reads it")
    assert not any("learning" in key for key in reasons(report))


def test_every_mapping_of_the_trainer_is_named():
    text = "for a in x():\n    for b in y():\n        pass"
    to_do = convert(text, TRAINER.format(more=", **a, **b")).to_do["model"]
    assert "`a`" in to_do
    assert "`b`" in to_do


def test_arguments_of_the_chat_template_are_settings():
    text = (
        "def build(row, tok):\n"
        "    return tok.apply_chat_template(row['m'], tokenize=False, enable_thinking=False, effort=E)\n"
        "def change(row):\n    return {'prompt': build(row, tok)}\n"
    )
    trainer = PLAIN.replace("('d/x')", "('d/x').map(change)")
    report = convert(text, trainer)
    assert report.recipe["generation"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "generation.chat_template_kwargs.effort" in report.to_do


def test_settings_of_generation_config_are_named():
    report = translate(f"t = {PLAIN}\nt.generation_config.temperature = 0.7\n", Path("train.py"))
    note = reasons(report)["t.generation_config.temperature = 0.7"]
    assert note == "set it in `generation`"


def test_swift_reads_a_file_its_environment_and_held_out_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(
        "rlhf_type: grpo\nmodel: m/x\ndataset: a.jsonl\nval_dataset: b.jsonl\nsave_steps: 7\n"
        "max_steps: 9\nnum_train_epochs: 5\nreward_funcs: [format]\nENV: {NPROC_PER_NODE: 4}\n",
        encoding="utf-8",
    )
    recipe = translate("swift rlhf c.yaml\n", Path("run.sh")).recipe
    assert recipe["dataset"]["eval"] == "b.jsonl"
    assert recipe["launch"] == {"num_processes": 4}
    training, generation = recipe["training"], recipe["generation"]
    assert (training["eval_strategy"], training["eval_steps"]) == ("steps", 7)
    assert training["gradient_accumulation_steps"] == 1
    assert "num_train_epochs" not in training
    assert (generation["top_k"], generation["top_p"]) == (50, 0.9)
    text = 'swift rlhf --rlhf_type grpo --model m/x --dataset "$D" --system "Be terse."\n'
    report = translate(text, Path("run.sh"))
    assert find(report.recipe, "dataset.prompt.system") == "Be terse."
    assert not reasons(report)


def test_statements_about_what_is_not_taken_are_true():
    trainer = PLAIN.replace("('d/x')", "('json', data_files='x.jsonl')")
    assert reasons(convert("", trainer)) == {}
    text = (
        "from transformers import AutoTokenizer, AutoModelForSequenceClassification\n"
        "k = AutoTokenizer.from_pretrained('org/reward')\n"
        "w = AutoModelForSequenceClassification.from_pretrained('org/reward')\nw.eval()"
    )
    assert {*reasons(convert(text)).values()} == {
        "not known to reach the GRPOTrainer that is converted"
    }
    text = "b = 0.1\nif x == 1:\n    b = 0.2\nelif x == 2:\n    b = 0.3"
    to_do = convert(text, PLAIN.replace("fig()", "fig(beta=b)")).to_do
    assert "0.3 if `not (x == 1) and x == 2`" in to_do["training.beta"]
    more = ", environment_factory=Env"
    to_do = convert("from my_env import Env, build", TRAINER.format(more=more)).to_do
    assert 'path: "my_env:Env"' in to_do["environment"]
