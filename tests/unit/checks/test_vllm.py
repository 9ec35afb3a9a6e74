import pytest

from grpo_cli.checks.batch import plan_from_flags
from grpo_cli.checks.compatibility import find_conflicts
from grpo_cli.checks.launch import check_gpus
from grpo_cli.checks.vllm import check_vllm
from grpo_cli.errors import RecipeError
from grpo_cli.machine import Hardware
from grpo_cli.recipe.episode import KindConfig
from grpo_cli.recipe.loading import load_recipe
from tests.contexts import make_context
from tests.recipe_texts import GOOD, write_recipe

GPUS = Hardware(gpus=2, cpus=8)


def load(tmp_path, vllm, launch="", backend="vllm"):
    generation = f"generation:\n  backend: {backend}\n  vllm: {{{vllm}}}\n"
    text = GOOD.replace("generation:\n", generation) + (f"launch: {launch}\n" if launch else "")
    return load_recipe(write_recipe(tmp_path, text))


@pytest.mark.parametrize(
    ("vllm", "launch", "path", "said"),
    [
        ("mode: server, tensor_parallel_size: 2", "", "mode", "leaves none to train on"),
        ("mode: server, managed: true, base_url: 'http://h:1'", "", "managed", "runs already"),
        ("mode: server, base_url: 'http://h:1', server_port: 2", "", "base_url", "both say where"),
        (
            "mode: colocate, gpu_memory_utilization: 1.5",
            "",
            "gpu_memory_utilization",
            "not between",
        ),
        ("mode: server, tensor_parallel_size: 0", "", "tensor_parallel_size", "not between"),
        (
            "mode: colocate, tensor_parallel_size: 2",
            "{num_processes: 3}",
            "tensor_parallel_size",
            "groups of 2 training processes share vLLM's model; 3 is not",
        ),
        ("mode: server, group_port: 99999", "", "group_port", "not between"),
        ("mode: colocate, base_url: 'http://h:1'", "", "base_url", "nothing samples from one"),
        ("mode: server, base_url: 'http://h:1'", "", "base_url", "must listen on this address"),
        (
            "mode: server, gpu_memory_utilization: 0.3",
            "",
            "gpu_memory_utilization",
            "a share for `colocate`",
        ),
    ],
)
def test_what_cannot_be_is_said(tmp_path, vllm, launch, path, said):
    (problem,) = check_vllm(make_context(load(tmp_path, vllm, launch), GPUS))
    assert said in problem.seen
    assert problem.path == ("generation.vllm" if path is None else f"generation.vllm.{path}")


@pytest.mark.parametrize(
    "launch", ["", "{num_processes: 4}", "{num_processes: auto, slurm: {time: 60}}"]
)
def test_processes_that_split_evenly_may_share_a_model(tmp_path, launch):
    recipe = load(tmp_path, "mode: colocate, tensor_parallel_size: 2", launch)
    assert list(check_vllm(make_context(recipe, GPUS))) == []


def test_a_job_may_have_other_devices_than_this_machine(tmp_path):
    recipe = load(tmp_path, "mode: colocate, tensor_parallel_size: 4", "{slurm: {time: 60}}")
    assert list(check_vllm(make_context(recipe, GPUS))) == []


@pytest.mark.parametrize(("size", "faults"), [(2, 0), (3, 1)])
def test_attention_heads_are_divided_among_gpus(tmp_path, size, faults):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"num_attention_heads": 4}')
    recipe = load(tmp_path, f"mode: server, tensor_parallel_size: {size}")
    found = list(check_vllm(make_context(recipe, Hardware(gpus=8, cpus=8))))
    assert ["4 attention heads" in each.seen for each in found] == [True] * faults


@pytest.mark.parametrize(("bits", "why"), [("4bit", "packed shape"), ("8bit", "8 bits")])
def test_quantized_weights_are_not_for_vllm(tmp_path, bits, why):
    text = GOOD.replace("generation:\n", "generation:\n  backend: vllm\n")
    recipe = load_recipe(
        write_recipe(tmp_path, text), [f"model.quantization={bits}", "model.lora={r: 8}"]
    )
    (problem,) = find_conflicts(recipe)
    assert (problem.level, problem.path) == ("error", "model.quantization")
    assert why in problem.seen


