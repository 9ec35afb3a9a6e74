"""Shell scripts, notebooks and ms-swift: what is read of each, and what is said of other files."""

import json
import re
from pathlib import Path

import pytest

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import find, read_keys
from grpo_cli.errors import RecipeError
from tests.unit.convert.readings import reasons

SWIFT = """\
#!/bin/bash
set -euo pipefail
echo "which: $(which python)"
export NPROC_PER_NODE=4 PYTHONPATH=$PYTHONPATH:src
MODEL="org/base"
SYSTEM='Think first.
Then answer.'
CUDA_VISIBLE_DEVICES=0,1 \\
swift rlhf \\
    --rlhf_type grpo \\
    --model $MODEL \\
    --train_type lora --lora_rank 16 \\
    --dataset 'org/rows:hard#500' \\
    --reward_funcs accuracy format cosine mine \\
    --reward_weights 1 0.5 0.2 2 \\
    --external_plugins plugin.py \\
    --cosine_max_len 900 \\
    --system "$SYSTEM" \\
    --split_dataset_ratio 0.1 \\
    --learning_rate $1 \\
    # --beta 0.1
    --deepspeed zero2 --use_vllm true --vllm_mode colocate --top_k 50
"""


def convert(text, name, folder=Path()):
    return translate(text, folder / name)


def test_swift_in_a_shell_script_is_read_with_its_variables_and_defaults():
    report = convert(SWIFT, "run.sh")
    assert report.dialect == "ms-swift"
    recipe = report.recipe
    assert recipe["model"]["path"] == "org/base"
    assert recipe["model"]["lora"]["r"] == 16
    assert recipe["dataset"]["path"] == "org/rows"
    assert (recipe["dataset"]["name"], recipe["dataset"]["limit"]) == ("hard", 500)
    assert recipe["dataset"]["prompt"]["system"] == "Think first.\nThen answer."
    assert recipe["dataset"]["eval_fraction"] == 0.1
    assert [(each["kind"], each["weight"]) for each in recipe["rewards"]] == [
        ("math", 1),
        ("regex", 0.5),
        ("cosine_length", 0.2),
    ]
    assert recipe["rewards"][2]["max_length"] == 900
    assert recipe["launch"] == {"num_processes": 4, "strategy": "zero2"}
    assert recipe["generation"]["backend"] == "vllm"
    assert (recipe["training"]["beta"], recipe["generation"]["temperature"]) == (0.04, 0.9)
    assert report.to_do["training.learning_rate"].startswith(
        "line 20 of run.sh has `--learning_rate $1`"
    )
    assert "learning_rate" not in recipe["training"]
    assert "mine" in report.to_do["rewards.3"]
    assert set(reasons(report)) == {
        "CUDA_VISIBLE_DEVICES",
        "PYTHONPATH",
        "external_plugins",
        "reward_funcs.3",
        "# --beta 0.1",
    }
    assert set(report.to_do) == {"dataset.prompt", "training.learning_rate", "rewards.3"}


def test_each_flag_of_a_shell_script_has_its_own_line():
    text = "true &&\\\n" + SWIFT[SWIFT.index("CUDA") :]
    text = text.replace("--train_type lora --lora_rank 16", "--train_type full --freeze_vit true")
    report = convert(
        f"export PYTHONPATH=src\n# one\n{text.rstrip()} --odd '\n' --strange 1\n", "run.sh"
    )
    lines = text.split("\n")
    for key in ("CUDA_VISIBLE_DEVICES", "external_plugins", "freeze_vit", "reward_funcs.3"):
        (entry,) = [each for each in report.dropped if each.key == key]
        assert key.partition(".")[0] in lines[entry.location.line - 3]
    places = {entry.key: entry.location.line for entry in report.dropped}
    assert (places["PYTHONPATH"], places["odd"] - places["freeze_vit"]) == (1, 10)
    assert places["strange"] == places["odd"] + 1
    assert reasons(report)["freeze_vit"].startswith("recipes train all weights, or with LoRA")


