"""Measures the model on the held-out rows before and after training.

Owns sharing the rows among the processes and the record that is written. Sampling is
`models.sampling`, scoring is `rewards.scoring`.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from accelerate.utils import gather_object
from datasets import Dataset

from grpo_cli.analysis.metrics import PerPrompt, per_prompt
from grpo_cli.analysis.samples import ScoredCompletion, group_by_row, score_samples
from grpo_cli.data.encoding import canonical_json
from grpo_cli.fast.completions import (
    Completion,
    all_eos_token_ids,
    as_completion,
    encode_prompt,
    sample_completions,
)
from grpo_cli.rewards.building import right_scores
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.files import SCHEMA_VERSION, write_json, write_text
from grpo_cli.runs.metrics import append_record
from grpo_cli.train.session import Session
from grpo_cli.train.vllm_generation import RunGeneration

_VLLM_BATCH = 256
"""Completions asked of vLLM at a time: enough to keep a GPU busy, few enough to show progress."""
When = Literal["before", "after"]


@dataclass(frozen=True)
class Measurer:
    """What a measurement needs; the same object measures before and after."""

    session: Session
    rewards: Sequence[Reward]
    rows: Dataset
    vllm: RunGeneration | None = field(default=None, kw_only=True)
    """What samples, if vLLM does so for the training too; otherwise transformers."""

    def measure(self, when: When, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Samples, scores, and writes `eval/<when>.json`, its samples, and a metrics record.

        Progress goes to the status; a request to stop is heeded between batches.

        Returns:
            A fingerprint of the prompts, mean of each reward and of the weighted total, accuracy of rewards
            that judge answers (the share of completions with a right answer), mean completion length in tokens,
            the share cut off, the number of prompts and completions, and seconds.
        """
        started = time.monotonic()
        rank, world = self.session.processes.process_index, self.session.processes.num_processes
        self.session.report(f"measuring {when} training")
        shard = self.rows.select(range(rank, len(self.rows), world))
        # vLLM samples for all processes together.
        sampled = self._sample(when, shard, model, tokenizer) if len(shard) or self.vllm else []
        scored = (
            score_samples(self.rewards, shard.to_dict(), sampled, self._seed) if len(shard) else []
        )
        everyone = sorted(gather_object(scored), key=lambda each: each.row)
        judged = self._judge(when, model)
        result = self._summarize(everyone, time.monotonic() - started) | judged
        if self.session.processes.is_main_process:
            self.session.folder.evaluations.mkdir(exist_ok=True)
            samples = "".join(
                json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in everyone
            )
            write_text(self.session.folder.evaluations / f"{when}.jsonl", samples)
            write_json(self.session.folder.evaluations / f"{when}.json", result)
            append_record(self.session.folder.metrics, {"event": "measure", "when": when, **result})
        return result

    @property
    def _seed(self) -> int:
        """Of this process's samples and scores, the same before and after."""
        return self.session.recipe.seed + self.session.processes.process_index

    def _sample(
        self, when: When, rows: Dataset, model: Any, tokenizer: Any
    ) -> list[list[Completion]]:
        evaluation, generation = self.session.recipe.evaluation, self.session.recipe.generation
        if self.vllm is not None:
            return self._sample_with_vllm(self.vllm, when, rows, model, tokenizer)
        return sample_completions(
            model,
            tokenizer,
            list(rows["prompt"]),
            max_new_tokens=generation.max_completion_length,
            temperature=evaluation.temperature,
            samples_per_prompt=evaluation.samples_per_prompt,
            batch_size=evaluation.batch_size,
            seed=self._seed,
            chat_template_kwargs=generation.extras.get("chat_template_kwargs"),
            fast=self.session.recipe.training.fast.sampling,
            on_progress=lambda done, total: self._tell(when, f"{done}/{total} prompts"),
        )

    def _sample_with_vllm(
        self, vllm: RunGeneration, when: When, rows: Dataset, model: Any, tokenizer: Any
    ) -> list[list[Completion]]:
        """The same with the engine of the training; the processes sample equally many prompts at a time."""
        evaluation, generation = self.session.recipe.evaluation, self.session.recipe.generation
        template = generation.extras.get("chat_template_kwargs")
        prompts = [encode_prompt(tokenizer, prompt, template) for prompt in rows["prompt"]]
        count = evaluation.samples_per_prompt if evaluation.temperature > 0 else 1
        each = math.ceil(len(self.rows) / self.session.processes.num_processes)
        filler = encode_prompt(tokenizer, self.rows[0]["prompt"], template)
        asked = [*prompts, *[filler] * (each - len(prompts))]
        size = max(_VLLM_BATCH // count, 1)
        ends = all_eos_token_ids(model.generation_config, tokenizer)
        found: list[Completion] = []
        vllm.sync_weights()
        for start in range(0, each, size):
            sampled = vllm.sample_apart(asked[start : start + size], count, evaluation.temperature)
            found += [as_completion(tokenizer, tokens, ends) for tokens in sampled]
            self._tell(when, f"{min(start + size, len(prompts))}/{len(prompts)} prompts")
        repeats = evaluation.samples_per_prompt // count
        groups = [found[first : first + count] * repeats for first in range(0, len(found), count)]
        return groups[: len(prompts)]

    def _judge(self, when: When, model: Any) -> dict[str, Any]:
        """More entries of the result, which other measurers have."""
        return {}

    def _tell(self, when: When, detail: str) -> None:
        self.session.heartbeat.beat()
        self.session.report(f"measuring {when} training", detail=detail)

    def _summarize(self, scored: list[ScoredCompletion], seconds: float) -> dict[str, Any]:
        groups = group_by_row(scored)
        right = right_scores(self.session.recipe.rewards, (each.rewards for each in scored))
        values = per_prompt(groups, right)
        asked = canonical_json(list(self.rows["prompt"])).encode("utf-8", "surrogatepass")
        return {
            "schema_version": SCHEMA_VERSION,
            "held_out": hashlib.sha256(asked).hexdigest()[:16],
            "prompts": len(groups),
            "completions": len(scored),
            "reward": _mean(values["reward"]),
            "rewards": {
                reward.name: _mean(values[f"rewards/{reward.name}"]) for reward in self.rewards
            },
            "accuracy": {name: _mean(values[f"accuracy/{name}"]) for name in right},
            "completion_length": _mean(values["completion_length"]),
            "clipped": _mean(values["clipped"]),
            "temperature": self.session.recipe.evaluation.temperature,
            "backend": "transformers" if self.vllm is None else "vllm",
            "seconds": round(seconds, 2),
        }


def select_rows(rows: Dataset | None, limit: int | None) -> Dataset | None:
    """The rows to measure on; None where there are none, or where the recipe leaves it out."""
    if rows is None or limit == 0 or len(rows) == 0:
        return None
    return rows.select(range(min(limit, len(rows)))) if limit else rows


def _mean(values: PerPrompt) -> float | None:
    return fmean(values.values()) if values else None