def test_a_server_beside_another_backend_is_said(tmp_path):
    (problem,) = check_vllm(
        make_context(load(tmp_path, "mode: server", backend="transformers"), GPUS)
    )
    assert "nothing samples from one" in problem.seen


def test_a_managed_server_stays_on_one_machine(tmp_path):
    launch = "{num_machines: 2, main_process_ip: a, main_process_port: 1}"
    (problem,) = check_vllm(make_context(load(tmp_path, "mode: server", launch), GPUS))
    assert "launch.slurm.server_nodes: 1" in problem.fix
    with_node = launch.replace("}", ", slurm: {server_nodes: 1}}")
    assert list(check_vllm(make_context(load(tmp_path, "mode: server", with_node), GPUS))) == []


@pytest.mark.parametrize(
    "address", ["http://h:abc", "http://127.0.0.1:99999", "http://[::1", "h:8000", "http://h/v1"]
)
def test_an_address_is_one(tmp_path, address):
    with pytest.raises(RecipeError, match=r"an address such as http://10\.0\.0\.2:8000"):
        load(tmp_path, f"mode: server, base_url: '{address}'")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("port: 9000", "may not hold port"),
        ("logprobs_mode: raw_logprobs", "may not hold logprobs-mode"),
        ("api-key: x", "may not hold api-key"),
        ("data-parallel-size: 2", "Fix: remove it; `generation.vllm.tensor_parallel_size` shares"),
        ("dtype: half", "which `model.dtype` decides .* and set `model.dtype`"),
        ("'--max-num-seqs': 1", "names no flag"),
        ("'a b': 1", "names no flag"),
    ],
)
def test_flags_that_training_depends_on_are_not_given(tmp_path, flags, said):
    with pytest.raises(RecipeError, match=said):
        load(tmp_path, f"mode: server, server_args: {{{flags}}}")


@pytest.mark.parametrize(
    ("launch", "processes", "path", "said"),
    [
        ("{num_processes: 1}", 1, "num_processes", "1 of the 2 GPUs"),
        ("{strategy: single}", 1, "strategy", "1 of the 2 GPUs"),
        ("{num_processes: 3}", 3, "num_processes", "grpo check --gpus N"),
        ("{num_machines: 2, num_processes: 2}", 2, "num_processes", "set `num_processes: 4`"),
    ],
)
def test_processes_and_gpus_that_differ_are_said(tmp_path, launch, processes, path, said):
    (issue,) = check_gpus(load(tmp_path, "mode: colocate", launch), processes, GPUS)
    assert issue.path == f"launch.{path}"
    assert said in str(issue)


def test_the_arithmetic_alone_refuses_processes_without_a_gpu_too(tmp_path):
    plan = plan_from_flags(write_recipe(tmp_path), ["launch.num_processes=8"], {}, gpus=4)
    assert not plan.valid
    assert plan.problems[-1].path == "launch.num_processes"


@pytest.mark.parametrize(("length", "count"), [(132, 1), (133, 0)])
def test_a_server_needs_room_for_a_turn_after_the_last(tmp_path, length, count):
    recipe = load(
        tmp_path, f"mode: server, base_url: 'http://127.0.0.1:1', max_model_length: {length}"
    )
    tools = {"kind": "function", "path": "tools.py:add"}
    generation = recipe.generation.model_copy(update={"max_completion_length": 128})
    episode = recipe.episode.model_copy(update={"max_turn_tokens": 4})
    changes = {"tools": (KindConfig(**tools),), "generation": generation, "episode": episode}
    problems = list(check_vllm(make_context(recipe.model_copy(update=changes), GPUS)))
    assert len(problems) == count
    assert all("refuses turns" in problem.seen for problem in problems)
