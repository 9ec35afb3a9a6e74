"""Values that a script gets from its command line, its environment, its dataclasses and its loops."""

from pathlib import Path

import pytest

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import find
from tests.unit.convert.readings import reasons

HEAD = (
    "import os\nfrom trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser\n"
)
MAKE = "GRPOTrainer('m/x', 'r/m', args=args, train_dataset=load_dataset('d/x', split='train'))\n"


def convert(body):
    return translate(f"{HEAD}{body}\n{MAKE}", Path("train.py"))


def start(folder, body, command):
    """Converts a shell script that starts a script."""
    (folder / "train.py").write_text(f"{HEAD}{body}\n", encoding="utf-8")
    return translate(command, folder / "run.sh")


def test_variables_that_a_shell_script_exports_are_those_that_its_script_reads(tmp_path):
    body = (
        "args = GRPOConfig(beta=float(os.environ['B']), max_steps=int(os.getenv('STEPS', '5')),\n"
        "    top_p=float(os.environ.get('P', 0.9)), run_name=os.environ.get('RUN'))"
    )
    report = start(
        tmp_path,
        f"{body}\n{MAKE}",
        "export B=0.3 OTHER=1\nexport RUN=$1\nSTEPS=7 python train.py --x 1\n",
    )
    assert report.recipe["training"] == {"beta": 0.3, "max_steps": 7}
    assert "which is 0.9 unless" in report.to_do["generation.top_p"]
    assert report.to_do["logging.run_name"].endswith("write its value")
    assert {"B", "STEPS", "OTHER", "RUN"} & reasons(report).keys() == {"OTHER", "RUN"}


def test_the_beginning_of_an_argument_stands_for_it(tmp_path):
    body = (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--beta-start', default=0.1)\n"
        "p.add_argument('--top-p', default=0.9)\np.add_argument('--top-k', default=4)\n"
        "a = p.parse_args()\nargs = GRPOConfig(beta=a.beta_start, top_p=a.top_p, top_k=a.top_k)"
    )
    report = start(tmp_path, f"{body}\n{MAKE}", "python train.py --beta 0.7 --top 3\n")
    assert find(report.recipe, "training.beta") == 0.7
    assert find(report.recipe, "generation.top_p") == 0.9
    assert reasons(report)["--top"] == "the script has no such argument"


PARSER = (
    "def build():\n    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n"
    "    parser.add_argument('--level', default='low')\n    return parser\n"
    "script, args, model, more = build().parse_args_and_config()\n"
    "def low(completions, **_): return [0]\ndef high(completions, **_): return [1]\n"
    "chosen = []\nfor name in script.names.split(',') if model.use_peft else ['low', 'high']:\n"
    "    if name == more.level:\n        chosen.append({'low': low, 'high': high}[name])\n"
    "kind = model.dtype if model.dtype in ['auto', None] else getattr(torch, model.dtype)\n"
    "args.model_init_kwargs = dict(revision=model.model_revision, dtype=kind)\n"
    "t = GRPOTrainer(model.model_name_or_path, chosen, args, load_dataset('d/x', script.dataset_config)"
    "[script.dataset_train_split], peft_config=get_peft_config(model))"
)


def test_arguments_that_a_command_line_leaves_out_have_trls_defaults(tmp_path):
    report = start(
        tmp_path,
        PARSER,
        "python train.py --model_name_or_path m/y --level high --torch_dtype bfloat16 --beta 0.2\n",
    )
    model = report.recipe["model"]
    assert (model["path"], model["revision"], "lora" in model) == ("m/y", "main", False)
    assert [each["path"].rpartition(":")[2] for each in report.recipe["rewards"]] == ["high"]
    assert report.recipe["dataset"]["split"] == "train"
    assert not {"level", "model.revision", "model.lora", "dataset.name"} & {
        *reasons(report),
        *report.to_do,
    }


def test_defaults_of_the_dataclass_that_a_function_gets_are_told():
    report = convert(
        "@dataclass\nclass Sampling:\n    temperature: float = 0.7\n"
        "@dataclass\nclass Config:\n    beta: float = 0.3\n"
        "    sampling: Sampling = field(default_factory=Sampling)\n"
        "@hydra.main()\ndef main(cfg: Config):\n    global args\n"
        "    values = OmegaConf.to_container(cfg)\n    values.update(values.pop('sampling'))\n"
        "    args = GRPOConfig(**values)\nfrom omegaconf import OmegaConf\nmain()"
    )
    for key, value in (("training.beta", 0.3), ("generation.temperature", 0.7)):
        assert f"which is {value} unless `cfg` replaces it" in report.to_do[key]


@pytest.mark.parametrize(
    "loop",
    [
        "for name, value in {'beta': 0.3, 'max_steps': 7}.items(): setattr(args, name, value)",
        "for name, value in {'beta': 0.3, 'max_steps': 7}.items():\n"
        "    if hasattr(args, name): setattr(args, name, value)",
        "names = {f.name for f in fields(GRPOConfig)}\n"
        "raw = {'beta': 0.3, 'max_steps': 7}\nargs = GRPOConfig(**{k: v for k, v in raw.items() if k in names})",
        "names = inspect.signature(GRPOConfig).parameters\nraw = {'beta': 0.3}\nraw['max_steps'] = 7\n"
        "args = GRPOConfig(**{k: raw[k] for k in raw if k in names})",
    ],
)
def test_known_items_of_a_loop_are_settings_of_the_config(loop):
    report = convert(f"from dataclasses import fields\nargs = GRPOConfig()\n{loop}")
    assert report.recipe["training"] == {"beta": 0.3, "max_steps": 7}


def test_a_name_that_a_loop_gives_several_values_is_named_with_all_of_them():
    text = (
        f"{HEAD}for beta, rate in [(0.1, 1e-5), (0.2, 2e-5)]:\n    args = GRPOConfig(beta=beta)\n"
    )
    report = translate(f"{text}    args.learning_rate = rate\n    {MAKE}", Path("train.py"))
    assert "0.1, or 0.2" in report.to_do["training.beta"]
    assert "1e-05" in report.to_do["training.learning_rate"]
    assert "2e-05" in report.to_do["training.learning_rate"]


def test_values_that_double_in_a_loop_are_not_computed():
    body = "s, n = 'a', 2\nfor i in range(60):\n    s, n = s + s, n * n\n"
    report = convert(f"{body}args = GRPOConfig(run_name=s, max_steps=n, beta=0.1)")
    assert report.recipe["training"] == {"beta": 0.1}
    assert report.to_do.keys() >= {"logging.run_name", "training.max_steps"}
