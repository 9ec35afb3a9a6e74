"""Measures the model on held-out rows before, during and after training, over all processes."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from datasets import Dataset, concatenate_datasets
from transformers import ProcessorMixin

from grpo_cli.analysis.metrics import LOGGED, PerPrompt, add_logged, per_prompt, summarize
from grpo_cli.analysis.samples import (
    MetricLog,
    ScoredCompletion,
    count_failures,
    group_by_row,
    score_samples,
)
from grpo_cli.data.rows import canonical_json
from grpo_cli.data.table import list_rows
from grpo_cli.fast.completions import (
    Completion,
    Images,
    open_sampler,
    sample_completions,
    sampling_state,
)
from grpo_cli.recipe.dataset import IMAGES, SOURCE
from grpo_cli.recipe.evaluation import EvaluationConfig
from grpo_cli.rewards.contract import DescribedError
from grpo_cli.rewards.scoring import Reward, reward_columns
from grpo_cli.runs.files import SCHEMA_VERSION
from grpo_cli.runs.metrics import STAGES, When, append_record
from grpo_cli.training.callbacks import is_stop_requested
from grpo_cli.training.checkpoints import states_kept
from grpo_cli.training.evaluation import log_in_main_process
from grpo_cli.training.session import Session, Stopped

if TYPE_CHECKING:
    from grpo_cli.environments.player import Player
    from grpo_cli.training.build import AnyTrainer, Inputs
    from grpo_cli.training.vllm_generation import RunGeneration

INTERVALS = "metrics"
"""The entry of a result that holds every metric with its 95 % interval."""
_VLLM_BATCH = 256
"""Completions of one call of vLLM: enough to keep a GPU busy, few enough to show progress."""


@dataclass(frozen=True)
class Measurer:
    """Measures the model on the same rows, in the same way, at different times of a training."""

    session: Session
    rewards: Sequence[Reward]
    rows: Dataset
    evaluation: EvaluationConfig
    """How completions are sampled."""
    vllm: "RunGeneration | None" = field(default=None, kw_only=True)
    """Samples, if the training samples with vLLM; otherwise transformers does."""
    player: "Player | None" = field(default=None, kw_only=True)
    """Plays episodes, if the recipe has some."""
    processor: Any = field(default=None, kw_only=True)
    """Of the model, if prompts may hold images."""
    source: str | None = field(default=None, kw_only=True)
    """Of a mixture, the source that all rows are of; None if they are of several."""
    sources: Sequence[str] = field(default=(), kw_only=True)
    """Of a mixture, the sources that the rows are of if they are of several; each is measured apart too."""

    def measure(self, when: When, model: Any, tokenizer: Any) -> None:
        """Measure at a stage of the training, and add a record to `metrics.jsonl`.

        Raises:
            Stopped: A stop was requested.
        """
        result = self.write(when, f"measuring {STAGES[when]}", model, tokenizer)
        if self.session.processes.is_main_process:
            # The means say enough there.
            means = {name: value for name, value in result.items() if name != INTERVALS}
            record = {"event": "measure", "when": when, **means}
            append_record(self.session.folder.metrics, record)

    def write(self, name: str, phase: str, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Sample, score, and write `eval/<name>.json` and its samples; return what the former holds.

        Progress goes to the status. A request to stop is obeyed between batches, by all processes.

        Raises:
            Stopped: A stop was requested; nothing was written.
        """
        started = time.monotonic()
        processes = self.session.processes
        places = range(processes.process_index, len(self.rows), processes.num_processes)
        shard = self.rows.select(places)
        log = MetricLog()
        with states_kept(self.rewards):
            shares = measure_together(
                phase, lambda: self._sample_and_score(phase, shard, model, tokenizer, log)
            )
        logged = self._log_over_all(log)
        everyone = sorted((each for share in shares for each in share), key=lambda each: each.row)
        more = self._measure_more(name, phase, model)
        result = self._summarize(everyone, logged, time.monotonic() - started) | more
        if processes.is_main_process:
            self.session.write_samples(name, everyone, result)
        return result

    def _log_over_all(self, log: MetricLog) -> dict[str, float]:
        """Return the metrics that rewards log of all rows: one process has scored them in one call already."""
        if self.session.processes.num_processes == 1:
            return log.means()
        names = set().union(*gather_object([log.rewards]))
        return log_in_main_process(self.rewards, names, log.batches, self.session.recipe.seed)

    def _sample_and_score(
        self, phase: str, shard: Dataset, model: Any, tokenizer: Any, log: MetricLog
    ) -> list[ScoredCompletion]:
        """Return the scored completions of this process's rows; `log` collects the metrics that rewards log."""
        self._report(phase)
        # Processes that share vLLM's model each draw its tokens, which have to be the same.
        sharing = self.vllm.tensor_parallel_size if self.vllm else 1
        seed = self.session.recipe.seed + self.session.processes.process_index // sharing
        # vLLM samples for all processes together.
        if not len(shard) and not self.vllm:
            return []
        if self.player is None:
            sampled = self._sample(phase, shard, model, tokenizer, seed)
        else:
            sampled = self._play(self.player, phase, shard, model, tokenizer, seed)
        if not len(shard):
            return []
        columns = reward_columns(shard, self.rewards)
        try:
            scored = score_samples(self.rewards, columns, sampled, seed, log)
        except DescribedError as error:
            # Rows are numbered within their split.
            raise error.about("held-out rows") from error
        if not self.processor:
            return scored
        shown = [group[0].images for group in sampled] if self.player else shard[IMAGES]
        return self._name_images(scored, shown)

    def _name_images(
        self, scored: list[ScoredCompletion], images: Sequence[Any]
    ) -> list[ScoredCompletion]:
        """Return completions whose prompts name their images; `images` are those of each row."""

        def name(each: ScoredCompletion) -> Any:
            key = (False, each.row)
            return self.session.thumbnails.name_images(each.prompt, key, lambda: images[each.group])

        return [replace(each, prompt=name(each)) for each in scored]

    def _sample(
        self, phase: str, rows: Dataset, model: Any, tokenizer: Any, seed: int
    ) -> list[list[Completion]]:
        evaluation, padded = self.evaluation, rows
        settings = self.session.recipe.sampling_settings(evaluation)
        if self.vllm is not None:
            self.vllm.sync_weights()
            count = evaluation.samples_per_prompt if evaluation.temperature > 0 else 1
            settings["batch_size"] = max(_VLLM_BATCH // count, 1) * count
            settings["generate"] = partial(
                self.vllm.sample_apart, count=count, temperature=evaluation.temperature
            )
            # Each process samples equally many.
            share = math.ceil(len(self.rows) / self.session.processes.num_processes)
            more = self.rows.select([0] * (share - len(rows)))
            padded = concatenate_datasets([rows, more]) if len(more) else rows
        sampled = sample_completions(
            model,
            tokenizer,
            list(padded["prompt"]),
            **settings,
            samples_per_prompt=evaluation.samples_per_prompt,
            seed=seed,
            fast=self.session.recipe.training.fast,
            images=Images(self.processor, padded[IMAGES]) if self.processor else None,
            on_progress=lambda done, total: self._report(phase, done, total, "prompts"),
        )
        return sampled[: len(rows)]

    def _play(
        self, player: "Player", phase: str, rows: Dataset, model: Any, tokenizer: Any, seed: int
    ) -> list[list[Completion]]:
        from grpo_cli.environments.player import sample_episodes
        from grpo_cli.training.rollout.episodes import agree_over_processes

        evaluation, vllm = self.evaluation, self.vllm
        # As everywhere, greedy samples of a prompt are one and the same.
        count = evaluation.samples_per_prompt if evaluation.temperature > 0 else 1
        repeats = evaluation.samples_per_prompt // count
        play = partial(
            sample_episodes,
            player,
            samples_per_prompt=count,
            on_progress=lambda done, total: self._report(phase, done, total, "episodes"),
        )
        if vllm is None:
            with open_sampler(
                model,
                tokenizer,
                temperature=evaluation.temperature,
                batch_size=evaluation.batch_size,
                seed=seed,
                fast=self.session.recipe.training.fast,
                stop_strings=self.session.recipe.generation.reading["stop_strings"],
                processor=self.processor,
            ) as draw:
                played = play(list_rows(rows), draw, batch_size=evaluation.batch_size)
            return [group * repeats for group in played]
        vllm.sync_weights()
        # Each process plays equally many.
        share = math.ceil(len(self.rows) / self.session.processes.num_processes)
        padded = [*list_rows(rows), *[self.rows[0]] * (share - len(rows))]
        with sampling_state(model, None, seed):
            played = play(
                padded,
                lambda ids, most: vllm.sample_apart(
                    ids, count=1, temperature=evaluation.temperature, max_tokens=most
                ),
                batch_size=_VLLM_BATCH,
                agree=agree_over_processes,
            )
        return [group * repeats for group in played[: len(rows)]]

    def _measure_more(self, name: str, phase: str, model: Any) -> dict[str, Any]:
        """More entries of the result."""
        return {}

    def _report(
        self, phase: str, done: int | None = None, planned: int | None = None, units: str = ""
    ) -> None:
        self.session.heartbeat.beat()
        self.session.show(phase=phase, done=done, planned=planned, detail=units)
        # vLLM samples for all processes together, so that they stop together; others need not wait for each other.
        if is_stop_requested(self.session) if self.vllm else self.session.stop.seen_here():
            raise Stopped

    def _summarize(
        self, scored: list[ScoredCompletion], logged: dict[str, float], seconds: float
    ) -> dict[str, Any]:
        groups = group_by_row(scored)
        right = {
            reward.name: reward.right_answer
            for reward in self.rewards
            if reward.right_answer is not None
        }
        values = per_prompt(groups, right, self.sources)
        metrics = summarize(values, self.evaluation.samples_per_prompt)
        metrics = add_logged(metrics, logged, len(groups))
        # Environments ask by other columns than the prompt, such as `seed`.
        own = self.session.recipe.environment
        rows = self.rows.select_columns([each for each in self.rows.column_names if each != IMAGES])
        asked = list_rows(rows) if own else list(rows["prompt"])
        held_out = canonical_json(asked).encode("utf-8", "surrogatepass")
        rewards = [reward.name for reward in self.rewards]
        return {
            "schema_version": SCHEMA_VERSION,
            "held_out": hashlib.sha256(held_out).hexdigest()[:16],
            "prompts": len(groups),
            "completions": len(scored),
            **count_failures(scored),
            "reward": _mean(values["reward"]) if rewards else None,
            "rewards": {name: _mean(values[f"rewards/{name}"]) for name in rewards},
            "accuracy": {name: _mean(values[f"accuracy/{name}"]) for name in right},
            "completion_length": _mean(values["completion_length"]),
            "clipped": _mean(values["clipped"]),
            **{name: _mean(values[name]) for name in ("turns", "calls") if name in values},
            **({"sources": _by_source(values, self.sources)} if self.sources else {}),
            **({LOGGED: logged} if logged else {}),
            INTERVALS: {name: each.as_json() for name, each in metrics.items()},
            "temperature": self.evaluation.temperature,
            "backend": "transformers" if self.vllm is None else "vllm",
            "seconds": round(seconds, 2),
        }


def build_measurer(session: Session, inputs: "Inputs", trainer: "AnyTrainer") -> Measurer | None:
    """Return what measures the model before and after training; None if there are no rows to measure on."""
    evaluation = session.recipe.evaluation
    rows = select_rows(inputs.data.eval, evaluation.limit)
    return None if rows is None else make_measurer(session, inputs, trainer, rows, evaluation)


def make_measurer(
    session: Session,
    inputs: "Inputs",
    trainer: Any,
    rows: Dataset,
    evaluation: Any,
    source: str | None = None,
) -> Measurer:
    """Return what measures the model on some held-out rows, of one source if it is named."""
    processor = trainer.processing_class
    return Measurer(
        session,
        inputs.rewards,
        rows,
        evaluation,
        vllm=getattr(trainer, "vllm_generation", None),
        player=inputs.player,
        processor=processor if isinstance(processor, ProcessorMixin) else None,
        sources=() if source else tuple(inputs.data.report.sources or ()),
        source=source,
    )


def measure_together(phase: str, measure: Callable[[], Any]) -> list[Any]:
    """Return what each process measured.

    Raises:
        Stopped: One of them was stopped meanwhile.
    """
    share = None
    with suppress(Stopped):
        share = measure()
    shares: list[Any] = gather_object([share])
    if None in shares:
        raise Stopped(f"stopped while {phase}; no step was cut short")
    return shares


def _by_source(
    values: Mapping[str, PerPrompt], sources: Iterable[str]
) -> dict[str, dict[str, float | None]]:
    """Return the mean of each metric that sources have apart, by source."""
    return {
        source: {
            name.removesuffix(f"@{source}"): _mean(rows)
            for name, rows in values.items()
            if name.endswith(f"@{source}")
        }
        for source in sources
    }


def select_rows(
    rows: Dataset | None, limit: int | None, source: str | None = None
) -> Dataset | None:
    """Return the rows to measure on, of one source if it is named; None if there are none, or `limit` is 0."""
    if rows is not None and source is not None:
        names = rows[SOURCE]
        rows = rows.select([place for place, name in enumerate(names) if name == source])
    if rows is None or limit == 0 or len(rows) == 0:
        return None
    return rows.select(range(min(limit, len(rows)))) if limit else rows


def _mean(values: PerPrompt) -> float | None:
    return fmean(values.values()) if values else None
