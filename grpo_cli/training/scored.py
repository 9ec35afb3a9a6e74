"""Responses that are scored already: a group of TRL's is filled from the data instead of sampled."""

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from datasets import Dataset

from grpo_cli.analysis.metrics import GAP, RANKING, RankedGroup, rank_by_prompt, write_ranked
from grpo_cli.analysis.samples import score_samples
from grpo_cli.data.build import BuiltData
from grpo_cli.data.prompts import Prompt
from grpo_cli.errors import RunError
from grpo_cli.fast.completions import check_context, sample_completions, sampling_state
from grpo_cli.fast.tokens import encode_answer, encode_prompt
from grpo_cli.training.build import Inputs
from grpo_cli.training.measurement import Measurer, select_rows
from grpo_cli.training.rollout.rollout import Context, Rollout, Row
from grpo_cli.training.session import Session
from grpo_cli.training.trainer import Parts, RunTrainer

_SCORE = "score"
"""The name of the data's rewards in TRL's metrics: `rewards/score/mean`."""
_SHOWN = 4
"""Prompts that the trained model answers."""
_Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Token ids of prompts and answers; none is empty."""


class TokenizedGroup(NamedTuple):
    """The responses of one prompt."""

    row: int
    """The prompt's first row in the data, from 0."""
    prompt: Prompt
    prompt_ids: list[int]
    responses: list[list[int]]
    """Token ids, with the end-of-sequence token unless cut at the maximum length."""
    rewards: list[float]


class ReplaySampler:
    """Fills groups with responses of the data and their scores."""

    in_parts = False

    def __init__(self, groups: Sequence[TokenizedGroup], *, eos_token_id: int, seed: int) -> None:
        self._seed = seed
        self._empty = [eos_token_id], [0], math.nan
        self._groups = {group.row: group for group in groups}
        # A slot that is empty on purpose deserves no warning.
        logging.getLogger("trl.trainer.grpo_trainer").addFilter(
            lambda record: "All reward functions returned None" not in record.getMessage()
        )

    def waits(self) -> dict[str, float]:
        """Return nothing: nothing is waited for."""
        return {}

    def sample(self, rows: list[Row], context: Context) -> Rollout:
        """Return responses for this process's share of a batch; a group may continue in the next process.

        The mask leaves empty slots out of the loss, and a score of NaN out of a group's baseline.
        """
        size, step = context.group_size, context.state.global_step
        groups = [self._groups[row["row_id"]] for row in rows]
        first = PartialState().process_index * len(rows)
        filled = [
            self._fill(group, number % size, size, step)
            for number, group in enumerate(groups, first)
        ]
        responses, masks, scores = map(list, zip(*filled, strict=True))
        own = torch.tensor(scores, dtype=torch.float32, device=PartialState().device)
        return Rollout(
            context,
            rows,
            [group.prompt_ids for group in groups],
            responses,
            [""] * len(rows),
            mask=masks,
            scores=gather(own[:, None].contiguous()),
        )

    def _fill(self, group: TokenizedGroup, slot: int, size: int, step: int) -> tuple[Any, Any, Any]:
        """Response, mask and score in a slot of a group; every process, and a resumed run, chooses the same."""
        chosen: Sequence[int] = range(len(group.responses))
        if len(chosen) > size:
            chooser = random.Random(f"{self._seed}:{group.row}:{step}")
            chosen = sorted(chooser.sample(chosen, size))
        if slot >= len(chosen):
            return self._empty
        response = group.responses[chosen[slot]]
        return response, [1] * len(response), group.rewards[chosen[slot]]


def _summarize(groups: list[RankedGroup]) -> dict[str, float | None]:
    """Means over prompts; None if no prompt has two different rewards."""
    return {
        name: fmean(values.values()) if values else None
        for name, values in rank_by_prompt(groups).items()
    }


