"""`grpo eval` on real runs of tiny models."""

import importlib.util
import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from grpo_cli.errors import install_extra
from tests.forking import ForkedPopen
from tests.integration.conftest import RECIPE, Workshop, with_held_out_rows
from tests.nightly import nightly
from tests.tiny_models import make_tiny_model

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, lora_run, chat_model):
    """A workshop in which a run with adapters has ended; every test measures into folders of its own."""
    return Workshop.copy(lora_run, tmp_path_factory.mktemp("trained"), chat_model)


def evaluate(workshop, *arguments, code=0):
    done = workshop.grpo("eval", *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def logged(workshop, when):
    return json.loads((workshop.run / "eval" / f"{when}.json").read_text())


def test_a_run_is_compared_with_its_base_and_agrees_with_what_it_logged(trained):
    result = evaluate(trained, trained.run)
    assert (result["kind"], result["baseline"]) == ("grpo-eval", "base")
    assert list(result["subjects"]) == ["final", "base"]
    for name, when in (("final", "after"), ("base", "before")):
        metrics, own = result["subjects"][name]["metrics"], logged(trained, when)
        assert metrics["reward"]["value"] == pytest.approx(own["reward"], abs=1e-9)
        assert metrics["clipped"]["value"] == pytest.approx(own["clipped"])
        assert metrics["completion_length"]["value"] == pytest.approx(own["completion_length"])
    assert result["primary"] == "accuracy/contains"
    assert "on the same 12 prompts" in result["verdicts"]["final"]
    assert result["data"]["rows"] == 12
    assert result["origin"]["versions"]["trl"]
    gain = result["differences"]["final"]["reward"]
    before, after = (
        result["subjects"][name]["metrics"]["reward"]["value"] for name in ("base", "final")
    )
    assert gain["value"] == pytest.approx(after - before)


def test_several_samples_give_pass_at_k_and_votes(trained):
    result = evaluate(trained, trained.run, "--samples", "4", "--baseline", "none", "--seed", "3")
    assert list(result["subjects"]) == ["final"]
    metrics = result["subjects"]["final"]["metrics"]
    assert {"accuracy/contains", "pass@2/contains", "pass@4/contains"} <= metrics.keys()
    assert metrics["pass@4/contains"]["value"] >= metrics["accuracy/contains"]["value"]
    assert result["settings"]["temperature"] == 1.0
    assert result["subjects"]["final"]["completions"] == 48
    again = evaluate(trained, trained.run, "--samples", "4", "--baseline", "none", "--seed", "3")
    assert again["subjects"]["final"]["metrics"] == metrics


def test_checkpoints_are_measured(trained):
    result = evaluate(trained, trained.run, "--checkpoint", "all", "--limit", "4")
    assert list(result["subjects"]) == ["checkpoint-1", "checkpoint-2", "base"]
    interval = result["subjects"]["base"]["metrics"]["reward"]
    assert interval["low"] is None
    assert "4 prompts are too few" in interval["reason"]
    assert "no checkpoint `7` (checkpoints: 1, 2)" in evaluate(
        trained, trained.run, "--checkpoint", "7", code=2
    )
    assert "which checkpoint is best" in evaluate(
        trained, trained.run, "--checkpoint", "best", code=2
    )


def test_a_recipe_with_a_model_is_measured_against_its_own(trained):
    recipe = trained.folder / "recipe.yaml"
    result = evaluate(trained, recipe, "--model", trained.run / "model", "--out", "measured")
    assert list(result["subjects"]) == ["model", "base"]
    assert result["subjects"]["model"]["adapter"].endswith("/model")
    direct = evaluate(trained, trained.run)
    assert result["subjects"]["model"]["metrics"] == direct["subjects"]["final"]["metrics"]
    assert "exists already" in evaluate(trained, recipe, "--out", "measured", code=2)
    alone = evaluate(trained, recipe, "--split", "train")
    assert (list(alone["subjects"]), alone["baseline"], alone["data"]["rows"]) == (
        ["model"],
        None,
        8,
    )


@pytest.mark.slow
def test_results_are_shown_and_compared_and_floors_are_kept(trained):
    evaluate(trained, trained.run, "--out", "a")
    evaluate(trained, trained.run, "--out", "b", "--checkpoint", "1", "--baseline", "none")
    evaluate(trained, trained.run, "--out", "c", "--limit", "5")
    shown = trained.grpo("eval", "show", "a")
    assert shown.returncode == 0
    assert "12 prompts × 1 at temperature 0" in shown.stdout
    evaluate(trained, trained.run, "--baseline", "none", "--batch-size", "4")
    shown = trained.grpo("eval", "show", trained.run)
    assert shown.returncode == 0, shown.stderr
    assert "with the first batch" not in shown.stdout
    name = trained.run.parent.name
    named = trained.grpo("eval", "compare", f"{name}:final", name, "--json")
    assert json.loads(named.stdout)["prompts"] == 12, named.stderr
    compared = trained.grpo("eval", "compare", "b", "a", "--json")
    assert json.loads(compared.stdout)["prompts"] == 12
    other = trained.grpo("eval", "compare", "a", "c")
    assert other.returncode == 2
    assert "different prompts (12 and 5, 5 of them the same)" in other.stderr
    for floor, code in (("clipped=0", 0), ("accuracy=1.1", 1), ("gain/reward=9", 1), ("what=1", 2)):
        done = trained.grpo("eval", "show", "a", "--fail-under", floor)
        assert done.returncode == code, done.stderr


def test_an_interrupted_evaluation_goes_on(trained):
    recipe = trained.folder / "recipe.yaml"
    flags = ["--batch-size", "2", "--samples", "2", "--temperature", "1"]
    whole = evaluate(trained, recipe, *flags, "--out", "whole")
    process = ForkedPopen(
        **trained.command("eval", recipe, *flags, "--out", "torn"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    samples = trained.folder / "torn" / "samples"
    while process.poll() is None and not any(f.stat().st_size for f in samples.glob("*.jsonl")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (trained.folder / "torn" / "result.json").exists()
    (lines,) = samples.glob("*.jsonl")
    kept = lines.read_text().count("\n")
    with lines.open("a") as file:
        file.write('{"torn": ')
    assert "other settings" in evaluate(
        trained, recipe, *flags, "--seed", "9", "--out", "torn", "--resume", code=2
    )
    done = trained.process("eval", recipe, *flags, "--out", "torn", "--resume", "--json")
    assert done.returncode == 0, done.stderr
    resumed = json.loads(done.stdout)
    assert resumed["subjects"]["model"]["metrics"] == whole["subjects"]["model"]["metrics"]
    assert kept <= lines.read_text().count("\n") == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "4", "--temperature", "0"], "4 times the same completion"),
        (["--checkpoint", "1"], "a checkpoint of a run"),
        (["--resume"], "no interrupted evaluation"),
        (["--model", "./nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(workshop, arguments, message):
    assert message in evaluate(
        workshop, workshop.write(with_held_out_rows(RECIPE)), *arguments, code=2
    )


def test_a_recipe_without_held_out_rows_says_what_to_do(workshop):
    text = RECIPE.replace("  eval_rows:\n", "").replace(
        '    - {{question: "held out 1", answer: "1"}}\n', ""
    )
    text = text.replace('    - {{question: "held out 2", answer: "2"}}\n', "")
    assert "--split train" in evaluate(workshop, workshop.write(text), code=2)


@pytest.mark.slow
@pytest.mark.parametrize("use_cpu", [True, nightly(False)])
def test_two_processes_give_the_same_numbers(trained, use_cpu):
    recipe = trained.folder / "recipe.yaml"
    flags = ["--batch-size", "4", "--samples", "2", "--temperature", "1", "--seed", "5"]
    flags += ["--model", trained.run, "--set", f"launch.use_cpu={use_cpu}"]
    alone = evaluate(trained, recipe, *flags)
    together = evaluate(trained, recipe, *flags, "--num-processes", "2")
    for name in ("model", "base"):
        assert together["subjects"][name]["metrics"] == alone["subjects"][name]["metrics"]
    assert together["data"] == alone["data"]
    assert together["verdicts"] == alone["verdicts"]


def test_data_that_changed_is_not_mixed_with_samples_of_the_old(trained):
    recipe = trained.folder / "recipe.yaml"
    evaluate(trained, recipe, "--out", "old")
    (trained.folder / "old" / "result.json").unlink()
    about = trained.folder / "old" / "data.json"
    about.write_text(about.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    assert "the data changed" in evaluate(trained, recipe, "--out", "old", "--resume", code=2)


@pytest.mark.slow
def test_an_adapter_is_measured_on_the_model_it_was_trained_on(trained, tmp_path):
    recipe = trained.folder / "recipe.yaml"
    of_run = evaluate(trained, recipe, "--model", trained.run)
    adapter = tmp_path / "adapter"
    shutil.copytree(trained.run / "model", adapter)
    assert of_run["subjects"]["model"]["adapter"] == str(trained.run / "model")
    make_tiny_model(tmp_path / "other", kind="llama", chat=True, seed=7)
    rebase(adapter, tmp_path / "other")
    moved = evaluate(trained, recipe, "--model", adapter)["subjects"]
    assert moved["model"]["model"] == str(tmp_path / "other")
    assert moved["base"]["model"] == str(trained.model)
    assert moved["base"]["metrics"] == of_run["subjects"]["base"]["metrics"]
    rebase(adapter, tmp_path / "gone")
    assert "gone, which is not here" in evaluate(trained, recipe, "--model", adapter, code=2)
    make_tiny_model(tmp_path / "wide", kind="llama", chat=True, hidden_size=64)
    rebase(adapter, tmp_path / "wide")
    before = set((trained.folder / "evals" / "tiny").iterdir())
    assert "does not fit" in evaluate(trained, recipe, "--model", adapter, code=2)
    assert set((trained.folder / "evals" / "tiny").iterdir()) == before


def rebase(adapter, base):
    """Says in an adapter's settings that it was trained on another model."""
    path = adapter / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))


def test_what_is_in_the_way_of_a_result_is_said(trained, tmp_path):
    recipe = trained.folder / "recipe.yaml"
    (tmp_path / "file").write_text("in the way")
    assert "--out DIR" in evaluate(trained, recipe, "--out", tmp_path / "file" / "x", code=2)
    damaged = trained.folder / "evals" / "tiny" / "29991231-000000"
    damaged.mkdir(parents=True)
    (damaged / "request.json").write_text("{")
    assert "damaged" in evaluate(trained, recipe, "--out", damaged, "--resume", code=2)
    begun = evaluate(trained, recipe, "--seed", "77", "--samples", "2")
    (result,) = (
        path
        for path in (trained.folder / "evals" / "tiny").glob("*/result.json")
        if json.loads(path.read_text())["settings"] == begun["settings"]
    )
    result.unlink()
    flags = ["--seed", "77", "--samples", "2", "--resume"]
    spelled = recipe.parent / ".." / recipe.parent.name / "recipe.yaml"
    resumed = evaluate(trained, spelled, *flags)
    assert resumed["subjects"]["model"]["metrics"] == begun["subjects"]["model"]["metrics"]
    assert result.exists()


@pytest.mark.slow
def test_a_comparison_names_what_else_differs(trained):
    recipe = trained.folder / "recipe.yaml"
    evaluate(trained, recipe, "--out", "greedy")
    flags = ["--temperature", "0.5", "--set", "rewards.0.weight=3"]
    evaluate(trained, recipe, "--out", "sampled", *flags)
    compared = json.loads(trained.grpo("eval", "compare", "greedy", "sampled", "--json").stdout)
    assert compared["settings"].keys() == {"temperature", "rewards"}
    shown = trained.grpo("eval", "compare", "greedy", "sampled").stdout
    assert "note: temperature of the two differ: 0.0 → 0.5" in shown


@pytest.mark.slow
def test_a_terminated_evaluation_leaves_no_process_and_what_it_sampled(trained):
    flags = ["--batch-size", "2", "--num-processes", "2", "--out", "ended"]
    many = ["--samples", "200", "--temperature", "1"]
    process = ForkedPopen(
        **trained.command("eval", trained.folder / "recipe.yaml", *flags, *many),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    samples = trained.folder / "ended" / "samples"
    while process.poll() is None and not any(f.stat().st_size for f in samples.glob("*.jsonl")):
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert process.returncode == 143
    assert "--resume to finish" in said


@pytest.mark.slow
def test_several_processes_end_as_one_does(trained):
    recipe = trained.folder / "recipe.yaml"
    for flags, code, said in (
        (["--set", "dataset.eval_rows=null"], 2, "--split train"),
        (["--model", "no-such/model"], 3, "cannot be loaded"),
    ):
        alone = evaluate(trained, recipe, *flags, "--out", "refused", code=code)
        together = evaluate(
            trained, recipe, *flags, "--out", "refused", "--num-processes", "2", code=code
        )
        assert said in alone
        assert said in together
        assert not (trained.folder / "refused").exists()


@pytest.mark.slow
def test_a_baseline_is_measured_without_what_an_adapter_left(trained, tmp_path):
    text = with_held_out_rows(RECIPE).replace(
        "dtype: float32",
        "dtype: bfloat16\n  lora: {{r: 4, lora_alpha: 8, modules_to_save: [lm_head]}}",
    )
    workshop = Workshop(tmp_path, trained.model)
    text = text.replace("learning_rate: 1e-3", "learning_rate: 0.1")
    assert workshop.grpo("train", workshop.write(text)).returncode == 0
    beside = evaluate(workshop, workshop.run)["subjects"]
    alone = evaluate(workshop, workshop.folder / "recipe.yaml")["subjects"]["model"]
    assert beside["base"]["metrics"] == alone["metrics"]


def test_mistakes_are_found_before_anything_is_sampled(trained):
    recipe = trained.folder / "recipe.yaml"
    for flags, code, said in (
        (["--fail-under", "acuracy=0.5"], 2, "there is no metric `acuracy`"),
        (["--fail-under", "gain/reward=0"], 2, "needs a baseline"),
        (["--baseline", "./nope"], 2, "nope does not exist"),
        (["--baseline", ""], 2, "holds no config.json"),
        (["--checkpoint", "\u0662"], 2, "a checkpoint of a run"),
    ):
        assert said in evaluate(trained, recipe, *flags, "--out", "early", code=code)
        assert not (trained.folder / "early").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_a_missing_vllm_is_said(trained):
    said = evaluate(trained, trained.folder / "recipe.yaml", "--backend", "vllm", code=3)
    assert install_extra("vllm") in said


@pytest.mark.slow
def test_subjects_with_other_prompts_are_not_compared(trained, base_model):
    recipe = trained.folder / "recipe.yaml"
    said = evaluate(trained, recipe, "--model", base_model, "--out", "unlike", code=2)
    assert "`base` gets other prompts than `model`" in said
    assert not (trained.folder / "unlike").exists()
    alone = evaluate(trained, recipe, "--model", base_model, "--baseline", "none")
    assert list(alone["subjects"]) == ["model"]


def test_a_reward_that_fails_is_counted_and_its_code_may_not_change(trained, tmp_path):
    own = trained.folder / "own.py"
    own.write_text("def own(completions, **kwargs):\n    raise ValueError('\\ud800')\n")
    recipe = trained.folder / "own.yaml"
    text = (trained.folder / "recipe.yaml").read_text()
    recipe.write_text(
        text.replace(
            "rewards:\n", "rewards:\n  - {kind: python, path: ./own.py:own, on_error: skip}\n"
        )
    )
    done = trained.grpo("eval", recipe, "--out", "failing")
    assert done.returncode == 0, done.stderr
    assert "warning: model: 12 of 12 answers failed in scoring (own)" in done.stdout
    (trained.folder / "failing" / "result.json").unlink()
    own.write_text("def own(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    assert "own.py" in evaluate(trained, recipe, "--out", "failing", "--resume", code=2)


@pytest.mark.slow
def test_a_comparison_wants_one_model_of_each_result(trained):
    evaluate(trained, trained.run, "--checkpoint", "all", "--out", "steps")
    evaluate(trained, trained.run, "--out", "last")
    refused = trained.grpo("eval", "compare", "steps", "last")
    assert (refused.returncode, "steps:checkpoint-1" in refused.stderr) == (2, True)
    compared = trained.grpo("eval", "compare", "steps:checkpoint-2", "last", "--json")
    assert json.loads(compared.stdout)["before"] == "steps:checkpoint-2"
    other = trained.folder / "other.yaml"
    text = (trained.folder / "recipe.yaml").read_text().replace('answer: "3"', 'answer: "4"')
    other.write_text(text)
    evaluate(trained, other, "--model", trained.run, "--out", "golds")
    noted = trained.grpo("eval", "compare", "last", "golds").stdout
    assert "note: data (prompts alike, other columns or rows) of the two differ" in noted


PLAYED = """\
name: played
seed: 3
model: {{path: {model}, dtype: float32}}
dataset: {{kind: environment, size: 16, eval_size: 24}}
environment: {{kind: python, path: "GAMES/offline/higher_lower.py:HigherLower"}}
episode: {{max_turns: 3, max_turn_tokens: 2}}
rewards:
  - {{kind: environment, accuracy: true}}
generation: {{num_generations: 4, max_completion_length: 16}}
training: {{per_device_train_batch_size: 4, max_steps: 1, learning_rate: 1e-6, save_strategy: "no"}}
evaluation: {{temperature: 0, samples_per_prompt: 2}}
launch: {{use_cpu: true}}
""".replace("GAMES", str(RECIPES))


@pytest.fixture(scope="module")
def played(tmp_path_factory, guesser):
    """A workshop in which a model that always guesses 5 was trained for a step."""
    workshop = Workshop(tmp_path_factory.mktemp("played"), guesser)
    done = workshop.grpo("train", workshop.write(PLAYED))
    assert done.returncode == 0, done.stderr
    return workshop


def test_episodes_are_measured_before_and_after_and_again(played):
    before = logged(played, "before")
    samples = [
        json.loads(line) for line in (played.run / "eval" / "before.jsonl").read_text().splitlines()
    ]
    won = [sample["episode"]["turns"] == 1 for sample in samples]
    assert 0 < sum(won) < len(won) == 48
    assert all(
        (sample["rewards"]["environment"], sample["episode"]["end"], len(sample["messages"]))
        == ((1, "done", 2) if right else (0, "turns", 6))
        for sample, right in zip(samples, won, strict=True)
    )
    assert before["accuracy"] == {"environment": sum(won) / 48}
    assert before["turns"] == before["calls"] == 3 - 2 * sum(won) / 48
    result = evaluate(played, played.run, "--samples", "1", "--temperature", "0")
    metrics = result["subjects"]["base"]["metrics"]
    again = {name: metrics[name]["value"] for name in ("accuracy/environment", "turns", "calls")}
    assert again == {
        "accuracy/environment": before["accuracy"]["environment"],
        "turns": before["turns"],
        "calls": before["calls"],
    }
    assert metrics["valid_calls"]["value"] == 1
    assert metrics["failed_calls"]["value"] == metrics["cut_off_turns"]["value"] == 0
    assert "accuracy/environment is the same for final and base" in result["verdicts"]["final"]


def test_other_held_out_episodes_are_told_apart_though_all_prompts_are_empty(played, tmp_path):
    other = Workshop(tmp_path, played.model)
    path = other.folder / "recipe.yaml"
    path.write_text((played.folder / "recipe.yaml").read_text())
    done = other.grpo("train", path, "--set", "dataset.eval_seed=9")
    assert done.returncode == 0, done.stderr
    assert logged(other, "before")["held_out"] != logged(played, "before")["held_out"]


def test_guesses_at_temperature_1_win_as_often_as_blind_ones_do_and_have_pass_at_k(played):
    flags = ["--samples", "8", "--temperature", "1", "--baseline", "none", "--out", "warm"]
    found = evaluate(played, played.run, *flags, "--fail-under", "turns=1")
    metrics = found["subjects"]["final"]["metrics"]
    won, blind = metrics["accuracy/environment"], 1 - (8 / 9) ** 3
    assert won["low"] < blind < won["high"]
    assert metrics["pass@8/environment"]["value"] > won["value"]
    lines = (played.folder / "warm" / "samples" / "final.0.jsonl").read_text().splitlines()
    (first, *_), chunk = json.loads(lines[0])["messages"], json.loads(lines[0])["chunk_size"]
    assert (first["role"], len(lines)) == ("assistant", 192)
    assert chunk < 192
