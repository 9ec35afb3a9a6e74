"""The script of a job: its text, what cannot be smuggled into it, and what it does when the training ends."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import RecipeError, RunError, SetupError, UsageError
from grpo_cli.launch.slurm import ArrayTask, JobArray, JobRequest, plan_job, submit
from grpo_cli.recipe.loading import load_recipe
from tests.recipe_texts import GOOD, write_recipe
from tests.slurm_standin import Cluster

RECIPE, RUNS, HERE = Path("/home/me/my recipe.yaml"), Path("/scratch/runs"), Path("/home/me")
SERVER = "generation:\n  backend: vllm\n  vllm: {mode: server}\n"


def plan(tmp_path, launch="{}", text=GOOD, **request):
    recipe = load_recipe(write_recipe(tmp_path, f"{text}launch: {launch}\n"))
    given = {"overrides": (), "runs": RUNS, "folder": HERE, **request}
    planned = plan_job(recipe, JobRequest(RECIPE, **given))
    checked = subprocess.run(["bash", "-n"], input=planned.script, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    return planned


def directives(planned):
    lines = planned.script.splitlines()
    return [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]


def test_a_job_needs_no_setting(tmp_path):
    planned = plan(tmp_path)
    assert directives(planned) == [
        "job-name=good",
        "nodes=1",
        "ntasks-per-node=1",
        "chdir=/home/me",
        "output=/scratch/runs/good/slurm-%j.log",
        "open-mode=append",
        "requeue",
        "signal=TERM@120",
    ]
    assert planned.script.startswith("#!/bin/bash\n#SBATCH")
    assert f"{sys.executable} -m grpo_cli train '/home/me/my recipe.yaml'" in planned.script
    assert '--runs /scratch/runs --run-id "slurm-$SLURM_JOB_ID" --resume' in planned.script
    # One machine finds itself.
    assert "scontrol show" not in planned.script
    assert planned.run == "/scratch/runs/good/slurm-$SLURM_JOB_ID"


def test_every_setting_has_its_line(tmp_path):
    planned = plan(
        tmp_path,
        "{num_machines: 2, slurm: {partition: gpu, account: lab, qos: long, constraint: 'a100&nvlink', "
        "time: 2-12:00:00, mem: 0, gpus_per_node: 'a100:4', cpus_per_task: 16, exclusive: true, "
        "signal_before_end_s: 600, options: {mail-type: END, hold: true, overcommit: false}}}",
    )
    lines = directives(planned)
    for line in (
        "partition=gpu",
        "account=lab",
        "qos=long",
        'constraint="a100&nvlink"',
        "time=2-12:00:00",
        "mem=0",
        "gpus-per-node=a100:4",
        "cpus-per-task=16",
        "exclusive",
        "signal=TERM@600",
        "mail-type=END",
        "hold",
        "nodes=2",
    ):
        assert line in lines
    assert not any("overcommit" in line for line in lines)
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=16" in planned.script


def test_machines_meet_at_the_first_node_and_number_themselves(tmp_path):
    script = plan(tmp_path, "{num_machines: 2}").script
    assert "port=$((15000 + SLURM_JOB_ID % 15000))" in script
    assert '--set "launch.main_process_ip=${nodes[0]}"' in script
    assert 'exec "$@" --set "launch.machine_rank=$SLURM_PROCID"' in script
    assert script.count("\nsrun ") == 1


def test_setup_lines_come_before_everything(tmp_path):
    script = plan(
        tmp_path, "{slurm: {setup: [module load cuda, source .venv/bin/activate]}}"
    ).script
    # They read variables that are not set, as conda's do.
    assert "set +u\nmodule load cuda\nsource .venv/bin/activate\nset -u\n" in script
    assert script.index("set -euo pipefail") < script.index("module load") < script.index("srun")
    one = plan(tmp_path, "{slurm: {setup: module load cuda}}").script
    assert "set +u\nmodule load cuda\nset -u\n" in one


def test_flags_of_the_user_are_passed_on_as_they_were(tmp_path):
    evil = "logging.run_name=a b'; touch /tmp/x; $(id) `id` \"\n#SBATCH --hold"
    script = plan(tmp_path, overrides=(evil, "seed=1"), flags=("--force",)).script
    inside = script.partition("train=(")[2].partition("\n)\n")[0]
    words = shlex.split(inside)
    assert words[words.index("--set") + 1] == evil
    assert "--force" in words
    assert words[-1] == "seed=1"


def test_an_earlier_run_can_be_named(tmp_path):
    planned = plan(tmp_path, run_id="slurm-12")
    assert "--run-id slurm-12 --resume" in planned.script
    assert planned.run == "/scratch/runs/good/slurm-12"


@pytest.mark.parametrize(
    "slurm",
    [
        r'{partition: "gpu\n#SBATCH --wrap=id"}',
        r'{account: "a\rb"}',
        r'{time: "1\n2"}',
        r"""{qos: 'a" b'}""",
        r'{options: {comment: "x\nrm -rf ~"}}',
        r'{options: {"hold\nrm": true}}',
        r'{options: {"--hold": true}}',
        r'{gpus_per_node: "a100:4 --hold"}',
        "{signal_before_end_s: 0}",
        "{max_requeues: '1; id'}",
    ],
)
def test_nothing_gets_into_the_script_by_a_value(tmp_path, slurm):
    with pytest.raises(RecipeError, match=r"launch\.slurm"):
        plan(tmp_path, f"{{slurm: {slurm}}}")


@pytest.mark.parametrize("text", ["$(id)", "`id`", "a # b", "a b; id", "'", "~/x"])
def test_what_looks_like_shell_stays_a_value_of_sbatch(tmp_path, text):
    quoted = text.replace("'", "''")
    (line,) = [
        line
        for line in directives(plan(tmp_path, f"{{slurm: {{options: {{comment: '{quoted}'}}}}}}"))
        if line.startswith("comment")
    ]
    assert line == f'comment="{text}"'


def test_a_path_that_sbatch_cannot_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="without double quotes"):
        plan(tmp_path, runs=Path('/scratch/my"runs'))
    assert "output=/scratch/100%%/good/slurm-%j.log" in directives(
        plan(tmp_path, runs=Path("/scratch/100%"))
    )


def test_a_server_takes_the_last_node(tmp_path):
    text = GOOD.replace("generation:\n", SERVER)
    script = plan(tmp_path, "{num_machines: 2, slurm: {server_nodes: 1}}", text).script
    assert "#SBATCH --nodes=3" in script
    assert 'srun --nodes=1 --ntasks=1 --nodelist="$server_node" bash -c' in script
    assert 'my recipe.yaml\' --host 0.0.0.0 --port "$server_port" --timeout 3600 &' in script
    assert '--nodelist="$(IFS=,; echo "${nodes[*]:0:2}")"' in script
    assert '--set "generation.vllm.base_url=http://$server_node:$server_port"' in script
    # TRL's trainers all wait for their server at 51216, and jobs may share a node.
    assert "group_port=$((30000 + SLURM_JOB_ID % 1000))" in script
    assert '--set "generation.vllm.group_port=$group_port"' in script


def problems(tmp_path, slurm, text=GOOD):
    checked = check_recipe(write_recipe(tmp_path, f"{text}launch: {{slurm: {slurm}}}\n"))
    return [str(problem) for problem in checked.problems if "slurm" in problem.path]


def test_a_server_that_nobody_talks_to_is_refused(tmp_path):
    (said,) = problems(tmp_path, "{server_nodes: 1}")
    assert "launch.slurm.server_nodes: a node for the vLLM server is of no use" in said
    assert not problems(tmp_path, "{server_nodes: 1}", GOOD.replace("generation:\n", SERVER))


def test_options_with_a_home_and_misspelt_keys_are_refused(tmp_path):
    said = "\n".join(problems(tmp_path, "{options: {nodes: 3, mem: 1, output: x, array: 0-3}}"))
    assert "options.nodes: `nodes` is set already (by `launch.num_machines`). Fix: use" in said
    assert "options.mem: `mem` is set already (by `launch.slurm.mem`)" in said
    assert "options.output: `output` is a file beside the run folder. Fix: remove it" in said
    assert "array" not in said
    (said,) = problems(tmp_path, "{partiton: gpu}")
    assert said.endswith("unknown key `partiton`. Fix: write `partition`")


FAR, NEAR = 3600, 60


@pytest.mark.parametrize(
    ("code", "left", "restarts", "launch", "ends", "asked"),
    [
        (0, NEAR, 0, "{}", 0, []),
        (1, NEAR, 0, "{}", 1, []),
        (143, NEAR, 0, "{}", 0, ["requeue 7"]),
        (130, NEAR, 9, "{}", 0, ["requeue 7"]),
        # Preempted, which Slurm sees to, or cancelled.
        (143, FAR, 0, "{}", 143, []),
        (143, NEAR, 10, "{}", 143, []),
        (143, NEAR, 2, "{slurm: {max_requeues: 2}}", 143, []),
        (143, NEAR, 0, "{slurm: {requeue: false}}", 143, []),
    ],
)
def test_what_follows_the_end_of_the_training(tmp_path, code, left, restarts, launch, ends, asked):
    cluster = Cluster(tmp_path / "slurm")
    cluster.write("srun", f"#!/bin/sh\nexit {code}\n")
    (cluster.folder / "job.sh").write_text(plan(tmp_path, launch).script)
    job = cluster.start(tmp_path, restarts=restarts, seconds_left=left)
    said, _ = job.communicate(timeout=60)
    assert (job.returncode, cluster.asked) == (ends, asked), said


def test_a_job_that_is_in_the_queue_already_fails_no_script(tmp_path):
    cluster = Cluster(tmp_path / "slurm")
    cluster.write("srun", "#!/bin/sh\nexit 143\n")
    cluster.write("scontrol", "#!/bin/sh\nexit 1\n")
    (cluster.folder / "job.sh").write_text(plan(tmp_path).script)
    job = cluster.start(tmp_path, seconds_left=NEAR)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 143
    assert "it may be in the queue already" in said


def test_a_task_of_an_array_trains_its_own_run_and_is_requeued_alone(tmp_path):
    cluster = Cluster(tmp_path / "slurm")
    cluster.write("srun", '#!/bin/sh\nprintf "%s\\n" "$@"\nexit 143\n')
    evil = "logging.run_name=a b'; $(id) \"\n#SBATCH --hold"
    tasks = tuple(ArrayTask(n, f"now-{n}", (evil, f"seed={n}")) for n in (0, 1))
    planned = plan(tmp_path, overrides=("a=b",), array=JobArray(tasks, 1, RUNS / "50%" / "logs"))
    assert {"array=0-1%1", "output=/scratch/runs/50%%/logs/slurm-%A_%a.log"} <= set(
        directives(planned)
    )
    (cluster.folder / "job.sh").write_text(planned.script)
    job = cluster.start(tmp_path, seconds_left=NEAR, task=1)
    said, _ = job.communicate(timeout=60)
    assert f"--run-id\nnow-1\n--resume\n--set\na=b\n--set\n{evil}\n--set\nseed=1\n" in said
    # Task 0 has the number of the array, so that alone would requeue both.
    assert (job.returncode, cluster.asked) == (0, ["requeue 7_1"]), said


@pytest.mark.parametrize(
    ("numbers", "parallel", "option"),
    [((0,), None, "0"), ((2, 3, 4), None, "2-4"), ((0, 2, 3), 2, "0,2,3%2")],
)
def test_the_tasks_of_an_array_are_named_in_short(numbers, parallel, option):
    tasks = tuple(ArrayTask(number, "now", ()) for number in numbers)
    assert JobArray(tasks, parallel, RUNS).option == option


def test_the_server_outlives_a_stop_and_ends_with_the_script(tmp_path):
    # What serves and trains notes down what happens to it, in the place of grpo.
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\ntrap 'echo \"$3 asked\" >> events; exit 143' TERM\n"
        'echo "$3 begins" >> events\n'
        "for _ in $(seq 100); do sleep 0.1; done\n"
    )
    python.chmod(0o755)
    cluster = Cluster(tmp_path / "slurm")
    text = GOOD.replace("generation:\n", SERVER)
    script = plan(tmp_path, "{slurm: {server_nodes: 1}}", text).script
    (cluster.folder / "job.sh").write_text(script.replace(sys.executable, str(python)))
    job = cluster.start(tmp_path)
    events = tmp_path / "events"
    pids = [cluster.folder / f"{step}.pid" for step in ("server", "srun")]
    for _ in range(100):
        begun = events.is_file() and len(events.read_text().splitlines()) == 2
        if begun and all(pid.is_file() and pid.read_text() for pid in pids):
            break
        time.sleep(0.1)
    for pid in pids:
        subprocess.run(["kill", "-TERM", pid.read_text()], check=True)
    job.communicate(timeout=60)
    assert job.returncode == 143
    told = events.read_text().splitlines()
    assert sorted(told[:2]) == ["serve begins", "train begins"]
    assert told[2:] == ["train asked", "serve asked"]


def test_a_job_is_handed_over_and_gets_its_number(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path / "slurm")
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    planned = plan(tmp_path)
    assert submit(planned, tmp_path / "runs" / "good") == "7"
    assert (cluster.folder / "job.sh").read_text() == planned.script
    assert (cluster.folder / "sbatch").read_text() == "--parsable\n"
    assert (tmp_path / "runs" / "good").is_dir()
    cluster.write("sbatch", "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    with pytest.raises(RunError, match="invalid partition"):
        submit(planned, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="there is no sbatch"):
        submit(planned, tmp_path)
