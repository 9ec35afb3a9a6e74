"""`grpo export` of real runs of tiny models: what comes out is loaded with its own tool and compared."""

import json
import shutil
import signal
import subprocess
import time

import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_cli.exporting.exporting import run_verification
from grpo_cli.exporting.request import make_request
from tests.hub_server import TOKEN, HubServer
from tests.in_process import verify_export
from tests.integration.conftest import RECIPE, Workshop

LORA = "dtype: bfloat16\n  lora: {{r: 4, lora_alpha: 8}}"
FAST = ("learning_rate: 1e-3", "learning_rate: 5e-2")


def train(folder, model, text):
    workshop = Workshop(folder, model)
    done = workshop.grpo("train", workshop.write(text), "--set", "training.save_steps=1")
    assert done.returncode == 0, done.stderr
    return workshop


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, once, chat_model):
    """Two steps of LoRA on bfloat16 weights."""
    text = RECIPE.replace("dtype: float32", LORA).replace(*FAST)
    run = once("bfloat16_lora_run", lambda folder: train(folder, chat_model, text))
    return Workshop.copy(run, tmp_path_factory.mktemp("adapted"), chat_model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, full_run, chat_model):
    """Two steps of all weights."""
    return Workshop.copy(full_run, tmp_path_factory.mktemp("whole"), chat_model)


def export(workshop, *arguments, code=0):
    done = workshop.grpo("export", workshop.run, *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def logits(model, tokenizer):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "count 3"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        return model(**ids).logits


def test_merged_weights_are_the_trained_model(adapted):
    told = export(adapted, "--to", "merged")
    assert told["verification"]["ok"]
    # A process of its own finds the same.
    request = make_request(adapted.run)
    progress: list[str] = []
    apart = run_verification(request, adapted.folder / "merged", progress.append)
    assert apart == told["verification"]
    steps = [line.rpartition(" (")[2] for line in progress[1:]]
    assert steps[0] == "1 of 3)"
    assert [step.partition(" of 3), about ")[0] for step in steps[1:]] == ["2", "3"]
    assert all(step.endswith(" left") for step in steps[1:])
    assert told["verification"]["tensors"]["changed"] == 14
    assert told["verification"]["kept"] > 0.9
    folder = adapted.folder / "merged"
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(adapted.model, dtype=torch.float32)
    base_logits = logits(base, tokenizer)
    trained = peft.PeftModel.from_pretrained(base, adapted.run / "model")
    apart = (logits(merged, tokenizer) - logits(trained, tokenizer)).abs().max()
    moved = (base_logits - logits(trained, tokenizer)).abs().max()
    assert apart < 0.05 * moved
    assert GenerationConfig.from_pretrained(folder).eos_token_id is not None
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "recipe.yaml", "chat_template.jinja"} <= names
    assert not [path for path in adapted.folder.iterdir() if "partial" in path.name]


def test_the_card_says_what_it_is(adapted):
    export(adapted, "--to", "carded", "--no-verify")
    text = (adapted.folder / "carded" / "README.md").read_text()
    head = text.split("---")[1]
    assert "library_name: transformers" in head
    assert "- grpo" in head
    for said in (
        "| reward | ",
        "(LoRA, merged)",
        "| `has_a` (regex) | 1.0 |",
        "name: tiny",
        "| versions | grpo-cli ",
    ):
        assert said in text
    assert "What was checked" not in text


def test_a_checkpoint_and_an_adapter_are_exported(adapted):
    told = export(adapted, "--to", "step", "--checkpoint", "1", "--format", "adapter")
    assert (told["model"], told["format"]) == ("checkpoint-1", "adapter")
    assert told["verification"]["difference"]["largest"] == 0
    folder = adapted.folder / "step"
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    assert any("lora" in name for name, _ in loaded.named_parameters())