ARRAYS = """\
EXTRA="--beta 0.1 --temperature 0.7"
declare -a ARGS=(
  --model_name_or_path "org/base (v2)"   # the base (of all)
  --dataset_name org/rows
)
ARGS+=(--learning_rate 3e-6)
trl grpo "${ARGS[@]}" $EXTRA --reward_funcs accuracy_reward --max_steps $STEPS
"""


def test_arrays_and_variables_of_a_shell_script_are_the_flags_that_they_hold():
    report = convert(ARRAYS, "run.sh")
    recipe = report.recipe
    assert (recipe["model"]["path"], recipe["dataset"]["path"]) == ("org/base (v2)", "org/rows")
    assert recipe["training"]["learning_rate"] == 3e-6
    assert (recipe["training"]["beta"], recipe["generation"]["temperature"]) == (0.1, 0.7)
    assert "learning_rate" not in report.to_do
    assert set(report.to_do) == {"training.max_steps"}
    assert recipe["generation"]["backend"] == "transformers"


@pytest.mark.parametrize("unknown", ["$EXTRA", '"$@"', '"${MORE[@]}"'])
@pytest.mark.parametrize("command", ["trl grpo", "accelerate launch train.py"])
def test_what_a_script_does_not_set_may_be_any_flag(command, unknown, tmp_path):
    report = convert(f"{command} --beta 0.1 {unknown}\n", "run.sh")
    assert report.recipe["training"]["beta"] == 0.1
    assert "line 1 of run.sh passes" in report.to_do["training"]
    # It may hold `--use_vllm`.
    assert "backend" not in report.recipe.get("generation", {})


SHELL = "trl grpo --model_name_or_path m/m --dataset_name x/y --reward_funcs accuracy_reward"


@pytest.mark.parametrize(
    ("script", "training"),
    [
        ('F="--max_steps 5"; TRAIN $F', {"max_steps": 5}),
        (
            'F=(--max_steps 5) G=(--beta 0.1)\nTRAIN "${F[@]}" ${G[@]}',
            {"max_steps": 5, "beta": 0.1},
        ),
        ('go() { TRAIN "$@"; }\ngo --max_steps 5', {"max_steps": 5}),
        (
            "function go {\n TRAIN --max_steps $1 --beta ${2:-0.1}\n}\ngo 7",
            {"max_steps": 7, "beta": 0.1},
        ),
        (
            "f() { local -r n=5; readonly B=0.6; TRAIN --max_steps $n --beta $B; }\nf",
            {"max_steps": 5, "beta": 0.6},
        ),
        ('main() {\n run --beta 0.1\n}\nrun() { TRAIN $@; }\nmain "$@"', {"beta": 0.1}),
        ('cmd=(TRAIN)\necho "${cmd[@]}"\nexec "${cmd[@]}"', {}),
        ('cat > x <<EOF\nTRAIN --beta "1\nEOF\nTRAIN --beta 0.2', {"beta": 0.2}),
        ('C="TRAIN"\n$C --max_steps 4', {"max_steps": 4}),
        ('eval "TRAIN --beta 0.1"', {"beta": 0.1}),
        ("B=0.1\nsrun -n 1 bash -c 'TRAIN --beta $B' 2>&1 | tee log", {"beta": 0.1}),
        (
            ': "${N:=3}"\nTRAIN --max_steps $N --beta ${B:=0.1} >log &',
            {"max_steps": 3, "beta": 0.1},
        ),
        ("N=4\nTRAIN --run_name 'a $N' --max_steps $N # $X", {"max_steps": 4}),
        ("if [ $1 ]; then N=5; TRAIN --max_steps $N; else N=6; fi", {"max_steps": 5}),
        ('cd x && F="--beta 0.1" && TRAIN $F', {"beta": 0.1}),
        ('set -- --beta 0.1 x\nTRAIN $1 "$2"', {"beta": 0.1}),
        ('set -- a --beta 0.1\nshift\nTRAIN "$@"', {"beta": 0.1}),
        ("[[ $X =~ ^(a|b)$ ]] && Y=1\nTRAIN --beta 0.1 ${Z-}", {"beta": 0.1}),
    ],
)
def test_a_shell_script_is_read_as_bash_runs_it(script, training):
    report = convert(script.replace("TRAIN", SHELL), "run.sh")
    assert report.recipe.get("training", {}) == training
    assert [reward["kind"] for reward in report.recipe["rewards"]] == ["math"]
    assert report.recipe.get("logging", {}).get("run_name", "a $N") == "a $N"
    assert (report.to_do, set(reasons(report))) == ({}, set())


