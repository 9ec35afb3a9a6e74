"""Measures what scored data can teach: whether the model finds the better responses likelier.

Owns sharing the groups among the processes, and the answers a trained model is shown to give. The numbers
are `analysis.ranking`'s, the likelihoods `fast.likelihood`'s.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset

from grpo_cli.analysis.ranking import GAP, RANKING, RankedGroup, rank_by_prompt, write_ranked
from grpo_cli.analysis.samples import score_samples
from grpo_cli.fast.completions import sample_completions
from grpo_cli.fast.likelihood import mean_log_probabilities
from grpo_cli.runs.files import write_text
from grpo_cli.train.measurement import Measurer, When
from grpo_cli.train.scored import TokenizedGroup
from grpo_cli.train.session import Session

_SHOWN = 4
"""Prompts that a trained model is shown to answer, where none are held out."""


@dataclass(frozen=True)
class Ranker:
    """What ranking the held-out responses needs."""

    session: Session
    groups: Sequence[TokenizedGroup]
    pad_token_id: int

    def rank(
        self, model: Any, tell: Callable[[str], None] = lambda what: None
    ) -> list[RankedGroup]:
        """Likelihoods of all responses, in the order of the rows; every process scores its share."""
        rank, world = self.session.processes.process_index, self.session.processes.num_processes
        mine = self.groups[rank::world]
        likelihoods = iter(
            mean_log_probabilities(
                model,
                [(group.prompt_ids, response) for group in mine for response in group.responses],
                pad_token_id=self.pad_token_id,
                batch_size=self.session.recipe.training.per_device_eval_batch_size,
                on_progress=lambda done, total: tell(f"{done}/{total} responses"),
            )
        )
        ranked = [
            RankedGroup(group.row, group.rewards, [next(likelihoods) for _ in group.responses])
            for group in mine
        ]
        return sorted(gather_object(ranked), key=lambda group: group.row)


def summarize_ranking(groups: list[RankedGroup]) -> dict[str, float | None]:
    """The means over prompts of `RANKING` and `GAP`; None where no prompt has two different rewards."""
    return {
        name: fmean(values.values()) if values else None
        for name, values in rank_by_prompt(groups).items()
    }


@dataclass(frozen=True)
class ScoredMeasurer(Measurer):
    """Measures likelihoods besides the sampled answers, which nothing scores."""

    ranker: Ranker

    def _judge(self, when: When, model: Any) -> dict[str, Any]:
        ranked = self.ranker.rank(model, lambda what: self._tell(when, what))
        if self.session.processes.is_main_process:
            self.session.folder.evaluations.mkdir(exist_ok=True)
            write_ranked(self.session.folder.evaluations / f"{when}_ranked.jsonl", ranked)
        found = summarize_ranking(ranked)
        return {"reward": None, "accuracy": {RANKING: found[RANKING]}, GAP: found[GAP]}


def write_answers(session: Session, model: Any, tokenizer: Any, rows: Dataset) -> None:
    """Lets the trained model answer a few prompts, into `eval/answers.jsonl`; the main process alone."""
    if not session.processes.is_main_process:
        return
    session.report("answering a few prompts")
    shown = rows.select(range(min(_SHOWN, len(rows))))
    recipe = session.recipe
    sampled = sample_completions(
        model,
        tokenizer,
        list(shown["prompt"]),
        max_new_tokens=recipe.generation.max_completion_length,
        temperature=recipe.evaluation.temperature,
        batch_size=recipe.evaluation.batch_size,
        seed=recipe.seed,
        chat_template_kwargs=recipe.generation.extras.get("chat_template_kwargs"),
    )
    scored = score_samples((), shown.select_columns(["prompt", "row_id"]).to_dict(), sampled)
    session.folder.evaluations.mkdir(exist_ok=True)
    lines = [json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in scored]
    write_text(session.folder.evaluations / "answers.jsonl", "".join(lines))