class ScoredTrainer(RunTrainer):
    """`GRPOTrainer` on scored data; its evaluation ranks held-out responses."""

    def __init__(self, *args: Any, held_out: Sequence[TokenizedGroup], **options: Any) -> None:
        """Make a trainer that ranks `held_out`; for the other arguments see `RunTrainer`."""
        self.held_out = held_out
        super().__init__(*args, **options)

    def rank(
        self, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[RankedGroup]:
        """Return the likelihoods of the held-out responses by row; each process computes a share."""
        accelerator = self.accelerator
        mine = self.held_out[accelerator.process_index :: accelerator.num_processes]
        likelihoods = iter(
            _mean_log_probabilities(
                self.model,
                [(group.prompt_ids, response) for group in mine for response in group.responses],
                pad_token_id=self.processing_class.pad_token_id,
                batch_size=self.args.per_device_eval_batch_size,
                on_progress=on_progress,
            )
        )
        ranked = [
            RankedGroup(group.row, group.rewards, [next(likelihoods) for _ in group.responses])
            for group in mine
        ]
        return sorted(gather_object(ranked), key=lambda group: group.row)

    def evaluate_rows(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Rank the held-out responses, log the means, and call the callbacks, as `Trainer.evaluate` does."""
        means = _summarize(self.rank()) if self.held_out else {}
        if self.held_out and means[RANKING] is None:
            raise RunError(
                "no held-out prompt has two responses of different reward, so there is nothing to rank",
                "hold out other rows, or set training.eval_strategy: no",
            )
        metrics = {f"eval_{name}": value for name, value in means.items()}
        self.log_evaluation({name: value for name, value in metrics.items() if value is not None})
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


@dataclass(frozen=True)
class ScoredMeasurer(Measurer):
    """Measures likelihoods as well as sampled answers, which nothing scores."""

    trainer: ScoredTrainer

    def _measure_more(self, name: str, phase: str, model: Any) -> dict[str, Any]:
        ranked = self.trainer.rank(partial(self._report, phase, units="responses"))
        if self.session.processes.is_main_process:
            self.session.folder.evaluations.mkdir(exist_ok=True)
            write_ranked(self.session.folder.evaluations / f"{name}_ranked.jsonl", ranked)
        means = _summarize(ranked)
        return {"accuracy": {RANKING: means[RANKING]}, GAP: means[GAP]}


def build_measurer(session: Session, inputs: Inputs, trainer: Any) -> ScoredMeasurer | None:
    """Return what measures the model before and after training; None if there are no rows to measure on."""
    evaluation = session.recipe.evaluation
    rows = select_rows(inputs.data.eval, evaluation.limit)
    if rows is None:
        return None
    return ScoredMeasurer(session, inputs.rewards, rows, evaluation, trainer)


def build_scored_trainer(
    session: Session,
    data: BuiltData,
    model: Any,
    tokenizer: Any,
    parts: Parts,
    options: dict[str, Any],
) -> ScoredTrainer:
    """Return the trainer of a recipe with scored data; `options` are arguments of `GRPOTrainer`.

    Raises:
        RunError: A prompt with its response does not fit into the model's context.
    """
    recipe = session.recipe
    session.report("tokenizing the responses")
    held_out = select_rows(data.eval, recipe.evaluation.limit)
    groups = _tokenize(session, data.train, tokenizer)
    held_out_groups = _tokenize(session, held_out, tokenizer) if held_out is not None else []
    tokens = max(
        len(group.prompt_ids) + max(map(len, group.responses))
        for group in (*groups, *held_out_groups)
    )
    check_context(tokens, model.config)
    evaluated = data.eval if recipe.training.eval_strategy != "no" else None
    columns = ["prompt", "row_id"]
    sampler = ReplaySampler(groups, eos_token_id=tokenizer.eos_token_id, seed=recipe.seed)
    return ScoredTrainer(
        held_out=held_out_groups,
        parts=replace(
            parts,
            sampler=sampler,
            names=[_SCORE],
            rewards=(),
            reader=None,
            log=None,
            sources=(),
        ),
        train_dataset=data.train.select_columns(columns),
        eval_dataset=evaluated.select_columns(columns) if evaluated is not None else None,
        **options,
    )


def _tokenize(session: Session, rows: Dataset, tokenizer: Any) -> list[TokenizedGroup]:
    generation = session.recipe.generation
    template = session.recipe.setting("chat_template_kwargs")
    longest = generation.max_completion_length
    return [
        TokenizedGroup(
            row["row_id"],
            row["prompt"],
            encode_prompt(tokenizer, row["prompt"], template),
            [encode_answer(tokenizer, text)[:longest] for text in row["responses"]],
            row["rewards"],
        )
        for row in rows
    ]


def write_answers(session: Session, model: Any, tokenizer: Any, rows: Dataset) -> None:
    """Let the trained model answer a few prompts, into `eval/answers.jsonl` (main process)."""
    if not session.processes.is_main_process:
        return
    session.report("answering a few prompts")
    shown = rows.select(range(min(_SHOWN, len(rows))))
    sampled = sample_completions(
        model,
        tokenizer,
        list(shown["prompt"]),
        **session.recipe.sampling_settings(),
        seed=session.recipe.seed,
    )
    scored = score_samples((), shown.select_columns(["prompt", "row_id"])[:], sampled)
    session.write_samples("answers", scored)


def _mean_log_probabilities(
    model: Any,
    sequences: _Sequences,
    *,
    pad_token_id: int,
    batch_size: int,
    on_progress: Callable[[int, int], None],
) -> list[float]:
    """Return the mean log-probability of each answer's tokens at temperature 1, in nats a token."""
    order = sorted(range(len(sequences)), key=lambda at: -sum(map(len, sequences[at])))
    means = [0.0] * len(sequences)
    with sampling_state(model, None, None):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            values = _score_answers(model, [sequences[at] for at in batch], pad_token_id)
            for at, value in zip(batch, values, strict=True):
                means[at] = value
            on_progress(start + len(batch), len(order))
    return means


@torch.no_grad()
def _score_answers(model: Any, sequences: _Sequences, pad_token_id: int) -> list[float]:
    longest = max(len(prompt) + len(answer) for prompt, answer in sequences)
    ids = torch.full((len(sequences), longest), pad_token_id)  # [sequences, tokens] int64
    mask = torch.zeros_like(ids)  # [sequences, tokens] int64, 1 at tokens of prompt and answer
    answers = torch.zeros_like(ids, dtype=torch.bool)  # [sequences, tokens], true at the answer's
    for row, (prompt, answer) in enumerate(sequences):
        start, end = len(prompt), len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        mask[row, :end] = 1
        answers[row, start:end] = True
    ids, mask, answers = (each.to(model.device) for each in (ids, mask, answers))
    # A token is predicted at the place before it.
    kept = longest - min(len(prompt) for prompt, _ in sequences) + 1
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=kept).logits[:, :-1]
    targets, counted = ids[:, 1 - kept :], answers[:, 1 - kept :]
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return ((chosen * counted).sum(-1) / counted.sum(-1)).tolist()