@pytest.mark.parametrize(
    ("script", "training", "places"),
    [
        (
            'F="--beta 1"\nif [ $X ]; then F="$F --max_steps 5"; fi\nTRAIN $F',
            {"beta": 1},
            {"": [2]},
        ),
        ('[ -n "$X" ] && F+=(--max_steps 5)\nTRAIN "${F[@]}" --beta 1', {"beta": 1}, {"": [1]}),
        (
            "case $1 in\n a|b) F+=(--beta 5);;\n (*) F+=(--beta 6)\nesac\nTRAIN ${F[@]}",
            {},
            {"": [2, 3]},
        ),
        ('for k in a b; do F+=(--$k v); done\nTRAIN "${F[@]}"', {}, {"": [1]}),
        (
            'F="--beta 1"\nwhile read l; do F+=" --top_k $l"; done < f\nTRAIN $F',
            {"beta": 1},
            {"": [2]},
        ),
        ('if a\nthen\n F+=(--beta 5)\nelse\n F+=(--beta 6)\nfi\nTRAIN "${F[@]}"', {}, {"": [3, 5]}),
        (
            'add() { F+=("$@"); }\nadd --beta 1\n[ $X ] && add --max_steps 5\nTRAIN ${F[@]}',
            {"beta": 1},
            {"": [3]},
        ),
        ("N=5\nfor N in 1 2; do\nTRAIN --max_steps $N\ndone", {}, {"max_steps": [3, 2]}),
        ('N=5\n[ "$BIG" ] || N=50\nTRAIN --max_steps $N', {"max_steps": 5}, {"max_steps": [2]}),
        (
            "N=5\nif a; then N=6; fi\nM=$N\nTRAIN --max_steps $M",
            {"max_steps": 5},
            {"max_steps": [2]},
        ),
        ("if a; then N=6; fi\nTRAIN --max_steps ${N:-5}", {"max_steps": 5}, {"max_steps": [1]}),
        ("N=5\n((N++))\nTRAIN --max_steps $N", {}, {"max_steps": [3]}),
        ("TRAIN --beta $(cat b.txt) --max_steps 3", {"max_steps": 3}, {"beta": [1]}),
        ("TRAIN ${N:+--beta $N} --max_steps 3", {"max_steps": 3}, {"": [1]}),
        (
            "while [ $# -gt 0 ]; do\n case $1 in\n --n) N=$2; shift 2;;\n esac\ndone\nTRAIN --max_steps ${N:-4}",
            {"max_steps": 4},
            {"max_steps": [3]},
        ),
        ("$LAUNCHER train.py --beta 0.1", {"beta": 0.1}, {"": [1]}),
    ],
)
def test_what_a_shell_script_sets_under_conditions_is_named_with_its_line(script, training, places):
    report = convert(script.replace("TRAIN", SHELL), "run.sh")
    assert report.recipe.get("training", {}) == training
    for flag, lines in places.items():
        text = report.to_do[f"training.{flag}".rstrip(".")]
        assert re.findall(r"line (\d+) of run.sh", text) == [str(line) for line in lines]
        assert bool(re.search(r"flags|passes", text)) is (flag == "")
    assert set(report.to_do) - {"model.path", "dataset", "rewards", "dataset.prompt"} == {
        f"training.{flag}".rstrip(".") for flag in places
    }


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("N=5\nf() { local N\nN=6\n}\nf\nTRAIN --max_steps $N", 5),
        ("N=5\nf() { local N=6; g; }\ng() { M=$N; }\nf\nTRAIN --max_steps $M", 6),
        ("N=5\nf() { declare -g N=6; }\nf\nTRAIN --max_steps $N", 6),
        ("N=5\n(N=6; exit 1)\nTRAIN --max_steps $N", 5),
        ("N=5\n(\nN=6\nTRAIN --max_steps $N\n)", 6),
        ("N=5\ncat x | while read l; do N=$l; done\nTRAIN --max_steps $N | tee log", 5),
        ("N=5\nN=6 | cat\n{ N=7; } &\nTRAIN --max_steps $N &", 5),
        ("f() { N=6; return 0; N=5; }\nf\nTRAIN --max_steps $N", 6),
        ("N=5\nif a; then N=7; exit 1; fi\nTRAIN --max_steps $N; exit\nN=6", 5),
        ("usage() { N=9; exit 1; }\nN=5\n[ $X ] || usage\nTRAIN --max_steps $N", 5),
        (". ./env.sh\nTRAIN --max_steps $N", 8),
        ('source "$(dirname "$0")/env.sh"\nTRAIN --max_steps ${N:-5}', 8),
        ('[[ -z "$k" || "$k" =~ ^# ]] && M=6\nN=5\nTRAIN --max_steps $N', 5),
    ],
)
def test_an_assignment_ends_with_its_function_or_process(script, steps, tmp_path):
    (tmp_path / "env.sh").write_text("# steps\nN=8\n")
    report = convert(script.replace("TRAIN", SHELL), "run.sh", tmp_path)
    assert report.recipe["training"] == {"max_steps": steps}
    assert (report.to_do, reasons(report)) == ({}, {})


