"""`GRPOTrainer` with exact resume, dynamic sampling, early scoring, and the time of each phase."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from grpo_cli.data.mixing import SOURCE
from grpo_cli.fast.prompts import encode_unexpanded
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.models.loading import without_wrapper
from grpo_cli.models.processor import pads_images
from grpo_cli.models.teacher_server import TeacherServer
from grpo_cli.training.callbacks import PhaseClock
from grpo_cli.training.checkpoints import ExactResume
from grpo_cli.training.difficulty import DifficultySampler
from grpo_cli.training.dynamic_sampling import DynamicSampling, Scored, find_silent
from grpo_cli.training.episodes import EpisodeRollouts
from grpo_cli.training.evaluation import Evaluation
from grpo_cli.training.held_out_sets import HeldOutSets
from grpo_cli.training.reward_functions import NO_REWARD, EarlyScoring, read_completions
from grpo_cli.upstream.trl import (
    CLIPPED_RATIO,
    FRAC_ZERO_STD,
    NUM_TOKENS,
    REWARD,
    REWARD_STD,
    reward_metric,
)


class RunTrainer(ExactResume, FastTrainer):
    """The trainer of a run."""

    mask_truncated_completions: bool
    dynamic_sampling: DynamicSampling | None = None
    """Replaces groups without signal; None if they stay."""
    sources: Sequence[str] = ()
    """Of a mixture; some metrics are logged for each."""
    held_out_sets: HeldOutSets | None = None
    """Evaluated during training beside TRL's own evaluation."""

    def __init__(
        self,
        *args: Any,
        early: EarlyScoring | None = None,
        episodes: EpisodeRollouts | None = None,
        **options: Any,
    ) -> None:
        self._clock = PhaseClock()
        self._early = early or EarlyScoring([])
        self._unexpanded: list[list[int]] = []
        """The last prompts, with one placeholder for each image."""
        self._add_images: Callable[[dict[str, Any], torch.Tensor], None] = _add_nothing
        """Adds what the model reads of the images of episodes, while a batch is made of them."""
        self._given: Scored | None = None
        """Completions to make a batch of instead of sampling."""
        self._evaluation: Evaluation | None = None
        """TRL's, while it goes on."""
        super().__init__(*args, **options)
        self.add_callback(self._clock)
        self._pads_images = self.reads_images and pads_images(self.processing_class)
        if self.reads_images:
            complete = partial(_complete_images, pads_images=self._pads_images)
            for each in filter(None, (self.model, self.ref_model)):
                # Not of the model itself: peft's layers call its `forward` past all hooks.
                backbone = without_wrapper(each).base_model
                backbone.register_forward_pre_hook(complete, with_kwargs=True)
        # TRL would leave out those that ended at a stop string too.
        self._masks_truncated = self.mask_truncated_completions
        if self.reader.stop_strings is not None:
            self.mask_truncated_completions = False
        self._episodes = episodes
        if episodes is not None:
            self.rollout_func = episodes.play

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; if the recipe has images, that of the processor."""
        return self._tokenizer

    @property
    def reads_images(self) -> bool:
        """Whether prompts may hold images."""
        return isinstance(self.processing_class, ProcessorMixin)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run one micro-step; see `check_loss` for what it raises."""
        self.restore_sums()
        loss = super().training_step(model, inputs, num_items_in_batch)
        # The whole step: it may be learned from in other micro-batches than TRL's.
        self.check_loss(loss, self._learned_from or self._buffered_inputs)
        return loss

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the time of each phase to records of training steps, and to TRL's evaluation its metrics."""
        if "loss" in logs:
            logs.update(self._clock.take())
        elif self._evaluation is not None:
            metrics = self._evaluation.metrics(self._logged)
            logs.update({f"eval_{name}": value for name, value in metrics.items()})
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate as TRL does, and the held-out sets that are due."""
        metrics: dict[str, float] = {}
        if self.held_out_sets is None or not self.held_out_sets.only_these:
            with self._evaluating():
                metrics = super().evaluate(*args, **options)
        return metrics if self.held_out_sets is None else {**metrics, **self.evaluate_sets()}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._evaluation, self._merges_evaluation = Evaluation(self), True
        try:
            yield
        finally:
            self._evaluation, self._merges_evaluation, self._logged = None, False, []

    def load_state(self, checkpoint: Path, last_step: int) -> None:
        """Load the state of a checkpoint; first evaluate what it lacks, since that may decide on what follows."""
        super().load_state(checkpoint, last_step)
        if self.held_out_sets is not None and self.held_out_sets.find_missing(self.state):
            self.load_weights(checkpoint)
            self._determine_best_metric(self.evaluate_sets(), None)
            self.save_state(checkpoint)
            self.held_out_sets.raise_if_stopped(self.state)

    def evaluate_sets(self) -> dict[str, float]:
        """Evaluate the held-out sets that are due."""
        metrics = self.held_out_sets.evaluate() if self.held_out_sets else {}
        if metrics:
            self.log_evaluation(metrics)
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log_evaluation(self, metrics: dict[str, float]) -> None:
        """Log the metrics of an evaluation that is not TRL's own."""
        training = self.model.training
        # By this TRL tells whether a record is of training.
        self.model.training = False
        self.log(dict(metrics))
        self.model.training = training

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # With `save_strategy: best` the result decides on saving, which a requested stop does too.
        stops = self.control.should_training_stop and self.control.should_save
        # At a step, only some sets may be due.
        if self.held_out_sets is not None and self.args.metric_for_best_model not in metrics:
            return stops
        return super()._determine_best_metric(metrics, trial) or stops

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self.model.training:
            return self.make_batch(inputs)
        if self.difficulty is not None:
            inputs = self._draw(self.difficulty, len(inputs))
        if self.dynamic_sampling is None:
            return self.make_batch(inputs)
        return self.dynamic_sampling.sample(inputs)

    def _draw(self, difficulty: DifficultySampler, count: int) -> list[Any]:
        """Return the rows of so many completions of this process, instead of those that TRL has drawn."""
        size, processes = self.num_generations, self.accelerator.num_processes
        places = difficulty.take(count * processes // size)
        for name, value in difficulty.metrics().items():
            self._metrics["train"][f"difficulty/{name}"].append(value)
        first = self.accelerator.process_index * count
        return [
            dict(self.train_dataset[places[number // size]])
            for number in range(first, first + count)
        ]

    def make_batch(self, inputs: list[Any], given: Scored | None = None) -> dict[str, Any]:
        """Return TRL's batch of rows; completions that are `given` are not sampled and scored again."""
        self._given = given
        begun, images = self._begun(inputs), self._adding_images()
        with begun as rows, images, self._early.expecting(self._early_rows(rows), self.state):
            batch = super()._generate_and_score_completions(rows)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            self._add_images(batch, ids)
        self._given = None
        self._mark_padded_images(batch)
        silent = self._clear_silent_groups(batch["advantages"])
        if self._evaluation is not None:
            self._evaluation.add(batch, self._last_scored, self._rewards)
            return batch
        if self.sources:
            self._log_sources(inputs, silent)
        if self.reward_func_names == [NO_REWARD]:
            self._leave_out_rewards()
        return batch

    def _leave_out_rewards(self) -> None:
        own = (reward_metric(NO_REWARD, statistic) for statistic in ("mean", "std"))
        for name in (REWARD, REWARD_STD, FRAC_ZERO_STD, *own):
            self._metrics["train"].pop(name, None)

    def scored(self, inputs: list[Any]) -> Scored:
        """Return what was last sampled and scored, from these rows."""
        return Scored(inputs, self._generated, self._rewards.clone())

    def sample_and_score(self, inputs: list[Any]) -> Scored:
        """Sample and score rows, without making a batch of them."""
        self._sampled_entropies = []
        with self._begun(inputs) as rows, self._early.expecting(self._early_rows(rows), self.state):
            prompts = [row["prompt"] for row in rows]
            _, completion_ids, _, completions, *_ = self._generate(prompts)
            self._calculate_rewards(rows, prompts, completions, completion_ids)
        # TRL takes the mean of what rewards have logged when it makes a batch: add up instead.
        for values in self._pending_metrics.values():
            values[:] = [sum(values)]
        self._pending_extra_logs.clear()
        return self.scored(inputs)

    @contextmanager
    def first_metrics_kept(self) -> Iterator[None]:
        """Keep metrics as they are, except for the number of tokens and the seconds of rewards."""
        metrics = self._metrics["train"]
        before = {name: list(values) for name, values in metrics.items()}
        yield
        before[NUM_TOKENS] = metrics[NUM_TOKENS]
        for name in [f"rewards/{reward}/seconds" for reward in self.reward_func_names]:
            if name in before:
                before[name][-1] += metrics[name][-1]
        metrics.clear()
        metrics.update(before)

    def find_silent(self, rewards: torch.Tensor, size: int) -> list[int]:
        """Return the groups of a size that have no signal; `rewards` as for `dynamic_sampling.find_silent`."""
        first = self.multi_objective_aggregation == "normalize_then_sum"
        weights = self.reward_weights.to(rewards.device)
        return find_silent(rewards, size, weights, normalized_first=first)

    def _clear_silent_groups(self, advantages: torch.Tensor) -> list[int]:
        """Set the advantages of groups without signal to exactly 0; count and return these groups."""
        size = self.num_generations if self.model.training else self.num_generations_eval
        silent = self.find_silent(self._rewards, size)
        if self.model.training:
            self._metrics["train"][FRAC_ZERO_STD][-1] = len(silent) * size / len(self._rewards)
        first = self.accelerator.process_index * len(advantages)
        places = [group * size + member - first for group in silent for member in range(size)]
        # One write: on a GPU each costs a kernel.
        advantages[[place for place in places if 0 <= place < len(advantages)]] = 0.0
        return silent

    def _log_sources(self, inputs: list[Any], silent: list[int]) -> None:
        """Log each source's share of the groups of all processes, its reward, and its groups without signal."""
        size = self.num_generations
        names = gather_object([row[SOURCE] for row in inputs])[::size]
        weights = self.reward_weights.to(self._rewards.device)
        totals = (self._rewards * weights).nansum(dim=1)
        # TRL takes no mean over completions that no reward scored.
        totals[self._rewards.isnan().all(dim=1)] = torch.nan
        grouped = totals.view(-1, size)
        metrics = self._metrics["train"]
        for source in self.sources:
            groups = [group for group, name in enumerate(names) if name == source]
            metrics[f"sources/{source}/share"].append(len(groups) / len(names))
            if groups and self.reward_func_names != [NO_REWARD]:
                reward = grouped[groups].nanmean().item()
                metrics[f"sources/{source}/{REWARD}"].append(reward)
                without = len(set(silent).intersection(groups)) / len(groups)
                metrics[f"sources/{source}/{FRAC_ZERO_STD}"].append(without)

    def _early_rows(self, inputs: list[Any]) -> list[Any] | None:
        """Return the rows to score while sampling goes on; an episode is scored at its end."""
        return inputs if self.model.training and self._episodes is None else None

    @contextmanager
    def _begun(self, inputs: list[Any]) -> Iterator[list[Any]]:
        """Begin an episode for each row, if it is sampled and has one; close its environment at the end."""
        if self._episodes is None or self._given is not None:
            yield inputs
            return
        with self._timing_tools():
            rows = self._episodes.begin(inputs)
        try:
            yield rows
        finally:
            self._episodes.close()

    @contextmanager
    def _timing_tools(self, *, out_of: str | None = None) -> Iterator[None]:
        """Add what is waited for tools and environments inside to the phase `tools`."""
        before = self._episodes.waited_s if self._episodes else 0.0
        yield
        if self._episodes is not None:
            self._clock.add("tools", self._episodes.waited_s - before, out_of=out_of)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **options: Any,
    ) -> Any:
        rows = input_ids, attention_mask, logits_to_keep
        self._add_images(options, input_ids)
        self._mark_padded_images(options)
        # TRL (1.16) passes it here alone, and not to what is trained; `_complete_images` adds it to both.
        options.pop("batch_num_images", None)
        if isinstance(model, TeacherServer):
            return model.read(*rows), None, None
        return super()._get_per_token_logps_and_entropies(model, *rows, *args, **options)

    def _mark_padded_images(self, fields: dict[str, Any]) -> None:
        """Have TRL slice images that are padded for each row by rows.

        TRL (1.16) slices them by images if there are as many images as rows, which may be by chance.
        """
        if self._pads_images and fields.get("num_images") is not None:
            fields["num_images"] = [0] * len(fields["num_images"])

    @contextmanager
    def _adding_images(self) -> Iterator[None]:
        """Have `_add_images` add those of the episodes that are played inside; TRL reads the prompts' alone."""
        episodes, encoded = self._episodes, list[dict[str, Any]]()

        def add(fields: dict[str, Any], token_ids: torch.Tensor) -> None:
            if not encoded and episodes is not None:
                encoded.append(episodes.encode_images(self.processing_class, token_ids))
            fields.update(encoded[0])

        if episodes is not None and self.reads_images:
            self._add_images = add
        try:
            yield
        finally:
            self._add_images = _add_nothing

    def _generate(self, prompts: Any) -> Any:
        if self._given is not None:
            columns, self._sampled_entropies = _as_columns(self._given.generated)
            return columns
        synced_s = self._synced_s()
        with self._clock.inside("sampling"), self._timing_tools(out_of="sampling"):
            columns = super()._generate(prompts)
            if self._episodes is not None:
                columns = (*columns[:3], self._episodes.completions, *columns[4:])
            elif not self.reader.skip_special_tokens:
                completions = read_completions(self.reader, prompts, *columns[:2])
                columns = (*columns[:3], completions, *columns[4:])
            if self.reader.stop_strings is not None:
                columns = (*columns[:2], self._count_stopped(*columns[:3]), *columns[3:])
        if synced_s is not None:
            self._clock.add("sync", self._synced_s() - synced_s, out_of="sampling")
        self._generated = _as_rows(columns, self._sampled_entropies, len(prompts))
        return columns

    def _count_stopped(self, prompt_ids: Any, completion_ids: Any, mask: Any) -> Any:
        """Count completions that ended at a stop string as complete; TRL (1.16) takes them for cut off.

        Returns:
            The mask of the tokens that are learned from, without completions that were cut off if
            `mask_truncated_completions` leaves those out.
        """
        pairs = zip(completion_ids, prompt_ids, strict=True)
        ended = [self.reader.is_terminated(*pair) for pair in pairs]
        masks = mask or [[1] * len(ids) for ids in completion_ids]
        counts = [[*each] for each in zip(ended, map(sum, masks), strict=True)]
        counts = self.accelerator.gather(torch.tensor(counts, device=self.accelerator.device))
        lengths = counts[counts[:, 0] == 1, 1].float() if counts[:, 0].any() else torch.zeros(1)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics[CLIPPED_RATIO][-1] = 1 - counts[:, 0].float().mean().item()
        for statistic in ("mean", "min", "max"):
            value = getattr(lengths, statistic)().item()
            metrics[f"completions/{statistic}_terminated_length"][-1] = value
        if not self._masks_truncated:
            return mask
        return [own if end else [0] * len(own) for own, end in zip(masks, ended, strict=True)]

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        ids, images, fields = super()._tokenize_prompts(prompts)
        if images and self.use_vllm:
            self._unexpanded = [
                encode_unexpanded(
                    self.processing_class,
                    prepare_multimodal_messages(prompt),
                    self.chat_template_kwargs,
                )
                for prompt in prompts
            ]
        # TRL has None for a prompt without images, which processors refuse beside others with some.
        return ids, images and [each or [] for each in images], fields

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, fields: Any, num_generations: int, *rest: Any
    ) -> Any:
        sample_rows = super()._generate_single_turn
        if images and self.use_vllm:
            # TRL (1.16) gives vLLM the tokens of images, which vLLM would expand again (trl issue 6294).
            sampled = sample_rows(self._unexpanded, images, fields, num_generations, *rest)
            self.vllm_generation.check_read(prompt_ids)
            return sampled
        # Of several processes, one may have no images.
        if self.reads_images or rest:
            return sample_rows(prompt_ids, images, fields, num_generations, *rest)

        def draw(rows: slice) -> Any:
            return sample_rows(prompt_ids[rows], None, {}, num_generations)

        return self._early.sample(draw, self.reader, prompt_ids, num_generations)

    def _synced_s(self) -> Any:
        """Seconds spent so far on sending weights to vLLM; None with another backend."""
        return getattr(getattr(self, "vllm_generation", None), "synced_s", None)

    def _calculate_rewards(self, *args: Any, **options: Any) -> Any:
        if self._given is not None:
            self._rewards = self._given.rewards
            return self._rewards
        if self._episodes is not None:
            args = self._episodes.add_records(*args)
        self._last_scored = args
        with self._clock.inside("scoring"):
            self._rewards = super()._calculate_rewards(*args, **options)
        if self.difficulty is not None and self.model.training:
            self.difficulty.learn(args[0], self._rewards, self.reward_func_names)
        if self._episodes is not None and self.model.training:
            self._episodes.log_metrics(self._metrics["train"])
        return self._rewards


def _add_nothing(fields: dict[str, Any], token_ids: torch.Tensor) -> None:
    """Add no images: the recipe has no episodes, or no images, or TRL has the batch's."""


_IMAGE_FIELDS = (
    "pixel_values pixel_attention_mask image_grid_thw image_sizes image_position_ids spatial_shapes"
).split()
"""What a processor makes of images."""


def _complete_images(
    model: Any, args: Any, fields: dict[str, Any], *, pads_images: bool
) -> tuple[Any, dict[str, Any]] | None:
    """Mend what TRL (1.16) passes to the part of a model that reads images.

    Rows without images get none, since a vision part reads at least one. Of several images in a row,
    LLaVA-OneVision's processor makes one patch each, which the model has to know.
    """
    pixels, ids = fields.get("pixel_values"), fields.get("input_ids")
    if pixels is None:
        return None
    is_padding = pads_images and ids is not None and not (ids == model.config.image_token_id).any()
    if not len(pixels) or is_padding:
        return args, {name: each for name, each in fields.items() if name not in _IMAGE_FIELDS}
    if model.config.model_type == "llava_onevision" and fields.get("batch_num_images") is None:
        in_patches = pixels[:, 1:].flatten(1).any(dim=1).tolist()
        runs = [(is_cut, len([*run])) for is_cut, run in groupby(in_patches)]
        counts = [[1] * size if is_cut else [size] for is_cut, size in runs]
        return args, {**fields, "batch_num_images": [*chain.from_iterable(counts)]}
    return None


def _as_rows(columns: Any, entropies: Any, count: int) -> list[tuple[Any, ...]]:
    """What TRL's `_generate` returns, by completion, with the entropies of its tokens; None if there is none."""
    whole = [
        list(column)
        if isinstance(column, list | tuple) and len(column) == count
        else [None] * count
        for column in (*columns, entropies)
    ]
    return list(zip(*whole, strict=True))


def _as_columns(rows: list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], list[Any]]:
    columns = [
        None if all(value is None for value in column) else list(column)
        for column in zip(*rows, strict=True)
    ]
    prompt_ids, completion_ids, tool_mask, completions, logprobs, _, images, _, entropies = columns
    texts = prompt_ids, completion_ids, tool_mask, completions, logprobs
    return (*texts, {}, images, []), entropies or []
