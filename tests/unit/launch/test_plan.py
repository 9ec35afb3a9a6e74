import os
import sys
from pathlib import Path

import pynvml
import pytest

from grpo_cli.launch.plan import plan_launch, set_thread_env
from grpo_cli.launch.server_plan import ServerLocation
from grpo_cli.machine import Hardware, find_gpus, resolve_num_processes
from grpo_cli.recipe.loading import load_recipe
from tests.recipe_texts import GOOD, write_recipe

RUN = Path("/runs/good/1")
CPU, FOUR_GPUS = Hardware(gpus=0, cpus=8), Hardware(gpus=4, cpus=32)


def recipe_of(tmp_path, launch="", generation=""):
    text = GOOD.replace("generation:\n", f"generation:\n{generation}")
    text += f"launch: {launch}\n" if launch else ""
    return load_recipe(write_recipe(tmp_path, text))


def plan(tmp_path, launch="", hardware=CPU):
    return plan_launch(recipe_of(tmp_path, launch), RUN, hardware)


def test_one_process_is_started_without_a_launcher(tmp_path):
    planned = plan(tmp_path)
    assert planned.argv == (sys.executable, "-P", "-m", "grpo_cli.training.worker", str(RUN))
    assert (planned.strategy, planned.device, planned.num_processes) == ("single", "cpu", 1)
    assert planned.environment["OMP_NUM_THREADS"] == "8"


def test_several_processes_go_through_accelerate(tmp_path):
    planned = plan(tmp_path, "{num_processes: 2}")
    line = planned.command_line()
    assert f"-m accelerate.commands.launch --config_file {RUN}/launch/accelerate.yaml" in line
    assert planned.accelerate["num_processes"] == 2
    assert planned.accelerate["main_process_port"] == 0
    assert line.endswith(f"-m grpo_cli.training.worker {RUN}")
    assert planned.environment["OMP_NUM_THREADS"] == "4"


def test_threads_that_wait_soon_sleep(tmp_path):
    planned = plan(tmp_path, hardware=Hardware(gpus=0, cpus=8))
    assert planned.environment["GOMP_SPINCOUNT"] == "1000"
    own = {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "3"}
    found = planned.add_environment(own)
    assert own.items() <= found.items()
    # It would come before the policy.
    assert "GOMP_SPINCOUNT" not in found
    elsewhere = plan(tmp_path, hardware=Hardware(gpus=0, cpus=8, linux=False))
    assert "GOMP_SPINCOUNT" not in elsewhere.environment


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ({}, {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "1000"}),
        ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "4"}),
    ],
)
def test_a_process_of_ours_computes_as_a_worker_would(monkeypatch, present, found):
    environment = dict(present)
    monkeypatch.setattr(os, "environ", environment)
    set_thread_env(CPU, 2)
    assert environment == found


def test_a_config_of_ones_own_is_taken_and_the_world_is_still_ours(tmp_path):
    planned = plan(tmp_path, "{accelerate_config: mine.yaml, num_processes: 2}")
    assert (planned.strategy, planned.accelerate) == ("custom", None)
    line = planned.command_line()
    assert f"--config_file {tmp_path}/mine.yaml --log_dir " in line
    assert " --num_processes 2 --num_machines 1" in line


NO_GPU_HIDDEN = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@pytest.fixture
def driver(monkeypatch):
    """Stands in for NVIDIA's driver: call it with the number of GPUs that it knows, as in a container or WSL."""
    for name in NO_GPU_HIDDEN:
        monkeypatch.delenv(name, raising=False)

    def knows(gpus):
        monkeypatch.setattr("grpo_cli.machine.has_nvidia_driver", lambda: True)
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: gpus)

    return knows


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 2), ("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1,2,3", 2)],
)
def test_hidden_gpus_do_not_count(driver, monkeypatch, visible, expected):
    driver(2)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_gpus()[0] == expected


def test_a_machine_without_nvidias_driver_has_none_of_its_gpus(driver, tmp_path):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has NVIDIA's driver")
    assert find_gpus(tmp_path, tmp_path)[0] == 0


def test_amds_gpus_are_those_that_the_container_may_use(driver, tmp_path, monkeypatch):
    driver(0)
    nodes, renderers = tmp_path / "nodes", tmp_path / "dri"
    renderers.mkdir()
    for number, units in enumerate((0, 304, 304, 304)):
        node = nodes / str(number)
        node.mkdir(parents=True)
        node.joinpath("properties").write_text(
            f"cpu_cores_count {0 if units else 64}\nsimd_count {units}\ndrm_render_minor {127 + number}\n"
        )
    for number in (128, 129):
        (renderers / f"renderD{number}").touch()
    assert find_gpus(nodes, renderers)[0] == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert find_gpus(nodes, renderers)[0] == 1