@pytest.mark.parametrize(
    ("script", "lines", "steps"),
    [
        (
            "f() { if [ $1 ]; then\nN=6\nreturn; fi\nN=5; }\nf\nTRAIN --max_steps $N",
            [6, 2, 4],
            None,
        ),
        ("N=5\n. ./gone.sh\nTRAIN --max_steps $N", [2], 5),
        ("source gone.sh\nTRAIN --max_steps ${N:-5}", [1], 5),
        ("source gone.sh\nTRAIN --max_steps $N", [2, 1], None),
    ],
)
def test_what_may_have_set_a_variable_is_named(script, lines, steps, tmp_path):
    report = convert(script.replace("TRAIN", SHELL), "run.sh", tmp_path)
    assert report.recipe.get("training", {}).get("max_steps") == steps
    text = report.to_do["training.max_steps"]
    assert re.findall(r"line (\d+) of run.sh", text) == [str(line) for line in lines]
    assert all("gone.sh" in name for name in reasons(report))


@pytest.mark.parametrize(
    ("command", "launch", "names"),
    [
        ("torchrun --nproc-per-node 8 --rdzv_backend c10d -m trl grpo", 8, ["--rdzv_backend c10d"]),
        (
            "torchrun --standalone --nnodes=2 --nproc_per_node=4 -m trl.scripts.grpo",
            8,
            ["--standalone"],
        ),
        ("accelerate launch --debug -m trl.scripts.grpo", None, ["--debug"]),
        ("nohup python -u -m trl.scripts.grpo", None, []),
        (
            "accelerate launch --multi_gpu --num_processes 2 --gradient_accumulation_steps 4 -m trl grpo",
            2,
            ["--multi_gpu", "--gradient_accumulation_steps 4"],
        ),
        ("uv run accelerate launch --num_processes 2 x/trl/scripts/grpo.py", 2, []),
        ("torchrun --nproc_per_node gpu -m trl grpo", None, ["--nproc_per_node gpu"]),
        ("python -m torch.distributed.run --nproc_per_node=2 -m trl.scripts.grpo", 2, []),
        ("$PY -m vllm.entrypoints.api --model m &\npython -m src.my_grpo", None, []),
    ],
)
def test_flags_of_launchers_are_not_those_of_the_training(command, launch, names):
    report = convert(f"{command} --max_steps 5\n", "run.sh")
    assert report.recipe["training"] == {"max_steps": 5}
    assert report.recipe.get("launch", {}).get("num_processes") == launch
    assert [*reasons(report)] == names


