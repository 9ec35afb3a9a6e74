"""A training with TRL alone, as its documentation shows one: what `grpo train` is measured against.

    python benchmarks/plain_trl.py SETTINGS.json

Knows nothing of `grpo`. The settings name the model, the rows, a reward function and the arguments of
`GRPOConfig`; `steps.jsonl` in `output` gets one record of each step with the time at which it ended.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from trl import GRPOConfig, GRPOTrainer


class Journal(TrainerCallback):
    """Writes down what the trainer logs, and when."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        record = {"time": time.time(), "step": state.global_step, **(logs or {})}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")


def load_reward(place: str) -> Callable[..., list[float]]:
    """The function that `file.py:function` names."""
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("reward", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reward: Callable[..., list[float]] = getattr(module, name)
    return reward


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    output = Path(settings["output"])
    set_seed(settings["arguments"]["seed"])
    lora = LoraConfig(task_type="CAUSAL_LM", **settings["lora"]) if settings["lora"] else None
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=load_reward(settings["reward"]),
        args=GRPOConfig(
            output_dir=str(output),
            model_init_kwargs={"dtype": settings["dtype"]},
            **settings["arguments"],
        ),
        train_dataset=load_dataset("json", data_files=settings["rows"], split="train"),
        peft_config=lora,
        callbacks=[Journal(output / "steps.jsonl")],
    )
    trainer.train()
    trainer.save_model(str(output / "model"))


if __name__ == "__main__":
    main()