def test_whole_weights_are_exported_exactly(whole):
    result = export(whole, "--to", "plain", "--max-shard-size", "50KB")
    verification = result["verification"]
    assert verification["difference"]["largest"] == 0
    assert verification["tensors"]["changed"] == verification["tensors"]["expected"] > 0
    assert sum(name.endswith(".safetensors") for name in result["files"]) > 1
    assert {*result["files"]} == {path.name for path in (whole.folder / "plain").iterdir()}
    half = export(whole, "--to", "half", "--dtype", "float16")
    assert half["precision"] == "float16"


def test_weights_that_are_the_base_models_are_found_out(adapted, tmp_path):
    export(adapted, "--to", "swapped", "--no-verify")
    folder = adapted.folder / "swapped"
    base = AutoModelForCausalLM.from_pretrained(adapted.model, dtype=torch.bfloat16)
    base.save_pretrained(folder)
    request = make_request(adapted.run)
    found = verify_export(request, folder)
    assert not found["ok"]
    assert found["kept"] == pytest.approx(0, abs=0.01)
    subjects = {each["subject"] for each in found["findings"]}
    assert {"logits", "training kept", "weights"} <= subjects


def test_another_template_or_stop_token_is_found_out(adapted):
    export(adapted, "--to", "turned", "--no-verify")
    folder = adapted.folder / "turned"
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_end|>"))
    settings = folder / "generation_config.json"
    told = json.loads(settings.read_text())
    settings.write_text(json.dumps({**told, "eos_token_id": [0, 5]}))
    request = make_request(adapted.run)
    found = verify_export(request, folder)
    subjects = {each["subject"] for each in found["findings"]}
    assert {"chat template", "stop tokens"} <= subjects


def test_another_vocabulary_is_found_out(adapted):
    export(adapted, "--to", "wider", "--no-verify")
    folder = adapted.folder / "wider"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(300)
    model.save_pretrained(folder)
    found = verify_export(make_request(adapted.run), folder)
    assert not found["ok"]
    (finding,) = found["findings"]
    assert finding["seen"] == "the export knows 300 tokens, the trained model 261"


def test_an_interrupted_export_leaves_nothing(adapted):
    def begun():
        return [path.name for path in adapted.folder.iterdir() if "broken" in path.name]

    command = adapted.command("export", adapted.run, "--to", "broken")
    # Anew: a forked one would have ended before the signal arrives.
    process = subprocess.Popen(**command, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not begun():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert begun() == []


@pytest.mark.slow
def test_the_best_checkpoint_is_exported(adapted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapted.run, run)
    path = run / "checkpoints" / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "best_model_checkpoint": "elsewhere/checkpoint-1"}))
    done = adapted.grpo("export", run, "--to", tmp_path / "out", "--checkpoint", "best", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "checkpoint-1"


@pytest.mark.slow
def test_what_bfloat16_would_lose_is_written_in_float32(tmp_path, chat_model):
    text = RECIPE.replace("dtype: float32", LORA).replace("1e-3", "1e-5")
    workshop = train(tmp_path, chat_model, text)
    told = export(workshop, "--to", "fine")
    assert told["precision"] == "float32"
    assert told["verification"]["instead_of"]["dtype"] == "bfloat16"
    assert told["verification"]["kept"] > 0.99
    said = export(workshop, "--to", "coarse", "--dtype", "bfloat16", code=1)
    assert "Nothing was exported" in said
    assert "--dtype float32" in said
    assert [path.name for path in tmp_path.iterdir() if "coarse" in path.name] == []


def test_what_was_there_stays_unless_forced(adapted):
    folder = adapted.folder / "kept"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    for flags in ([], ["--force"]):
        assert "exists already" in export(adapted, "--to", "kept", *flags, code=2)
    assert (folder / "mine").read_text() == "mine"
    export(adapted, "--to", "again", "--format", "adapter", "--no-verify")
    assert "or --force" in export(adapted, "--to", "again", code=2)
    export(adapted, "--to", "again", "--force", "--no-verify")
    assert (adapted.folder / "again" / "config.json").is_file()
    assert not (adapted.folder / "again" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "onnx"], "there is no --format onnx"),
        (["--dtype", "int4"], "there is no --dtype int4"),
        (["--gguf-type", "q8_0"], "add --format gguf"),
        (["--checkpoint", "9"], "has no checkpoint `9` (checkpoints: 1, 2)"),
        (["--checkpoint", "all"], "(checkpoints: 1, 2). Fix: --checkpoint N or best"),
        (["--push", "mine"], "ORGANISATION/NAME"),
        (["--push", "a b/c"], "ORGANISATION/NAME"),
        (["--max-shard-size", "5"], "such as 5GB"),
    ],
)
def test_what_cannot_be_exported_is_refused(adapted, arguments, message):
    assert message in export(adapted, "--to", "refused", *arguments, code=2)
    assert not (adapted.folder / "refused").exists()


