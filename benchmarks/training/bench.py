"""Makes a case ready for both systems: rows, a recipe, and the same numbers for plain TRL."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.training.cases import MEAN_LENGTH, Case
from benchmarks.training.replay import Settings
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
REWARDS = Path(__file__).with_name("rewards.py")
_SILENT_OF = 10
"""Rows over which a share of silent prompts is exact."""


@dataclass(frozen=True)
class Bench:
    """What holds for all cases."""

    folder: Path
    """Where everything is written."""
    model: str
    """`quickstart`, `tiny`, or what `model.path` takes."""
    gpu: bool = False
    steps: int | None = None
    """Instead of each case's own."""

    @cached_property
    def model_path(self) -> str:
        """The model as both systems load it: a folder or a hub id."""
        if self.model == "tiny":
            from tests.tiny_models import make_tiny_model

            return str(make_tiny_model(self.folder / "model"))
        from grpo_cli.models.source import model_folder_or_id
        from grpo_cli.recipe.model import ModelConfig

        named = self._quickstart.model.path if self.model == "quickstart" else self.model
        return str(model_folder_or_id(ModelConfig(path=named)))

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_path)

    @cached_property
    def _quickstart(self) -> Recipe:
        return load_recipe(QUICKSTART)

    def make_rows(self, count: int, seed: int, silent_share: float = 0.0) -> list[dict[str, Any]]:
        """Rows of the quickstart's task, as messages."""
        import reasoning_gym

        dataset: Any = self._quickstart.dataset  # of reasoning_gym's kind
        task = reasoning_gym.create_dataset(dataset.task, size=count, seed=seed, **dataset.params)
        silent = round(silent_share * _SILENT_OF)
        return [
            {
                "prompt": [
                    {"role": "system", "content": dataset.prompt.system},
                    {"role": "user", "content": item["question"]},
                ],
                "answer": str(item["answer"]),
                "silent": index % _SILENT_OF < silent,
            }
            for index, item in enumerate(task)
        ]

    def write_case(self, case: Case) -> Path:
        """Writes `rows.jsonl`, `recipe.yaml` and `plain.json` into a folder of the case's own."""
        folder = self.folder / case.name
        folder.mkdir(parents=True, exist_ok=True)
        rows = folder / "rows.jsonl"
        made = self.make_rows(1000, self._quickstart.seed, case.silent_share)
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in made), encoding="utf-8")
        # JSON is YAML too.
        text = json.dumps(self._make_recipe(case, rows), indent=1)
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        plain = json.dumps(self._plain_settings(case, load_recipe(folder / "recipe.yaml"), rows))
        (folder / "plain.json").write_text(plain, encoding="utf-8")
        return folder

    def completions_a_step(self, case: Case) -> int:
        """Completions of one optimizer step."""
        training = load_recipe(self.folder / case.name / "recipe.yaml").training
        return training.per_device_train_batch_size * training.gradient_accumulation_steps

    def replay_settings(self, case: Case) -> Settings | None:
        """How completions end in a case; None where the model says."""
        if case.replay is None:
            return None
        recipe = load_recipe(self.folder / case.name / "recipe.yaml")
        longest = recipe.generation.max_completion_length
        [start] = self.tokenizer.encode("<|im_start|>", add_special_tokens=False)
        return Settings(
            start_id=start,
            header=len(self.tokenizer.encode("assistant\n", add_special_tokens=False)),
            end_ids=(self.tokenizer.eos_token_id,),
            mean=min(MEAN_LENGTH, longest / 2),
            longest=longest,
            same_tokens=case.replay == "tokens",
        )

    def _make_recipe(self, case: Case, rows: Path) -> dict[str, Any]:
        recipe = self._quickstart.model_dump(mode="json", exclude_unset=True, exclude={"expect"})
        dtype = {"dtype": "float32"} if self.model == "tiny" else {}
        recipe |= {
            "name": "bench",
            "model": {**recipe["model"], "path": self.model_path, **dtype},
            "dataset": {"kind": "files", "train": str(rows)},
            "rewards": [{"kind": "python", "path": f"{REWARDS}:{case.reward}"}],
            "launch": {"use_cpu": not self.gpu},
        }
        recipe["training"]["max_steps"] = self.steps or case.steps
        for key, value in case.changes.items():
            section, _, name = key.partition(".")
            recipe[section][name] = value
        return recipe

    def _plain_settings(self, case: Case, recipe: Recipe, rows: Path) -> dict[str, Any]:
        """The recipe's numbers under TRL's names, and what a person sets on a CPU."""
        backend = recipe.generation.backend
        return {
            "model": self.model_path,
            "dtype": recipe.model.dtype,
            "lora": recipe.model.lora.model_dump() if recipe.model.lora else None,
            "rows": str(rows),
            "reward": f"{REWARDS}:{case.reward}",
            "arguments": {
                **recipe.training.trl_fields(),
                **recipe.generation.trl_fields(),
                "use_vllm": backend == "vllm",
                "use_transformers_continuous_batching": backend.endswith("batching"),
                "seed": recipe.seed,
                "logging_steps": 1,
                "report_to": "none",
                "disable_tqdm": True,
                **({} if self.gpu else {"use_cpu": True, "bf16": False}),
            },
        }
