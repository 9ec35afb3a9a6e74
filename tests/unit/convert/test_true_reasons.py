"""What the report says of a key that is not taken is true of its value, and of the code that was read."""

import json
from pathlib import Path

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import find
from tests.unit.convert.readings import reasons

ROWS = "load_dataset('d/x', split='train')"
CALL = f"GRPOTrainer('m/x', 'r/m', args=GRPOConfig(), train_dataset={ROWS})"
TOKENIZER = "from transformers import AutoTokenizer\nname = pick()\n"


def convert(lines, trainer=CALL):
    return translate(f"from trl import GRPOTrainer\n{lines}\nt = {trainer}\n", Path("train.py"))


def test_a_switch_that_is_off_has_no_advice_for_one_that_is_on():
    made = "m, k = FastLanguageModel.from_pretrained('a/b', load_in_4bit=False, full_finetuning={})"
    trainer = CALL.replace("'m/x'", "m")
    notes = [reasons(convert(made.format(each), trainer)) for each in ("False", "True")]
    assert [each["from_pretrained.full_finetuning"].partition(",")[0] for each in notes] == [
        "off",
        "leave out `model.lora`",
    ]
    text = "swift rlhf --rlhf_type grpo --model m/x --dataset d/x --async_generate false\n"
    assert reasons(translate(text, Path("run.sh")))["async_generate"].startswith("off")


def test_empty_names_are_left_to_do():
    empty = "P = ''\nrows = load_dataset('csv', data_files=P)"
    report = convert(empty, "GRPOTrainer(P, 'r/m', args=GRPOConfig(), train_dataset=rows)")
    assert report.to_do.keys() == {"model.path", "dataset"}


def test_tokenizers_are_told_apart():
    load = "AutoTokenizer.from_pretrained"
    report = convert(
        f"{TOKENIZER}own = {load}(name)\njudge = {load}(other())", CALL.replace("'m/x'", "name")
    )
    notes = reasons(report)
    assert notes[f"{load}(name)"] == "the tokenizer is that of `model.path`"
    assert notes[f"{load}(other())"] == "not known to reach the GRPOTrainer that is converted"


def test_a_setting_that_is_replaced_and_an_empty_list_are_the_trainers():
    lines = "args = GRPOConfig(beta=0.1)\nargs.beta = 0.2"
    report = convert(
        lines, CALL.replace("GRPOConfig()", "args").replace(", train", ", callbacks=[], train")
    )
    assert find(report.recipe, "training.beta") == 0.2
    assert reasons(report) == {"GRPOConfig.beta": "line 3 sets it to another value"}


def test_nothing_is_claimed_about_a_trainer_whose_base_was_not_read():
    report = translate(
        "from base import MyGRPOTrainer\nclass T(MyGRPOTrainer): pass\nT().train()", Path("a.py")
    )
    assert "in another file" in report.to_do["training"]
    assert not report.notes
    assert "generation" not in report.recipe


def test_a_condition_is_named_with_the_value_that_it_has_by_default():
    report = convert(
        "p = argparse.ArgumentParser()\np.add_argument('--lora', action='store_true')\na = p.parse_args()\n"
        "c = LoraConfig(r=4) if a.lora else None",
        CALL.replace(", train", ", peft_config=c, train"),
    )
    assert "`a.lora`, which is False unless `--lora` is given" in report.to_do["model.lora"]


def test_the_share_of_rows_is_named_with_its_value():
    rows = f"rows = {ROWS}.train_test_split(train_size=0.8, seed=1)"
    report = convert(rows, CALL.replace(ROWS, "rows['train'], eval_dataset=rows['test']"))
    assert (
        find(report.recipe, "dataset.eval_fraction"),
        find(report.recipe, "dataset.eval_seed"),
    ) == (0.2, 1)
    report = convert(rows, CALL.replace(ROWS, "rows['train']"))
    assert "left out of training, 0.2" in report.to_do["dataset.eval_fraction"]


def test_a_script_of_its_own_is_read_though_it_is_named_as_trls(tmp_path):
    script = tmp_path / "trl" / "scripts" / "grpo.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        f"from trl import GRPOTrainer\nargs = GRPOConfig(beta=0.6)\n{CALL.replace('GRPOConfig()', 'args')}"
    )
    report = translate("accelerate launch trl/scripts/grpo.py --beta 0.1\n", tmp_path / "run.sh")
    assert find(report.recipe, "training.beta") == 0.6
    assert reasons(report)["--beta"] == "the script has no such argument"
    report = translate("python grpo_run.py --level 3\n", tmp_path / "run.sh")
    assert reasons(report)["level"] == "an argument of `grpo_run.py`"


def test_variables_and_pixels_have_a_home():
    text = "import os\nos.environ['WANDB_PROJECT'] = 'p'"
    assert (
        "environment of `grpo train`" in reasons(convert(text))["os.environ['WANDB_PROJECT'] = 'p'"]
    )
    text = "MAX_PIXELS=99 swift rlhf --rlhf_type grpo --model m/x --dataset d/x\n"
    assert find(translate(text, Path("run.sh")).recipe, "model.processor.max_pixels") == 99


def test_the_mode_of_vllm_is_kept_if_the_backend_is_left_to_do():
    report = convert(
        "", CALL.replace("GRPOConfig()", "GRPOConfig(use_vllm=fast(), vllm_mode='server')")
    )
    assert find(report.recipe, "generation.vllm.mode") == "server"


def test_what_changes_the_tokenizer_is_named():
    lines = (
        "from transformers import AutoTokenizer\nfrom mine import load, add_template\n"
        "k = add_template(AutoTokenizer.from_pretrained('m/x'))\nm, other = load()\nother.pad_token = 'x'"
    )
    report = convert(
        lines, CALL.replace("'m/x'", "m").replace(", train", ", processing_class=k, train")
    )
    notes = reasons(report)
    assert "tokenizer is not read" in notes["add_template(AutoTokenizer.from_pretrained('m/x'))"]
    assert notes["other.pad_token = 'x'"] == "training pads batches itself"


def test_lines_of_a_notebook_are_those_of_its_cells():
    loop = "b = 1\nfor i in rows():\n    b = 2\n"
    cells = ["a = 1", f"{loop}t = {CALL.replace('fig()', 'fig(beta=b)')}"]
    text = json.dumps({"cells": [{"cell_type": "code", "source": each} for each in cells]})
    assert "in the loop of code cell 2:2" in str(translate(text, Path("a.ipynb")).to_do)


def test_unsloths_vllm_runs_in_the_training():
    made = "m, k = FastLanguageModel.from_pretrained('a/b', fast_inference=True)"
    report = convert(made, CALL.replace("'m/x'", "m"))
    assert find(report.recipe, "generation.vllm.mode") == "colocate"
    assert "generation.vllm.mode" not in report.notes