@pytest.fixture
def hurt(adapted, tmp_path):
    """A copy of the run that can be damaged."""
    shutil.copytree(adapted.run, tmp_path / "run")
    return tmp_path / "run"


def test_weights_that_are_not_whole_are_refused(adapted, hurt, tmp_path):
    path = hurt / "model" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: each for name, each in tensors.items() if "layers.1" not in name}, path)
    for flags in ([], ["--format", "adapter"]):
        done = adapted.grpo("export", hurt, "--to", tmp_path / "out", *flags)
        assert done.returncode != 0
        assert "does not fit" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_base_whose_weights_changed_is_refused(adapted, hurt, tmp_path):
    told = json.loads((hurt / "manifest.json").read_text())
    (hurt / "manifest.json").write_text(json.dumps({**told, "model": "0" * 32}))
    done = adapted.grpo("export", hurt, "--to", tmp_path / "out")
    assert done.returncode == 2
    assert "holds other weights than when the adapter was trained on it" in done.stderr


@pytest.mark.slow
def test_the_template_that_was_trained_with_is_shipped(tmp_path, chat_model):
    template = tmp_path / "template.jinja"
    template.write_text((chat_model / "chat_template.jinja").read_text() + "{# trained #}")
    text = RECIPE.replace("dtype: float32", f"dtype: float32\n  chat_template: {template}")
    workshop = train(tmp_path, chat_model, text)
    trained = template.read_text()
    for change in (lambda: template.write_text("{{ 'another' }}"), template.unlink):
        change()
        export(workshop, "--to", "out", "--no-verify", "--force")
        assert (tmp_path / "out" / "chat_template.jinja").read_text() == trained


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub, to which its client talks."""
    server = HubServer()
    # The client reads these variables as it is imported.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    yield server
    server.close()


def push(workshop, to, token):
    """Export and upload."""
    flags = ["--to", to, "--no-verify", "--push", "team/model", "--json"]
    return workshop.grpo("export", workshop.run, *flags, HF_TOKEN=token)


def test_an_export_is_pushed_as_one_private_commit(adapted, hub):
    """And without the weights of an earlier push, which transformers would load instead."""
    stale = ["adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json"]
    hub.present = [*stale, "model.safetensors", "notes.md"]
    done = push(adapted, "pushed", TOKEN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed"] == f"{hub.url}/team/model/commit/abc"
    assert hub.repos["team/model"]["visibility"] == "private"
    (commit,) = hub.commits
    files = {path.name: path.read_bytes() for path in (adapted.folder / "pushed").iterdir()}
    assert commit["files"] == files
    assert sorted(commit["deleted"]) == stale
    assert commit["summary"] == "tiny: final, exported by grpo"
    assert TOKEN not in done.stdout + done.stderr


def test_a_push_without_a_token_is_refused_beforehand(adapted, hub):
    for token in ("", "hf_wrong"):
        done = push(adapted, "unpushed", token)
        assert done.returncode == 3
        assert "hf auth login" in done.stderr
        assert not (adapted.folder / "unpushed").exists()


@pytest.mark.slow
def test_a_push_that_fails_keeps_the_export(adapted, hub):
    hub.refuse_commits = True
    done = push(adapted, "stays", TOKEN)
    assert done.returncode == 1
    assert "hf upload team/model" in done.stderr
    assert (adapted.folder / "stays" / "model.safetensors").is_file()
