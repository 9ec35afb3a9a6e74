"""What a warm-up learns from: answers that the recipe writes, or the best of the model's own completions."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset

from grpo_cli.analysis.samples import ScoredCompletion, score_samples
from grpo_cli.data.build import build_datasets
from grpo_cli.data.prompts import render_template
from grpo_cli.data.table import list_rows
from grpo_cli.environments.episode import Sampled, is_clipped
from grpo_cli.environments.player import Player, sample_episodes
from grpo_cli.errors import RunError
from grpo_cli.fast.completions import Completion, check_context, open_sampler, sample_completions
from grpo_cli.fast.tokens import count_prompt_tokens, encode_answer, encode_prompt
from grpo_cli.models.loading import load_config
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.warmup import WarmupConfig
from grpo_cli.rewards.scoring import Reward, reward_columns
from grpo_cli.runs.files import write_text
from grpo_cli.runs.folder import RunFolder
from grpo_cli.training.checkpoints import states_kept
from grpo_cli.training.measurement import measure_together
from grpo_cli.training.session import Session

WARMING = "warming up"
_ANSWER = "warmup.answer"
_IGNORED = -100


@dataclass(frozen=True)
class Example:
    """One answer to learn from."""

    row: int
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    """The answer's; of an episode all that followed its prompt, results included."""
    mask: Sequence[int]
    """1 at the model's own tokens."""
    text: str
    reward: float | None = None
    """The weighted sum of the rewards, if it was sampled."""

    def as_features(self) -> dict[str, list[int]]:
        """Return it as `SFTTrainer` takes it."""
        labels = [
            token if own else _IGNORED for token, own in zip(self.token_ids, self.mask, strict=True)
        ]
        return {
            "input_ids": [*self.prompt_ids, *self.token_ids],
            "labels": [_IGNORED] * len(self.prompt_ids) + labels,
        }


def read_rows(recipe: Recipe, train: Dataset, tokenizer: Any) -> Dataset:
    """Return the rows of the warm-up: its own, or the first ones that GRPO trains on.

    Raises:
        RecipeError: Its files do not fit the recipe.
    """
    warmup = section_of(recipe)
    if (dataset := warmup.read_from(recipe.dataset)) is not None:
        template = recipe.setting("chat_template_kwargs")
        train = build_datasets(
            recipe.model_copy(update={"dataset": dataset}),
            has_chat_template=bool(tokenizer.chat_template),
            count_tokens=lambda prompt: count_prompt_tokens(tokenizer, prompt, template),
        ).train
    return train.select(range(min(warmup.limit, len(train))))


def write_examples(
    session: Session, tokenizer: Any, rows: Dataset, player: Player | None
) -> list[Example]:
    """Return the answers that the recipe writes for each row; episodes are played with them.

    Raises:
        RecipeError: A template fails on a row.
        RunError: An answer is too long, or an episode does not fit the answers.
    """
    templates, examples = section_of(session.recipe).answer or (), []
    for number, row in enumerate(list_rows(rows)):
        where = f"row {row['row_id'] + 1}"
        texts = [render_template(text, row, where, _ANSWER) for text in templates]
        answers = [encode_answer(tokenizer, text) for text in texts]
        if player is None:
            prompt_ids = encode_prompt(tokenizer, row["prompt"], _template_kwargs(session))
            (ids,) = answers
            example = Example(row["row_id"], prompt_ids, ids, [1] * len(ids), texts[0])
        else:
            example = _play_script(player, row, answers, texts, where)
        examples.append(example)
        if number % 16 == 0:
            report_progress(session, number, len(rows), "answers")
    _check_lengths(session, examples)
    return examples


def _template_kwargs(session: Session) -> dict[str, Any] | None:
    return session.recipe.setting("chat_template_kwargs")


def _play_script(
    player: Player, row: dict[str, Any], answers: list[list[int]], texts: list[str], where: str
) -> Example:
    """Play an episode in which the model gives the answers of the recipe, and the results are real."""
    script = iter(answers)

    def give(contexts: list[list[int]], longest: int) -> Sampled:
        answer = next(script, None)
        if answer is None:
            raise RunError(
                f"the episode of {where} goes on after the {len(answers)} answers of `{_ANSWER}`",
                "add what the model should write next",
            )
        return Sampled([answer])

    (episode,) = player.begin([row])
    player.play([episode], give)
    if failed := next((call for call in episode.calls if call.failure), None):
        replies = [str(each["content"]) for each in episode.messages if each["role"] != "assistant"]
        why = next((each for each in replies if each.startswith("Error: ")), failed.failure)
        why = " ".join(why.removeprefix("Error: ").split())
        raise RunError(
            f"the call of `{failed.tool or '?'}` in {where} failed: {why}",
            f"correct the tool, or `{_ANSWER}`, which would teach the model to make this call",
        )
    if left := len([*script]):
        why = episode.end or "ended"
        raise RunError(
            f"the episode of {where} ended ({why}) before {left} of the {len(answers)} answers of `{_ANSWER}`",
            "write a call that the model's tools take, or fewer answers",
        )
    if is_clipped(episode.end):
        raise _too_long(where, len(episode.token_ids))
    return Example(
        row["row_id"], episode.prompt_ids, episode.token_ids, episode.mask, "\n".join(texts)
    )


def _check_lengths(session: Session, examples: Sequence[Example]) -> None:
    """Refuse answers that the model could not give in GRPO, and sequences that it cannot read."""
    limit = session.recipe.generation.max_completion_length
    for each in examples:
        if len(each.token_ids) > limit:
            raise _too_long(f"row {each.row + 1}", len(each.token_ids))
    longest = max(len(each.prompt_ids) + len(each.token_ids) for each in examples)
    check_context(longest, load_config(session.recipe.model))