def test_a_launcher_on_machines_whose_number_is_not_known_is_left_to_the_user():
    report = convert("torchrun --nproc_per_node 8 --nnodes $N -m trl grpo --beta 0.1", "run.sh")
    assert "8 on each of $N machines" in report.to_do["launch.num_processes"]
    assert report.to_do["launch.num_machines"].startswith("line 1 of run.sh")


def test_switches_of_launchers_are_those_of_their_parsers():
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    actions = [*launch_command_parser()._actions, *get_args_parser()._actions]
    names = {
        option.lstrip("-").replace("-", "_"): action.nargs == 0
        for action in actions
        for option in action.option_strings
    }
    switches = read_keys("launchers")["switches"].split()
    known = {name for name, is_switch in names.items() if is_switch} - {"h", "help"}
    assert known <= {*switches}
    assert not [name for name in switches if names.get(name) is False]


def test_switches_that_are_on_are_turned_off_as_the_parser_of_transformers_does(tmp_path):
    flags = "--no_gradient_checkpointing --no-shuffle-dataset --no_bf16"
    report = convert(f"{SHELL} {flags}", "run.sh")
    off = {"gradient_checkpointing": False, "shuffle_dataset": False}
    assert report.recipe["training"] == off
    assert [*reasons(report)] == ["no_bf16"]
    (tmp_path / "train.py").write_text(
        "config = TrlParser(GRPOConfig).parse_args_and_config()[0]\n"
        "GRPOTrainer('m/x', 'r/m', config, load_dataset('d/x'))\n"
    )
    report = convert(f"python train.py {flags}", "run.sh", tmp_path)
    assert report.recipe["training"] == off
    assert [*reasons(report)] == ["no_bf16"]


def test_what_a_recipe_has_no_place_for_is_not_left_to_the_user():
    report = convert(f"{SHELL} --output_dir $O --strange $X --use_peft $P --lora_r 4", "run.sh")
    assert {*reasons(report)} == {"output_dir", "strange"}
    assert set(report.to_do) == {"model.lora"}
    assert report.recipe["model"]["lora"] == {"r": 4}
    text = "python -m swift.cli.rlhf --rlhf_type grpo --tuner_type $T --output_dir $O --lora_rank 4"
    report = convert(text, "run.sh")
    assert report.dialect == "ms-swift"
    assert [*reasons(report)] == ["output_dir"]
    assert report.to_do["model.lora"].startswith("line 1 of run.sh has `--tuner_type $T`")
    assert "learning_rate" not in report.recipe["training"]


def test_launchers_and_variables_are_named_beside_a_script_that_is_read(tmp_path):
    (tmp_path / "train.py").write_text(
        "GRPOTrainer('m/x', 'r/m', GRPOConfig(beta=0.1), load_dataset('d/x'))\n"
    )
    text = (
        "export seed=3\naccelerate launch --config_file zero3.yaml --num_processes $N \\\n"
        "  --machine_rank 1 --debug train.py\n"
    )
    report = convert(text, "run.sh", tmp_path)
    assert report.recipe["launch"] == {"machine_rank": 1, "strategy": "zero3"}
    assert report.to_do["launch.num_processes"].startswith("line 2 of run.sh")
    assert {*reasons(report)} == {"seed", "--debug"}
    report = convert(f"export seed=3\n{SHELL} --seed 4", "run.sh")
    assert (report.recipe["seed"], [*reasons(report)]) == (4, ["seed (line 1)"])


