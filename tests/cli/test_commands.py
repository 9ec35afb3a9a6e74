"""The commands as a person runs them: what they print, and how they end."""

import json
import os
import signal
import subprocess
import sys

import jsonschema
import pytest
import yaml

from grpo_cli.cli.app import run_guarded
from tests.in_process import run_command
from tests.recipe_texts import GOOD, write_recipe


def grpo(*arguments, cwd, **environment):
    """Run a command in this process."""
    return run_command(list(map(str, arguments)), cwd, environment)


def process(*arguments, cwd, **environment):
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "grpo_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
    )


def test_help_names_every_command(tmp_path):
    done = process("--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("init", "check", "check-batch", "train", "schema"):
        assert command in done.stdout


def test_version(tmp_path):
    assert grpo("--version", cwd=tmp_path).stdout.startswith("grpo 0.")


def test_a_misspelt_command_or_option_is_exit_code_2_without_a_traceback(tmp_path):
    for arguments in (["trian"], ["check", "--jsn", "x"], ["check"], ["status"]):
        done = process(*arguments, cwd=tmp_path)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr
    assert "Fix: grpo watch" in done.stderr
    assert "Did you mean 'runs'? Fix: " in process("runz", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["--training.max_steps", "50"], "write --set training.max_steps=VALUE"),
        (["--lr", "1e-5"], "write --set training.learning_rate=VALUE"),
        (["--set", "training.max_steps", "=", "5"], "write --set KEY=VALUE without spaces"),
        (["--set", "seed=1,training.max_steps=5"], "write --set seed=1 --set training.max_steps=5"),
    ],
)
def test_a_setting_in_another_style_is_shown_in_ours(tmp_path, arguments, fix):
    done = grpo("check", write_recipe(tmp_path), *arguments, cwd=tmp_path)
    assert (done.returncode, fix in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("template", ["quickstart", "math", "format"])
def test_init_writes_a_recipe_that_fits_the_schema(tmp_path, template):
    done = grpo("init", "mine", "--template", template, cwd=tmp_path)
    assert done.returncode == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert yaml.safe_load(text)["name"] == "mine"
    again = grpo("init", "mine", cwd=tmp_path)
    assert again.returncode == 2
    assert "mine.yaml exists" in again.stderr
    assert (tmp_path / "mine.yaml").read_text() == text


def test_init_suggests_the_template_that_was_meant(tmp_path):
    done = grpo("init", "--template", "maths", cwd=tmp_path)
    assert done.returncode == 2
    assert "use --template math" in done.stderr
    assert not list(tmp_path.iterdir())


def test_check_names_what_it_did_not_look_at(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tiny" / "tokenizer.json").touch()
    path = write_recipe(tmp_path, GOOD.replace("path: tiny", "path: ./tiny"))
    assert "is ready" in grpo("check", path, cwd=tmp_path).stdout
    text = "model: {path: a/b}\n" + GOOD.replace("model:\n  path: tiny\n", "")
    path = write_recipe(tmp_path, text + "launch: {num_processes: 2}\n")
    done = grpo("check", path, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert "is ready" not in done.stdout
    assert "the model a/b: a hub id, which is not looked up here" in done.stdout
    assert "GPUs for the 2 processes: none was found, or `--gpus 0` was given" in done.stdout
    hub = text.partition("dataset:")[0] + "dataset: {kind: hub, path: c/d, prompt: {user: hm}}\n"
    hub += "rewards:" + text.partition("rewards:")[2]
    told = json.loads(grpo("check", write_recipe(tmp_path, hub), "--json", cwd=tmp_path).stdout)
    assert any("rows of the dataset" in each for each in told["not_checked"])


def test_a_recipe_for_a_cluster_is_checked_on_a_laptop(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    launch = "launch: {num_processes: 8, strategy: zero2}\n"
    path = write_recipe(tmp_path, GOOD.replace("batch_size: 4", "batch_size: 1") + launch)
    lacking = grpo("check", path, "--gpus", 8, cwd=tmp_path)
    assert (lacking.returncode, lacking.stderr.count("error:")) == (3, 1)
    assert "deepspeed is not installed" in lacking.stderr
    done = grpo("check", path, "--gpus", 8, "--no-environment", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "launch.strategy: deepspeed is not installed" in done.stderr
    few = grpo("check", path, "--gpus", 4, "--no-environment", cwd=tmp_path)
    assert few.returncode == 2
    assert "8 processes need a GPU each, and training has 4" in few.stderr
    quantized = ["--set", "model.quantization=4bit", "--set", "model.lora={r: 8}"]
    done = grpo("check", path, "--gpus", 8, "--no-environment", *quantized, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4bit needs bitsandbytes, which is not installed" in done.stderr
    lonely = grpo("check", path, "--set", "launch.machine_rank=1", "--no-environment", cwd=tmp_path)
    assert "there is one machine, number 0 (got 1)" in lonely.stderr


def test_check_batch_leaves_the_servers_gpus_out(tmp_path):
    server = "  backend: auto\n  vllm: {mode: server, managed: true, tensor_parallel_size: 4}\n"
    path = write_recipe(tmp_path, GOOD.replace("generation:\n", f"generation:\n{server}"))
    done = grpo("check-batch", path, "--gpus", 8, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["num_processes"] == 4
    flags = ["--per-device-train-batch-size", 4, "--num-generations", 4]
    done = grpo("check-batch", "--gpus", 8, *flags, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["num_processes"] == 8


def test_check_says_what_a_recipe_comes_to(tmp_path):
    done = grpo("check", write_recipe(tmp_path), cwd=tmp_path)
    assert done.returncode == 0
    assert "4 prompts" in done.stdout
    assert "4 completions a step on 1 process, 2 steps" in done.stdout
    assert done.stderr == ""


def test_check_prints_problems_on_stderr_and_ends_with_2(tmp_path):
    path = write_recipe(tmp_path, GOOD.replace("max_steps", "max_step").replace("math", "maths"))
    done = process("check", path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Fix: write `max_steps`" in done.stderr
    assert "Fix: write `math`" in done.stderr
    assert "2 problems" in done.stderr


def test_check_as_json_holds_the_same_on_stdout(tmp_path):
    path = write_recipe(tmp_path, GOOD.replace("max_steps", "max_step"))
    done = grpo("check", path, "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert done.returncode == 2
    assert result["valid"] is False
    assert result["problems"][0]["line"] == 19
    assert result["problems"][0]["path"] == "training.max_step"


def test_check_batch_from_flags_gives_the_sums_of_the_tutorial(tmp_path):
    flags = (
        "--per-device-train-batch-size 4 --gradient-accumulation-steps 2 --num-processes 3 "
        "--num-generations 6 --dataset-size 8000 --num-train-epochs 1"
    ).split()
    done = grpo("check-batch", *flags, "--json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert done.returncode == 0
    assert plan["valid"] is True
    assert plan["completions_per_optimizer_step"] == 24
    assert plan["total_optimizer_steps"] == 2000
    assert plan["total_completions"] == 48_000
    assert "2,000" in grpo("check-batch", *flags, cwd=tmp_path).stdout
    assert "misreadings" not in plan


def test_check_batch_explains_what_is_often_misread(tmp_path):
    flags = (
        "--per-device-train-batch-size 4 --gradient-accumulation-steps 2 --num-processes 3 "
        "--num-generations 6 --dataset-size 8000 --num-train-epochs 1 --explain"
    ).split()
    printed = grpo("check-batch", *flags, cwd=tmp_path).stdout
    assert "✗ “per_device_train_batch_size counts prompts”" in printed
    assert (
        "would give  144 completions a step (4 × 3 × 2 = 24 prompts, × 6)  [wrong here]" in printed
    )
    told = json.loads(grpo("check-batch", *flags, "--json", cwd=tmp_path).stdout)["misreadings"]
    assert [each["right_here"] for each in told] == [False, False, False]
    assert told[0]["claimed"]["value"] == 144
    path = write_recipe(tmp_path)
    done = grpo("check-batch", path, "--explain", cwd=tmp_path)
    assert done.returncode == 0
    assert "is          2 steps, as max_steps sets" in done.stdout


def test_check_batch_gives_the_nearest_values_of_each_knob_and_ends_with_1(tmp_path):
    done = grpo(
        "check-batch", "--per-device-train-batch-size", 4, "--num-generations", 7,
        "--num-processes", 3, "--gradient-accumulation-steps", 2, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    knobs = ("generation.num_generations", "training.per_device_train_batch_size",
             "training.gradient_accumulation_steps", "launch.num_processes")  # fmt: skip
    for knob in knobs:
        assert knob in done.stdout
    assert "24 / 7" in done.stderr


def test_check_batch_takes_a_recipe_with_flags_in_place_of_some(tmp_path):
    path = write_recipe(tmp_path)
    plan = json.loads(
        grpo("check-batch", path, "--num-processes", 2, "--json", cwd=tmp_path).stdout
    )
    assert plan["completions_per_micro_step"] == 8
    assert plan["inputs"]["dataset_size"] == 4


def test_check_batch_knows_the_processes_of_the_launch(tmp_path):
    path = write_recipe(tmp_path, GOOD + "launch: {num_processes: 2}\n")
    plan = json.loads(grpo("check-batch", path, "--json", cwd=tmp_path).stdout)
    assert plan["num_processes"] == 2


def test_check_batch_without_anything_says_what_to_give(tmp_path):
    done = grpo("check-batch", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is nothing to check" in done.stderr


def test_the_schema_accepts_a_good_recipe_and_refuses_a_bad_one(tmp_path):
    schema = json.loads(grpo("schema", cwd=tmp_path).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    recipe = yaml.safe_load(GOOD)
    jsonschema.validate(recipe, schema)
    recipe["training"]["lr_scheduler_type"] = "cosine"
    jsonschema.validate(recipe, schema)
    for section, key, value in [
        ("training", "max_step", 3),
        ("training", "loss_type", "dapoo"),
        ("generation", "num_generations", "many"),
        ("rewards", 0, {"kind": "maths"}),
        ("rewards", 0, {"kind": "math", "anser": "x"}),
    ]:
        spoiled = yaml.safe_load(GOOD)
        spoiled[section][key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(spoiled, schema)


def test_a_dry_run_writes_the_run_folder_and_starts_nothing(tmp_path):
    path = write_recipe(tmp_path)
    done = grpo("train", path, "--dry-run", "--json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert done.returncode == 0
    (folder,) = (tmp_path / "runs" / "good").iterdir()
    assert plan["run"] == str(folder)
    assert plan["argv"][-1] == str(folder)
    assert (folder / "recipe.yaml").read_text() == path.read_text()
    resolved = json.loads((folder / "resolved.json").read_text())["recipe"]
    assert resolved["launch"]["num_processes"] >= 1
    assert resolved["training"]["learning_rate"] == 1e-6
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["versions"]["trl"]
    assert json.loads((folder / "status.json").read_text())["state"] == "pending"
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("max_steps", "max_step"),
        lambda text: text.replace("answer: answer", "answer: solution"),
        lambda text: text.replace("num_generations: 4", "num_generations: 3"),
        lambda text: text.replace("path: tiny", "path: ./nowhere"),
        lambda text: text[: text.index("rewards:")],
        lambda text: text + "  x: [",
    ],
)
def test_a_recipe_that_cannot_be_trained_leaves_nothing_behind(tmp_path, spoil):
    path = write_recipe(tmp_path, spoil(GOOD))
    done = grpo("train", path, cwd=tmp_path)
    assert done.returncode == 2
    assert "Fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert [item.name for item in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_run_gets_the_name_it_is_given_once(tmp_path):
    path = write_recipe(tmp_path)
    flags = ["--run-id", "mine", "--dry-run"]
    machine_1 = """launch.num_machines=2 launch.num_processes=2 launch.machine_rank=1
    launch.main_process_ip=here launch.main_process_port=1""".split()
    assert grpo("train", path, *flags, cwd=tmp_path).returncode == 0
    folder = tmp_path / "runs" / "good" / "mine"
    assert json.loads((folder / "status.json").read_text())["state"] == "pending"
    # What a dry run left was never started, and may be taken.
    assert grpo("train", path, *flags, cwd=tmp_path).returncode == 0
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "stopped"}))
    done = grpo("train", path, *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert "exists already. Fix: resume it with --resume" in done.stderr
    assert grpo("train", path, *flags, "--resume", cwd=tmp_path).returncode == 0
    sets = [part for text in machine_1 for part in ("--set", text)]
    assert grpo("train", path, *flags, *sets, cwd=tmp_path).returncode == 0
    assert (folder / "machines" / "1" / "checkpoints").resolve() == folder / "checkpoints"
    done = grpo("train", path, *flags, "--resume-from", folder, cwd=tmp_path)
    assert done.returncode == 2
    assert "--run-id and --resume-from both name a run" in done.stderr


def test_the_script_of_a_job_is_printed_and_nothing_is_started(tmp_path):
    launch = "launch: {num_machines: 2, slurm: {gpus_per_node: 2, time: 60}}\n"
    path = write_recipe(tmp_path, f"{GOOD}{launch}".replace("batch_size: 4", "batch_size: 2"))
    flags = ["--slurm", "--dry-run", "--set", "seed=7"]
    done = grpo("train", path.name, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=good\n#SBATCH --nodes=2\n")
    assert f"grpo_cli train {path}\n" in done.stdout
    assert "--set seed=7\n  --set launch.num_processes=4\n" in done.stdout
    assert [item.name for item in tmp_path.iterdir()] == ["recipe.yaml"]
    told = json.loads(grpo("train", path.name, *flags, "--json", cwd=tmp_path).stdout)
    assert (told["job"], told["script"]) == (None, done.stdout)
    flags += ["--set", "launch.num_processes=2"]
    assert "num_processes=4" not in grpo("train", path.name, *flags, cwd=tmp_path).stdout


def test_the_script_of_a_job_is_printed_where_nothing_is_installed(tmp_path, monkeypatch):
    path = write_recipe(
        tmp_path, f"{GOOD}logging: {{report_to: comet_ml}}\nlaunch: {{slurm: {{}}}}\n"
    )
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    done = grpo("train", path, "--slurm", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stdout[:11]) == (0, "#!/bin/bash"), done.stderr
    assert "comet_ml is not installed" in done.stderr
    assert grpo("train", path, "--dry-run", cwd=tmp_path).returncode == 3


def test_a_resolved_recipe_of_a_run_raises_no_new_warning(tmp_path):
    path = write_recipe(tmp_path)
    assert grpo("train", path, "--dry-run", cwd=tmp_path).returncode == 0
    (resolved,) = tmp_path.glob("runs/good/*/resolved.json")
    done = grpo("check", resolved, cwd=tmp_path)
    assert (done.returncode, "warning" in done.stderr + done.stdout) == (0, False)


def test_a_job_is_checked_as_its_nodes_will_see_it(tmp_path):
    launch = "launch: {strategy: fsdp2, slurm: {gpus_per_node: 2}}\n"
    text = GOOD.replace("num_generations: 4", "num_generations: 2")
    path = write_recipe(tmp_path, text + launch)
    done = grpo("train", path, "--slurm", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    more = ["--set", "launch.slurm.gpus_per_node=3"]
    done = grpo("train", path, "--slurm", "--dry-run", *more, cwd=tmp_path)
    assert done.returncode == 2
    assert "generation batch 4 × 3 × 1 = 12 completions" in done.stderr
    # Without the number, or the section, the nodes' GPUs are not known.
    for unknown in ("launch.slurm.gpus_per_node=null", "launch.slurm=null"):
        done = grpo("train", path, "--slurm", "--dry-run", "--set", unknown, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = grpo("train", path, "--slurm", "--resume", cwd=tmp_path)
    assert done.returncode == 2
    assert "name an earlier run with --run-id" in done.stderr


def test_machines_are_not_started_without_a_place_to_meet(tmp_path):
    path = write_recipe(tmp_path, f"{GOOD}launch: {{num_machines: 2, slurm: {{}}}}\n")
    assert grpo("check", path, cwd=tmp_path).returncode == 0
    done = grpo("train", path, "--no-probe", cwd=tmp_path)
    assert done.returncode == 2
    assert "Fix: submit a job that sets them with --slurm" in done.stderr


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    path = write_recipe(tmp_path)
    (tmp_path / "taken").write_text("a file")
    done = grpo("train", path, "--runs", "taken", cwd=tmp_path)
    assert done.returncode == 2
    assert "give another place with --runs DIR" in done.stderr


def test_debug_shows_the_traceback_of_our_own_errors(tmp_path):
    done = process("check", "nowhere.yaml", cwd=tmp_path, GRPO_DEBUG="1")
    assert "Traceback" in done.stderr


def test_rewards_are_listed_and_shown(tmp_path):
    listed = grpo("rewards", "list", cwd=tmp_path)
    assert listed.returncode == 0
    kinds = json.loads(grpo("rewards", "list", "--json", cwd=tmp_path).stdout)
    assert {"math", "length", "python"} <= {kind["kind"] for kind in kinds}
    assert all(kind["kind"] in listed.stdout and kind["summary"] for kind in kinds)
    shown = grpo("rewards", "show", "length", cwd=tmp_path)
    assert "target" in shown.stdout
    assert "required" in shown.stdout
    wrong = grpo("rewards", "show", "lenght", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "grpo rewards show length" in wrong.stderr


def test_the_server_of_a_training_is_printed(tmp_path):
    vllm = (
        "generation:\n  backend: vllm\n  vllm: {mode: server, base_url: 'http://127.0.0.1:8123'}\n"
    )
    path = write_recipe(tmp_path, GOOD.replace("generation:\n", vllm))
    done = grpo("serve", path, "--dry-run", "--set", "seed=7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("VLLM_SERVER_DEV_MODE=1 ")
    assert "--port 8123 " in done.stdout
    assert "--logprobs-mode processed_logprobs --max-logprobs -1 --seed 7" in done.stdout
    done = grpo("serve", write_recipe(tmp_path), "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "does not train with a vLLM server. Fix: give both commands --set generation.backend=vllm"
        in done.stderr
    )


def test_an_option_that_is_gone_names_what_replaces_it(tmp_path):
    done = grpo("train", write_recipe(tmp_path), "--dashboard", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--set logging.report_to=[trackio]" in done.stderr


def test_ctrl_c_while_the_command_is_loaded_is_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", "grpo_cli", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGHUP, 143, "terminated\n")],
)
def test_a_signal_that_a_library_takes_for_an_error_of_its_own_is_a_signal(
    number, code, word, capsys
):
    def command():
        try:
            signal.raise_signal(number)
        except BaseException:
            raise ModuleNotFoundError("Could not import module") from None

    handlers = {
        each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        assert run_guarded(command) == code
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert capsys.readouterr().err == word