def _too_long(where: str, tokens: int) -> RunError:
    return RunError(
        f"the answer of {where} has {tokens} tokens, and completions are cut at "
        "`generation.max_completion_length`",
        "raise it, or shorten `warmup.answer`",
    )


def sample_best(
    session: Session,
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    rewards: Sequence[Reward],
    player: Player | None,
) -> list[Example]:
    """Sample completions of each row; return the best of those rows whose best is not below the mean of all.

    Raises:
        RunError: All completions score the same, so none is better than another.
        Stopped: A process was stopped meanwhile.
    """
    shares = measure_together(
        WARMING, lambda: _sample_share(session, model, tokenizer, rows, rewards, player)
    )
    found, totals = (list(chain.from_iterable(each)) for each in zip(*shares, strict=True))
    if not totals:
        raise RunError(
            "no reward gave any completion of the warm-up a score",
            "correct the rewards' `when`, or the columns that they read",
        )
    mean = fmean(totals)
    chosen = [each for each in found if each.reward is not None and each.reward >= mean]
    if min(totals) == max(totals) or not chosen:
        why = "" if chosen else ", and the best are cut off"
        scores = f"{min(totals):g} to {max(totals):g}{why}"
        raise RunError(
            f"the {len(totals)} completions of the warm-up score {scores}: there is nothing to choose",
            "write what the model should learn in `warmup.answer`",
        )
    return sorted(chosen, key=lambda each: each.row)


def _sample_share(
    session: Session,
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    rewards: Sequence[Reward],
    player: Player | None,
) -> tuple[list[Example], list[float]]:
    """Return the best completion of each of this process's rows, and what all of them score."""
    rank, count = session.processes.process_index, session.processes.num_processes
    shard = rows.select(range(rank, len(rows), count))
    if not len(shard):
        return [], []
    sampled = _sample(session, model, tokenizer, shard, player)
    with states_kept(rewards):
        columns = reward_columns(shard, rewards)
        scored = score_samples(rewards, columns, sampled, session.recipe.seed + rank)
    flat = [completion for group in sampled for completion in group]
    best = []
    for place, total in _find_best(scored):
        row, prompt = scored[place].row, shard[scored[place].group]["prompt"]
        best.append(_as_example(session, tokenizer, prompt, flat[place], row, total))
    return best, [each.total for each in scored if each.total is not None]


def _find_best(scored: Sequence[ScoredCompletion]) -> list[tuple[int, float]]:
    """Return place and total of the best completion of each prompt, of scored ones that are not cut off."""
    best: dict[int, tuple[int, float]] = {}
    for place, each in enumerate(scored):
        if each.clipped or each.total is None:
            continue
        if each.group not in best or each.total > best[each.group][1]:
            best[each.group] = place, each.total
    return [*best.values()]


def _as_example(
    session: Session, tokenizer: Any, prompt: Any, completion: Completion, row: int, total: float
) -> Example:
    sequence = completion.sequence
    if sequence is None:
        prompt_ids = encode_prompt(tokenizer, prompt, _template_kwargs(session))
        sequence = prompt_ids, completion.token_ids, [1] * len(completion.token_ids)
    return Example(row, *sequence, completion.text, total)


def _sample(
    session: Session, model: Any, tokenizer: Any, rows: Dataset, player: Player | None
) -> list[list[Completion]]:
    """Sample as training does, with transformers."""
    recipe = session.recipe
    count = section_of(recipe).best_of or 1
    shared = {
        "temperature": recipe.generation.temperature,
        "options": recipe.generation.sampling_options,
        "seed": recipe.seed + session.processes.process_index,
        "fast": recipe.training.fast,
    }

    def progress(done: int, total: int) -> None:
        report_progress(session, done, total, "completions")

    if player is None:
        settings = session.recipe.sampling_settings() | shared
        return sample_completions(
            model,
            tokenizer,
            list(rows["prompt"]),
            **settings,
            samples_per_prompt=count,
            on_progress=progress,
        )
    size = recipe.evaluation.batch_size
    shared["stop_strings"] = recipe.generation.reading["stop_strings"]
    with open_sampler(model, tokenizer, batch_size=size, **shared) as draw:
        return sample_episodes(
            player,
            list_rows(rows),
            draw,
            samples_per_prompt=count,
            batch_size=size,
            on_progress=progress,
        )


def save_examples(folder: RunFolder, examples: Sequence[Example]) -> None:
    """Write `warmup/examples.jsonl`."""
    folder.warmup.mkdir(exist_ok=True)
    lines = [json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in examples]
    write_text(_file(folder), "".join(lines))


def has_examples(folder: RunFolder) -> bool:
    """Return whether they are written, by this attempt or an earlier one."""
    return _file(folder).is_file()


def read_examples(folder: RunFolder) -> list[Example]:
    """Return what was written."""
    return [Example(**json.loads(line)) for line in _file(folder).read_bytes().split(b"\n") if line]


def _file(folder: RunFolder) -> Path:
    return folder.warmup / "examples.jsonl"


def section_of(recipe: Recipe) -> WarmupConfig:
    """Return the recipe's `warmup`; a `ValueError` if it has none."""
    if recipe.warmup is None:
        raise ValueError("the recipe has no warm-up")
    return recipe.warmup


def report_progress(session: Session, done: int, planned: int, units: str) -> None:
    """Report the progress of the warm-up; raise `Stopped` if a stop is requested."""
    session.heartbeat.beat()
    session.report(WARMING, done=done, planned=planned, detail=units)