def test_what_is_not_a_flag_is_named_with_its_line(tmp_path):
    text = (
        "export LR=1e-6 CUDA_VISIBLE_DEVICES=0\nsource ~/.bashrc\nenv A=1 nohup env B=2 \\\n"
        "accelerate launch grpo.py conf/a.yaml \\\n  --learning_rate $LR \\\n"
        "  # --beta 1 \\\n  --max_steps 5\n  --epsilon 0.3\n"
    )
    report = convert(text, "run.sh", tmp_path)
    assert report.recipe["training"] == {"learning_rate": 1e-6, "max_steps": 5}
    places = {entry.key: entry.location.line for entry in report.dropped}
    assert places == {
        "CUDA_VISIBLE_DEVICES": 1,
        "source ~/.bashrc": 2,
        "A": 3,
        "B": 3,
        "conf/a.yaml": 4,
        "# --beta 1 \\": 6,
        "--epsilon 0.3": 8,
    }
    assert "`grpo.py` was not found" in report.to_do["training"]
    assert "backend" not in report.recipe.get("generation", {})


def test_arguments_after_a_switch_may_be_its_value_or_any_flags():
    report = convert(f'{SHELL} --use_vllm "$@"', "run.sh")
    assert report.to_do["generation.backend"].startswith("line 1 of run.sh has `--use_vllm $@`")
    assert report.to_do["training"].startswith("line 1 of run.sh passes `$@`")
    assert "generation" not in report.recipe


@pytest.mark.parametrize("name", ["swift.yaml", "swift.json"])
def test_swift_is_told_from_a_recipe_by_keys_that_it_alone_has(name):
    text = json.dumps({"model": "org/base", "rlhf_type": "grpo", "lora_rank": 4, "no_such_key": 1})
    report = convert(text, name)
    assert report.dialect == "ms-swift"
    assert find(report.recipe, "model.lora.r") == 4
    assert "no counterpart" in reasons(report)["no_such_key"]
    with pytest.raises(RecipeError, match="rlhf_type: dpo"):
        convert(text.replace("grpo", "dpo"), name)


def test_trls_command_line_is_read_with_its_yaml(tmp_path):
    (tmp_path / "base.yaml").write_text("dataset_name: org/rows\nbeta: 0.1\nnum_generations: 4\n")
    launch = "accelerate launch --config_file zero3.yaml --num_processes 8"
    text = f"{launch} train.py --config base.yaml --beta 0.2 --bf16\n"
    report = convert(text, "run.sh", tmp_path)
    assert find(report.recipe, "training.beta") == 0.2
    assert find(report.recipe, "generation.num_generations") == 4
    assert report.recipe["launch"] == {"strategy": "zero3", "num_processes": 8}
    assert report.recipe["training"]["bf16"] is True
    report = convert(
        "trl grpo --model_name_or_path m --reward_funcs a.b think_format_reward", "x.sh"
    )
    assert [each["kind"] for each in report.recipe["rewards"]] == ["python", "think_format"]
    for config in ("$C", "$HOME/a.yaml"):
        report = convert(f"trl grpo --config {config} --beta 0.2", "x.sh", tmp_path)
        assert "names a YAML that is known only when it runs" in report.to_do["training"]
        assert (report.recipe["training"], report.recipe.get("generation")) == ({"beta": 0.2}, None)
    text = 'D="$(cd "$(dirname "$0")" && pwd)"\ntrl grpo --config "$D/base.yaml"'
    assert find(convert(text, "x.sh", tmp_path).recipe, "training.beta") == 0.1
    report = convert("swift rlhf --config $C --lora_rank 4", "x.sh")
    assert report.dialect == "ms-swift"
    with pytest.raises(RecipeError, match="names the YAML `gone"):
        convert("trl grpo --config gone.yaml", "run.sh", tmp_path)


