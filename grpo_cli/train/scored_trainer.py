"""The trainer for scored data: `RunTrainer` that is given responses instead of sampling them.

Owns its evaluation between steps, which ranks held-out responses where TRL would sample. See `scored.py`
for the responses and `ranking.py` for the numbers.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset

from grpo_cli.analysis.ranking import RANKING
from grpo_cli.data.build import BuiltData
from grpo_cli.errors import RunError
from grpo_cli.train.measurement import select_rows
from grpo_cli.train.ranking import Ranker, summarize_ranking
from grpo_cli.train.scored import ScoredRollouts, TokenizedGroup, score, tokenize_groups
from grpo_cli.train.session import Session
from grpo_cli.train.trainer import RunTrainer


class ScoredTrainer(RunTrainer):
    """`GRPOTrainer` on scored data."""

    ranker: Ranker | None = None
    """Ranks the held-out responses; None where there are none."""

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Ranks the held-out responses, logs the numbers, and tells the callbacks, as `Trainer.evaluate` does."""
        found = summarize_ranking(self.ranker.rank(self.model)) if self.ranker else {}
        if self.ranker and found[RANKING] is None:
            raise RunError(
                "no held-out prompt has two responses of different reward, so there is nothing to rank. "
                "Fix: hold out other rows, or set training.eval_strategy: no"
            )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        training = self.model.training
        # TRL tells by this whether a record is of training.
        self.model.eval()
        self.log({name: value for name, value in metrics.items() if value is not None})
        self.model.train(training)
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def build_scored_trainer(
    session: Session, data: BuiltData, model: Any, tokenizer: Any, **given: Any
) -> ScoredTrainer:
    """The trainer of a recipe with scored data.

    Args:
        session: Of the run.
        data: Groups of responses.
        model: What is trained.
        tokenizer: Its tokenizer.
        given: More arguments of `GRPOTrainer`.

    Raises:
        RunError: A prompt with its response does not fit into the model's context.
    """
    recipe = session.recipe
    session.report("tokenizing the responses")
    tokenize = partial(
        tokenize_groups,
        tokenizer=tokenizer,
        max_length=recipe.generation.max_completion_length,
        chat_template_kwargs=recipe.generation.extras.get("chat_template_kwargs"),
    )
    rows = select_rows(data.eval, recipe.evaluation.limit)
    groups, held = tokenize(data.train), tokenize(rows) if rows is not None else []
    _check_context([*groups, *held], model)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = ScoredTrainer(
        model=model,
        reward_funcs=[score],
        rollout_func=ScoredRollouts(groups, eos_token_id=tokenizer.eos_token_id, seed=recipe.seed),
        train_dataset=_asked(data.train),
        eval_dataset=_asked(data.eval) if recipe.training.eval_strategy != "no" else None,
        processing_class=tokenizer,
        **given,
    )
    if held:
        trainer.ranker = Ranker(session, held, tokenizer.pad_token_id)
    return trainer


def _asked(split: Dataset | None) -> Dataset | None:
    """What TRL reads of a split; the responses come from `ScoredRollouts`."""
    return split.select_columns(["prompt", "row_id"]) if split is not None else None


def _check_context(groups: Sequence[TokenizedGroup], model: Any) -> None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(group.longest for group in groups)
    if context is not None and longest > context:
        raise RunError(
            f"a prompt and its response have {longest} tokens together, and the model reads {context}. Fix: "
            "lower `generation.max_completion_length`, which cuts responses, or `dataset.max_prompt_length`, "
            "which leaves rows out"
        )