def test_a_given_number_of_processes_wins(tmp_path):
    for launch, expected in (
        ("{num_processes: 3}", 3),
        ("{strategy: single}", 1),
        ("{num_machines: 2}", 8),
        ("{num_machines: 2, use_cpu: true}", 2),
    ):
        assert resolve_num_processes(recipe_of(tmp_path, launch), FOUR_GPUS) == expected


MANAGED = (
    "  backend: vllm\n  vllm: {mode: server, tensor_parallel_size: 2, max_model_length: 512}\n"
)


def test_a_managed_server_has_gpus_of_its_own(tmp_path):
    hardware = Hardware(gpus=3, cpus=32, names=("4", "6", "7"))
    location = ServerLocation(("/opt/vllm", "serve"), "/models/m", 8123, 50123)
    planned = plan_launch(recipe_of(tmp_path, "", MANAGED), RUN, hardware, location=location)
    assert planned.num_processes == 1
    assert planned.environment["CUDA_VISIBLE_DEVICES"] == "4"
    server = planned.server
    assert server.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert server.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert server.root == "http://127.0.0.1:8123"
    assert (server.group_port, server.max_restarts) == (50123, 3)
    line = server.command_line()
    assert "/opt/vllm serve /models/m --host 127.0.0.1 --port 8123" in line
    for flag in (
        "--max-model-len 512",
        "--tensor-parallel-size 2",
        """--weight-transfer-config '{"backend": "nccl"}'""",
        "--logprobs-mode processed_logprobs",
        "--max-logprobs -1",
    ):
        assert flag in line
    assert "--gpu-memory-utilization" not in line


def test_no_proxy_comes_between_a_training_and_its_server(tmp_path):
    """TRL's client would wait for ever for a proxy that does not find the server."""
    planned = plan_launch(recipe_of(tmp_path, "", MANAGED), RUN, FOUR_GPUS)
    assert planned.add_environment({})["no_proxy"] == "127.0.0.1"
    assert planned.add_environment({"NO_PROXY": ".lab"})["no_proxy"] == ".lab,127.0.0.1"
    elsewhere = MANAGED.replace("mode: server", "mode: server, base_url: http://node7:8000")
    planned = plan_launch(recipe_of(tmp_path, "", elsewhere), RUN, FOUR_GPUS)
    own = {"no_proxy": "hub", "NO_PROXY": ".lab"}
    assert planned.add_environment(own)["no_proxy"] == "hub,node7"
    assert "no_proxy" not in plan(tmp_path).add_environment({"NO_PROXY": ".lab"})


def test_an_asynchronous_training_ends_with_its_server(tmp_path):
    """It would not notice another one, and take samples of the initial weights for its own."""
    path = write_recipe(tmp_path, GOOD.replace("generation:\n", f"generation:\n{MANAGED}"))
    recipe = load_recipe(path, ["training.mode=async"])
    server = plan_launch(recipe, RUN, FOUR_GPUS).server
    assert server.max_restarts == 0


def test_the_devices_of_a_plan_win_over_those_that_were_visible(tmp_path):
    planned = plan_launch(recipe_of(tmp_path, "", MANAGED), RUN, FOUR_GPUS)
    added = planned.add_environment(
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "TOKENIZERS_PARALLELISM": "1"}
    )
    assert added["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert added["TOKENIZERS_PARALLELISM"] == "1"


def test_on_a_cpu_a_managed_server_takes_weights_from_a_folder(tmp_path):
    server = plan_launch(recipe_of(tmp_path, "", MANAGED), RUN, CPU).server
    line = server.command_line()
    assert "--weight-transfer-config" not in line
    assert "--tensor-parallel-size" not in line
    assert "--gpu-memory-utilization 0.2" in line
    assert "VLLM_CPU_OMP_THREADS_BIND=nobind" in line


def test_on_a_cpu_vllm_does_not_bind_the_training_to_some_cores(tmp_path):
    recipe = recipe_of(tmp_path, "", "  backend: vllm\n")
    assert plan_launch(recipe, RUN, CPU).environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plan_launch(recipe, RUN, FOUR_GPUS).environment
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plan(tmp_path).environment


def test_a_server_that_runs_already_is_not_started(tmp_path):
    for named in ("base_url: http://10.0.0.2:8000", "managed: false", "server_port: 8000"):
        generation = f"  backend: vllm\n  vllm: {{mode: server, {named}}}\n"
        planned = plan_launch(recipe_of(tmp_path, "", generation), RUN, FOUR_GPUS)
        assert planned.server is None
        assert planned.num_processes == 4


def test_flags_of_ones_own_come_last(tmp_path):
    more = "server_args: {max_num_seqs: 8, enforce-eager: true, enable-prefix-caching: false}"
    generation = f"  backend: vllm\n  vllm: {{mode: server, {more}}}\n"
    line = plan_launch(recipe_of(tmp_path, "", generation), RUN, FOUR_GPUS).server.command_line()
    assert line.endswith("--max-num-seqs 8 --enforce-eager --no-enable-prefix-caching")
