import http.server
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from trl.generation import vllm_generation

from grpo_cli.launch.server_plan import plan_training_server
from grpo_cli.models.vllm_engine import (
    AUTOMATIC,
    adapter_rank,
    engine_settings,
    model_length,
    pick_dtype,
)
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.training.vllm_client import RunClient, VLLMLink
from grpo_cli.training.vllm_generation import linked_vllm
from grpo_cli.training.vllm_weights import SyncWatch
from tests.recipe_texts import write_recipe

VLLM = "generation.backend=vllm"


def recipe(tmp_path, *flags):
    return load_recipe(write_recipe(tmp_path), [VLLM, *flags])


@pytest.mark.parametrize(
    ("flags", "device", "share"),
    [
        # What is left beside a colocated training is not what an evaluation has.
        ([], "cuda", 0.9),
        (["generation.vllm.gpu_memory_utilization=0.3"], "cuda", 0.9),
        (
            ["generation.vllm={mode: server, gpu_memory_utilization: 0.5, base_url: 'http://x:1'}"],
            "cuda",
            0.5,
        ),
        (["generation.vllm.gpu_memory_utilization=0.1"], "cpu", 0.1),
        ([], "cpu", 0.2),
    ],
)
def test_an_engine_that_measures_has_the_gpu_to_itself(tmp_path, flags, device, share):
    settings = engine_settings(recipe(tmp_path, *flags), device)
    assert settings["gpu_memory_utilization"] == share


@pytest.mark.parametrize(
    ("flags", "device", "dtype"),
    [
        (["model.dtype=float32"], "cuda", "bfloat16"),
        (["model.dtype=auto"], "cuda", "bfloat16"),
        (["model.dtype=float32", "training.fp16=true"], "cuda", "float16"),
        (["model.dtype=float32", "training.bf16=false"], "cuda", "float32"),
        (["model.dtype=float32"], "cpu", "float32"),
        (["model.dtype=auto"], "cpu", None),
    ],
)
def test_vllm_samples_in_the_precision_that_training_computes_in(tmp_path, flags, device, dtype):
    assert pick_dtype(recipe(tmp_path, *flags), device) == dtype


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        (["dataset.max_prompt_length=100", "generation.max_completion_length=50"], 150),
        (["generation.max_completion_length=50"], AUTOMATIC),
        (["dataset.max_prompt_length=100", "tools=[{kind: function, path: 'a.py:f'}]"], AUTOMATIC),
        (["dataset.max_prompt_length=100", "generation.vllm.max_model_length=99"], 99),
    ],
)
def test_vllm_holds_the_lengths_of_the_recipe_and_not_all_that_the_model_could(
    tmp_path, flags, length
):
    found = recipe(tmp_path, *flags)
    assert model_length(found) == length
    assert engine_settings(found, "cuda")["max_model_len"] == length
    argv = plan_training_server(
        found, ("vllm", "serve"), "m", host="127.0.0.1", port=1, device="cuda"
    ).argv
    told = argv[argv.index("--max-model-len") + 1]
    assert told == ("auto" if length == AUTOMATIC else str(length))


SERVER = "generation.vllm.mode=server"


@pytest.mark.parametrize(
    ("flags", "rank"),
    [
        (["model.lora={r: 16}"], 16),
        (["model.lora={r: 300, use_rslora: true}"], 320),
        (["model.lora={target_modules: [q_proj, v_proj]}"], 16),
        (["model.lora={target_modules: '.*q_proj'}", SERVER], 16),
        ([], None),
        (["model.lora={}", "generation.vllm.enable_lora=false"], None),
        (["model.lora={use_dora: true}"], None),
        (["model.lora={modules_to_save: [lm_head]}"], None),
        (["model.lora={target_modules: [q_proj, embed_tokens]}"], None),
        (["model.lora={target_modules: '.*'}"], None),
        (["model.lora={r: 4, rank_pattern: {q_proj: 20}, bias: none}"], 32),
        (["model.lora={rank_pattern: {q_proj: 600}}"], None),
        (["model.lora={bias: all}"], None),
        (["model.lora={target_parameters: [mlp.experts.down_proj]}"], None),
        (["model.lora={r: 600}"], None),
        (["model.lora={}", "generation.vllm.enable_sleep_mode=true"], None),
        (["model.lora={}", SERVER, "training.mode=async"], None),
        (["model.lora={}", SERVER, "model.dtype=float32", "training.bf16=false"], None),
    ],
)
def test_vllm_gets_an_adapter_if_it_can_sample_with_it(tmp_path, flags, rank):
    found = recipe(tmp_path, *flags)
    assert adapter_rank(found, "cuda") == rank
    plan = plan_training_server(
        found, ("vllm", "serve"), "m", host="127.0.0.1", port=1, device="cuda"
    )
    line = plan.command_line()
    assert ("--enable-lora" in line) == (rank is not None)
    assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in line) == (rank is not None)
    assert (f"--max-lora-rank {rank}" in line) == (rank is not None)


def test_vllm_reads_images_as_training_does_and_gets_adapters_of_the_vision_part_merged(tmp_path):
    images = ["dataset.prompt.images=picture", "model.processor={max_pixels: 100}"]
    found = recipe(tmp_path, *images, SERVER, "model.lora={target_modules: [q_proj, v_proj]}")
    assert engine_settings(found, "cuda")["mm_processor_kwargs"] == {"max_pixels": 100}
    plan = plan_training_server(
        found, ("vllm", "serve"), "m", host="127.0.0.1", port=1, device="cuda"
    )
    assert "--enable-scale-out" in plan.argv
    assert plan.argv[plan.argv.index("--mm-processor-kwargs") + 1] == '{"max_pixels": 100}'
    assert adapter_rank(found, "cuda") is None
    assert adapter_rank(recipe(tmp_path, *images, "model.lora={}"), "cuda") == 16


def test_an_engine_in_the_training_has_the_recipes_revision_and_seed(tmp_path, monkeypatch):
    flags = ["model.path=org/model", "model.revision=v2", "model.lora={}", "seed=7"]
    found = recipe(tmp_path, *flags)
    session = SimpleNamespace(
        recipe=found, folder=RunFolder(tmp_path), cpu=False, end_hung=pytest.fail
    )
    monkeypatch.setattr(vllm_generation, "LLM", lambda **options: options, raising=False)
    with linked_vllm(session):
        # As TRL does in process 3.
        options = vllm_generation.LLM(model="org/model", seed=3)
    # An adapter alone is sent: no other weights take the place of these.
    assert options["enable_lora"]
    assert options["revision"] == "v2"
    assert options["seed"] == 10


class Refusing(http.server.BaseHTTPRequestHandler):
    """A server that dies, or refuses, when it should take weights."""

    def do_POST(self):
        if self.path == "/update_weights":
            self.connection.close()
        else:
            self.send_error(500)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("path", "aborted"), [("/update_weights", ["comm"]), ("/pause", [])])
def test_a_server_that_fails_to_take_weights_frees_the_broadcast(path, aborted):
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        client = object.__new__(RunClient)
        seen = []
        client.session = requests.Session()
        client.link = VLLMLink(Path(), SyncWatch(), print, print)
        client.communicator = SimpleNamespace(
            nccl=SimpleNamespace(ncclCommAbort=seen.append), comm="comm"
        )
        with pytest.raises(Exception, match=r"Connection|500"):
            client._post(f"http://127.0.0.1:{server.server_port}{path}", json={})
    assert seen == aborted
