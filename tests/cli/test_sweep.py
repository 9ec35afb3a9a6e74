"""`grpo sweep` before it trains: what is refused, and what a dry run says."""

import json
from pathlib import Path

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.machine import Hardware
from grpo_cli.runs.folder import StatusFile
from grpo_cli.sweep.page import list_reasons, rank_cells
from grpo_cli.sweep.plan import SweepRequest, plan_slots, read_seeds, split_values
from tests.cli.test_commands import grpo
from tests.recipe_texts import write_recipe
from tests.run_folders import make_finished_run
from tests.slurm_standin import Cluster

RATES = "training.learning_rate=1e-6,1e-5"


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            ["training.lerning_rate=1,2"],
            ["--grid training.lerning_rate: training.lerning_rate: unknown key", "`learning_rate`"],
        ),
        (
            ["training.learning_rate=1e-5,fast,-1"],
            ["(got 'fast')", "(got -1)", "2 problems; nothing was started"],
        ),
        (
            ["generation.num_generations=2,3", RATES],
            ["--grid generation.num_generations=3: ", "does not hold whole groups of 3"],
        ),
        (
            ["generation.num_generations=2,3", "training.per_device_train_batch_size=4,6"],
            ["(with num_generations=3, per_device_train_batch_size=4)"],
        ),
        (["training.learning_rate="], ["is not `path=values`"]),
        (["seed=1,2"], ["it is set with --seeds"]),
        ([RATES, RATES], ["is given twice"]),
        (
            ["training.learning_rate=1e-5,0.00001"],
            ["learning_rate=1e-5 and learning_rate=0.00001 are the same recipe"],
        ),
        ([], ["there is nothing to vary"]),
        ([RATES, "--seeds", "1,1"], ["names one twice"]),
        ([RATES, "--seeds", "0"], ["names none"]),
        ([RATES, "--seeds", "42"], ["Fix: for the seed 42 alone, write --seeds 42,"]),
        ([RATES, "--seeds", "some"], ["is neither a number nor a list"]),
        (["--search", "3"], ["--search and --range are gone. Fix: list the values"]),
        (["launch.num_machines=1,2", "--slurm"], ["all tasks of a job array get the same nodes"]),
        ([RATES, "--resume", "latest"], ["--resume takes everything from the sweep"]),
        (["--resume", "latest"], ["no sweep is in"]),
        (["--resume", "."], [". is not a sweep"]),
    ],
)
def test_bad_grids_are_refused_before_anything_starts(tmp_path, flags, messages):
    recipe = write_recipe(tmp_path)
    sets = [
        "--set",
        "generation.num_generations=2",
        "--set",
        "training.per_device_train_batch_size=4",
    ]
    words = []
    for word in flags:
        is_grid = "=" in word and (not words or words[-1] not in ("--seeds", "--resume"))
        words += ["--grid", word] if is_grid else [word]
    done = grpo("sweep", recipe, *words, *([] if "--resume" in flags else sets), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    for message in messages:
        assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_lists_the_cells_and_leaves_nothing(tmp_path):
    recipe = write_recipe(tmp_path)
    flags = ["--grid", RATES, "--seeds", "2", "--dry-run"]
    done = grpo("sweep", recipe, *flags, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    rates = [each["training.learning_rate"] for each in told["settings"]]
    assert (told["cells"], rates, len(told["seeds"])) == (2, ["1e-6", "1e-5"], 2)
    assert "recipe.yaml:5:3: dataset: nothing is held out, so cells are ranked by" in done.stderr
    held_out = "--set", "dataset.eval_fraction=0.5"
    done = grpo("sweep", recipe, *flags, *held_out, cwd=tmp_path)
    assert "2 cells × 2 seeds = 4 runs, 1 at a time" in done.stdout
    assert "ranked by" not in done.stderr
    done = grpo("sweep", recipe, *flags, *held_out, "--set", "evaluation.limit=0", cwd=tmp_path)
    assert "evaluation.limit: nothing is held out" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_cells_that_are_equally_good_are_tied():
    mean = {"value": 0.5, "low": None, "high": None, "prompts": 9, "reason": "the same"}
    cell = {"mean": mean, "difference": None, "before": 0.25, "runs": [], "settings": {}}
    cells = [{**cell, "cell": 1}, {**cell, "cell": 2}, {**cell, "cell": 3, "mean": None}]
    ranked = rank_cells({"cells": cells, "best": 2})
    assert [each["is_best"] and each["standing"] for each in ranked] == ["tied", "tied", False]
    assert list_reasons(ranked) == ["no interval of cells 1, 2: the same"]


def test_a_sweep_in_place_of_a_recipe_is_resumed(tmp_path):
    done = grpo("sweep", "latest", cwd=tmp_path)
    assert done.returncode == 2
    assert "Fix: grpo sweep --resume latest" in done.stderr


def test_values_are_split_at_commas_outside_brackets_and_quotes():
    assert split_values("1e-5, 1e-4") == ["1e-5", "1e-4"]
    assert split_values("{r: 8, lora_alpha: 16},null") == ["{r: 8, lora_alpha: 16}", "null"]
    assert split_values("'a, b',[c, d]") == ["'a, b'", "[c, d]"]


def test_seeds_are_a_number_or_a_list():
    assert read_seeds("3", 42) == (42, 43, 44)
    assert read_seeds("1,2,7", 42) == (1, 2, 7)
    assert read_seeds("7,", 42) == (7,)


def test_each_run_gets_devices_of_its_own(tmp_path, monkeypatch):
    request = SweepRequest(str(write_recipe(tmp_path)), str(tmp_path), (), (RATES,), (1,))
    point, four = request.points()[0], Hardware(4, 16, names=("4", "5", "6", "7"))

    def share(*overrides, parallel=None, hardware=four):
        given = SweepRequest(**{**vars(request), "overrides": overrides})
        seen, slots = plan_slots(given, point, hardware, parallel)
        return seen.gpus, [each.get("CUDA_VISIBLE_DEVICES") for each in slots]

    assert share() == (1, ["4", "5", "6", "7"])
    assert share(parallel=2) == (2, ["4,5", "6,7"])
    assert share("launch.num_processes=2") == (2, ["4,5", "6,7"])
    assert share("launch.use_cpu=true") == (4, [None])
    assert plan_slots(request, point, Hardware(0, 8), 2)[1] == [{"OMP_NUM_THREADS": "4"}] * 2
    with pytest.raises(UsageError, match="--parallel 8: each run takes 1 of the 4 GPUs"):
        share(parallel=8)
    server = "generation.backend=vllm", "generation.vllm.base_url=http://a:1"
    with pytest.raises(UsageError, match="cannot share the vLLM server at http://a:1"):
        share(*server, parallel=2)


def test_a_job_array_is_submitted_read_and_submitted_again(tmp_path):
    cluster = Cluster(tmp_path / "slurm")

    def sweep(*flags):
        done = grpo("sweep", *flags, "--json", cwd=tmp_path, **cluster.environment)
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr

    def read_states():
        told = sweep("--resume", "latest")
        return {(cell["cell"], run["seed"]): run for cell in told["cells"] for run in cell["runs"]}

    flags = ["--grid", RATES, "--seeds", "2", "--slurm"]
    told = sweep(write_recipe(tmp_path), *flags, "--parallel", "2")
    assert (told["job"], told["tasks"]) == ("7", 4)
    assert "#SBATCH --array=0-3%2\n" in (cluster.folder / "job.sh").read_text()

    # The tasks are both cells with the first seed, then with the second.
    cluster.queue({1: "PENDING", 2: "RUNNING"})
    runs = read_states()
    for seed, key, changes in [
        (1, (1, 42), {}),
        (2, (2, 42), {"state": "stopped", "step": 3, "total_steps": 40}),
    ]:
        folder = make_finished_run(tmp_path / "made", seed)
        StatusFile(folder.status).update(**changes)
        folder.path.rename(runs[key]["run"])
    states = {key: (run["state"], run["reason"]) for key, run in read_states().items()}
    assert states[1, 42] == ("completed", None)
    assert states[2, 42] == ("waiting", "step 3/40")
    assert states[1, 43] == ("running", "starting")
    assert states[2, 43][0] == "interrupted"
    assert states[2, 43][1].endswith("logs/slurm-7_3.log")
    assert "job 7 has 2 tasks in the queue" in sweep("--resume", "latest", "--slurm")

    cluster.queue({})
    done = grpo("sweep", "--resume", "latest", cwd=tmp_path, **cluster.environment)
    assert "3 runs are not finished. To submit them again: grpo sweep --resume" in done.stderr
    assert sweep("--resume", "latest", "--slurm")["tasks"] == 3
    script = (cluster.folder / "job.sh").read_text()
    assert "#SBATCH --array=1-3\n" in script
    assert f"run_id={Path(runs[1, 42]['run']).name}\n" not in script


def test_a_sweep_that_slurm_refuses_leaves_no_folder(tmp_path):
    cluster = Cluster(tmp_path / "slurm")
    cluster.write("sbatch", "#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    flags = ["--grid", RATES, "--slurm"]
    done = grpo("sweep", write_recipe(tmp_path), *flags, cwd=tmp_path, **cluster.environment)
    assert done.returncode == 1
    assert "invalid partition" in done.stderr
    assert not list(tmp_path.glob("runs/good/sweeps/*"))