def test_a_script_that_a_shell_script_starts_is_read_with_its_arguments(tmp_path):
    (tmp_path / "train.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float, default=1e-6)\n"
        "parser.add_argument('--beta', type=float, default=0.5)\n"
        "args = parser.parse_args()\n"
        "GRPOTrainer('m/x', 'r/m', GRPOConfig(learning_rate=args.lr, beta=args.beta), load_dataset('d/x'))\n"
    )
    report = convert("torchrun --nproc_per_node=2 train.py --lr 3e-6\n", "run.sh", tmp_path)
    assert report.recipe["training"]["learning_rate"] == 3e-6
    assert report.recipe["training"]["beta"] == 0.5
    assert report.recipe["launch"]["num_processes"] == 2
    assert report.to_do == {}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("prime.toml", "[model]\nname = 'x'\n", "is TOML"),
        (
            "verl.yaml",
            "actor_rollout_ref: {model: {path: m}}\n",
            "a config of verl, which is not converted",
        ),
        ("rl.yaml", "prompt_data: d\npretrain: m\n", "a config of OpenRLHF"),
        ("rl.yaml", "model: {name: x}\norchestrator: {batch_size: 1}\n", "a config of prime-rl"),
        (
            "run.sh",
            "python -m verl.trainer.main_ppo data.x=1\n",
            "starts no training of TRL or ms-swift",
        ),
        (
            "run.sh",
            "if a; then C='trl grpo'; fi\n$C --beta 1\n",
            r"2:1: runs `\$C`, which is known only",
        ),
        ("run.sh", "trl grpo --a 1\ntrl grpo --a 2\n", r"starts 2 trainings \(lines 1, 2\)"),
        ("a.ipynb", "{}", "not a notebook"),
    ],
)
def test_other_files_get_one_line_that_says_what_can_be_converted(name, text, said):
    with pytest.raises(RecipeError, match=said) as caught:
        convert(text, name)
    assert (
        "GRPOTrainer" in str(caught.value)
        or re.search("keep one|write the command", str(caught.value))
        or name == "a.ipynb"
    )


def test_a_notebook_is_read_cell_by_cell():
    sources = [
        ["!pip install \\\n", "  trl\n", "%matplotlib inline\n", "LR = 1e-5"],
        ["%%bash\n", "ls"],
        ["args = GRPOConfig(learning_rate=LR, beta=unknown())\n"],
        [
            "await run()\n",
            "GRPOTrainer('m/x', 'r/m', args, load_dataset('d/x'), callbacks=[Mine()])",
        ],
    ]
    cells = [{"cell_type": "code", "source": source} for source in sources]
    cells.insert(1, {"cell_type": "markdown", "source": ["GRPOTrainer("]})
    report = convert(json.dumps({"cells": cells}), "nb.ipynb")
    assert find(report.recipe, "training.learning_rate") == 1e-5
    assert report.to_do["training.beta"].startswith("nb.ipynb, code cell 3:1 has `unknown()`")
    (entry,) = [entry for entry in report.entries if entry.key == "Mine()"]
    assert str(entry.location).startswith("nb.ipynb, code cell 4:2:")


def test_a_sign_inside_a_word_of_a_shell_script_begins_no_comment():
    text = (
        "swift rlhf --rlhf_type grpo \\\n  --dataset org/rows#500 \\\n"
        "  --lr $LR --model $MODEL \\\n  --beta 0.1 --system 'a # b'  # don't stop\n"
    )
    report = convert(text, "run.sh")
    assert report.recipe["dataset"]["limit"] == 500
    assert report.recipe["dataset"]["prompt"]["system"] == "a # b"
    assert report.recipe["training"]["beta"] == 0.1
    assert "$LR" in report.to_do["training.learning_rate"]
    assert "$MODEL" in report.to_do["model.path"]


def test_rewards_of_a_notebook_go_to_a_file_that_can_be_imported():
    code = "def f(completions): ...\nGRPOTrainer('m/x', f, train_dataset=load_dataset('d/x'))"
    cells = [{"cell_type": "code", "source": [code]}]
    report = convert(json.dumps({"cells": cells}), "nb.ipynb")
    assert report.recipe["rewards"] == [{"kind": "python", "path": "./nb.py:f"}]
    assert "copy the reward functions of nb.ipynb into ./nb.py" in report.to_do["rewards"]
