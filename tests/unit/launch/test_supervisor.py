"""What the supervisor does while its process lives."""

import sys
from dataclasses import replace

from grpo_cli.launch.plan import plan_launch
from grpo_cli.launch.supervisor import supervise
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.runs.folder import StatusFile
from tests.recipe_texts import GOOD, write_recipe
from tests.run_folders import make_run

WORKER = """
import os, time
print("threads", os.environ["OMP_NUM_THREADS"], os.environ["PYTHONSAFEPATH"])
time.sleep(1.5)
"""


def test_a_process_has_the_planned_environment_and_is_looked_at_while_it_lives(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    recipe = load_recipe(
        write_recipe(tmp_path, f"{GOOD}launch: {{use_cpu: true, stall_timeout_s: 1}}\n")
    )
    folder = make_run(tmp_path)
    folder.launch.mkdir(exist_ok=True)
    folder.log.parent.mkdir(parents=True)
    StatusFile(folder.status).update(state="running")
    # A sign of an earlier attempt does not make this one's start a stall.
    (folder.launch / "rank_0.beat").touch()
    plan = plan_launch(recipe, folder.path, Hardware(gpus=0, cpus=3))
    plan = replace(plan, argv=(sys.executable, "-c", WORKER))
    states = []
    outcome = supervise(
        plan, folder, lambda: states.append(StatusFile(folder.status).read().state), print, print
    )
    assert "threads 3 1" in folder.log.read_text()
    assert states.count("running") >= 3
    assert outcome.status.reason == "the worker ended before the run was finished, without an error"
