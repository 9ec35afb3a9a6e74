"""The cheap part of a probe: everything that needs no weights. Loads tokenizer, data and rewards once."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.batch.plan import batch_inputs, plan_batch
from grpo_cli.data.mixing import spread_rows
from grpo_cli.data.prompts import SYSTEM, render_template
from grpo_cli.data.rows import check_dropped
from grpo_cli.data.solve_rates import find_matches, read_solve_rates
from grpo_cli.env_test.testing import try_instances
from grpo_cli.environments.episode import Episode
from grpo_cli.environments.player import find_rows
from grpo_cli.issues import Issue, Level
from grpo_cli.machine import pick_device
from grpo_cli.models.source import check_model_data
from grpo_cli.models.teacher import check_teacher_tokenizer, find_teacher
from grpo_cli.probing import cost, prompts, settings
from grpo_cli.probing.memory import (
    estimate_memory,
    find_device,
    judge_memory,
    memory_inputs,
    warmup_inputs,
)
from grpo_cli.probing.rewards import check_rewards
from grpo_cli.probing.session import Session
from grpo_cli.probing.signal import CLIPPED, DEAD, WEAK
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.reward_test.findings import unmet_condition
from grpo_cli.rewards.building import right_answers
from grpo_cli.rewards.contract import text_of
from grpo_cli.rewards.scoring import Condition
from grpo_cli.units import count_noun, spread

_FEW_GENERATED = 20
"""Distinct questions of a generated dataset up to which it is too small."""
_MOST_COUNTED = 5000
"""Rows of a split up to which those that are too long are counted, not estimated."""
_ROWS = 1000
"""Prompts whose tokens are counted, spread evenly over the data."""
_LONGEST = 8
"""Prompts with the most characters, which are looked at besides."""
_MOST_ROWS = 50_000
"""Rows, evenly spread, whose prompts are compared with each other and by their length."""
_EPISODE_ROWS = 2
"""Rows whose episodes are played by wrong answers; state that two of them share shows."""
_SHOWN_LENGTH = 10_000
"""Characters of a rendered prompt that are kept."""


def check_statically(session: Session, runs: Path, *, costly: bool) -> None:
    """Check settings, data, prompts, rewards, memory and disk; `costly` rewards are tried only on request.

    Raises:
        GrpoError: The tokenizer, the data or a reward cannot be loaded.
    """
    recipe = session.recipe
    cpu = pick_device(recipe.launch) == "cpu"
    session.add(settings.check_upstream_settings(recipe, cpu=cpu))
    _load_data(session)
    _check_prompts(session)
    if recipe.is_sampled:
        from grpo_cli.probing.special_tokens import check_named

        session.add(check_named(recipe, session.tokenizer))
    if recipe.rewards:
        check_rewards(session, costly=costly)
    elif not recipe.is_sampled:
        session.add(_check_scored(session))
    _estimate(session, runs)


# --- data and prompts --------------------------------------------------------------------------


def _load_data(session: Session) -> None:
    from grpo_cli.data.build import build_datasets
    from grpo_cli.fast.tokens import count_prompt_tokens
    from grpo_cli.models.loading import check_weights, load_config
    from grpo_cli.models.processor import load_processing_class, tokenizer_of

    model = session.recipe.model
    session.tell("loading the tokenizer")
    # First, as these errors are clearer than those of the tokenizer.
    check_model_data(model)
    load_config(model)
    session.processing_class = load_processing_class(model, has_images=session.recipe.has_images)
    session.tokenizer = tokenizer_of(session.processing_class)
    check_teacher_tokenizer(session.recipe, session.tokenizer)
    session.tell("comparing the weights with config.json")
    check_weights(model, session.tokenizer)
    session.tell("loading the data")
    chat = bool(session.tokenizer.chat_template)
    limits = any(each.max_prompt_length for each in session.recipe.dataset.parts)
    count = partial(
        count_prompt_tokens, session.processing_class, chat_template_kwargs=session.chat_kwargs
    )
    session.data = build_datasets(
        session.recipe,
        has_chat_template=chat,
        count_tokens=count if limits else None,
        most_counted=_MOST_COUNTED,
    )
    report = session.data.report
    repeated, rows = report.exact_duplicates_between_splits, report.eval_rows or 0
    if repeated:
        seen = f"{repeated} of {rows} evaluation prompts are training prompts too, word for word"
        fix = (
            "take another split for evaluation, or hold rows out with `dataset.eval_fraction: 0.05`"
        )
        level: Level = "error" if repeated == rows else "warning"
        subject, why = (
            "data: evaluation on training rows",
            "a gain on them shows memory, not learning",
        )
        session.add([Issue(seen, fix, "dataset", level=level, subject=subject, why=why)])
    session.add(_check_rows(session))
    session.add(_check_conditions(session))
    session.add(_check_samples(session))


def _check_rows(session: Session) -> Iterator[Issue]:
    """Find rows that are dropped, or are in the data more than once."""
    train, recipe = session.data.train, session.recipe
    yield from check_dropped(session.data.report.dropped)
    if recipe.environment or recipe.has_images or not recipe.is_sampled:
        return
    # A source of a mixture may be drawn from more than once.
    some = train.select(spread(len(train), _MOST_ROWS))
    texts = dict(zip(some["row_id"][:], map(str, some["prompt"][:]), strict=True))
    distinct = len(set(texts.values()))
    # A generator repeats the questions of a small task, and rows of it cannot be left out.
    generated = recipe.dataset.kind == "reasoning_gym"
    if distinct <= (_FEW_GENERATED if generated else len(texts) / 2) and distinct < len(texts):
        seen = f"{len(texts):,} rows have {count_noun(distinct, 'distinct prompt')}"
        fix = "leave out rows that are in the data twice, or name more columns in `dataset.prompt.user`"
        if generated:
            fix = "widen `dataset.params`, so that the task has more questions"
        why = "training would ask the same again and again"
        yield Issue(seen, fix, "dataset", level="warning", subject="data: rows", why=why)


def _check_conditions(session: Session) -> Iterator[Issue]:
    """Find tools and environments whose `when` holds for no row."""
    from grpo_cli.data.table import list_rows

    train = session.data.train
    for section in ("tools", "environment"):
        for index, config in enumerate(getattr(session.recipe, section)):
            if config.when is None:
                continue
            condition = Condition(config.when)
            rows = train.select_columns(sorted(condition.columns() & {*train.column_names}))
            if not find_rows(config.when, list_rows(rows)):
                path = f"{section}.{index}.when"
                yield unmet_condition(condition, rows[:], len(train), path)


def _check_samples(session: Session) -> Iterator[Issue]:
    """Say of how many rows samples from before tell how difficult they are.

    Raises:
        RecipeError: Of none.
    """
    config = session.recipe.dataset.difficulty
    if config is None or config.kind == "order" or config.samples is None:
        return
    rates = read_solve_rates(config.samples, right_answers(session.recipe.rewards, config.reward))
    found = find_matches(rates, session.data.train["prompt"][:], config.samples)
    known = sum(rate is not None for rate in found)
    if known < len(found):
        seen = f"tells of {known} of {len(found)} training rows"
        fix = "measure more of them: `grpo eval RECIPE --split train --limit N`"
        path, subject = "dataset.difficulty.samples", "data: samples from before"
        why = "how difficult the others are shows only once they are drawn"
        yield Issue(seen, fix, path, level="note", subject=subject, why=why)


def _check_scored(session: Session) -> Iterator[Issue]:
    """Find scored responses that cannot teach anything, or are longer than training takes."""
    groups = session.data.report.groups
    share = groups.equal / groups.prompts
    if share >= WEAK:
        yield Issue(
            f"the responses of {groups.equal} of {groups.prompts} prompts have one and the same reward",
            "score them on a finer scale, or add better and worse responses",
            "dataset.reward",
            level="error" if share >= DEAD else "warning",
            subject="data: groups without spread",
            why="only differences within a prompt are learned from",
        )
    limit, train = session.recipe.generation.max_completion_length, session.data.train
    rows = train.select(spread_rows(train, range(len(train)), _ROWS))
    lengths = [len(session.encode(text)) + 1 for row in rows for text in row["responses"]]
    cut = sum(length > limit for length in lengths) / len(lengths)
    if cut:
        yield Issue(
            f"{cut:.0%} of the responses are cut at {limit} tokens; the longest has {max(lengths)}",
            f"set `max_completion_length: {max(lengths)}`, or leave long ones out of the data",
            "generation.max_completion_length",
            level="warning" if cut >= CLIPPED else "note",
            subject="length: cut off",
            why="the end of an answer is part of what its reward is for",
        )


def _check_prompts(session: Session) -> None:
    from grpo_cli.data.table import list_rows
    from grpo_cli.fast.completions import declared_eos_token_ids
    from grpo_cli.models.loading import load_generation_config

    session.tell("beginning episodes" if session.recipe.has_episodes else "looking at the prompts")
    recipe, train, tokenizer = session.recipe, session.data.train, session.tokenizer
    kwargs, limit = session.chat_kwargs, session.prompt_limit
    places = _choose_places(session)
    chosen, rendered, lengths = _read_prompts(session, places)
    if not chosen:
        return
    if recipe.environment:
        first = list_rows(train.select(places[:_EPISODE_ROWS]))
        found = try_instances(recipe, first)
        session.add(replace(each, subject="episodes") for each in found if each.level != "note")
    sample = prompts.PromptSample(
        rendered[0][:_SHOWN_LENGTH], tuple(lengths), tuple(places), len(train)
    )
    session.probe.prompts = sample
    # The batch arithmetic with the rows that are left once long prompts are dropped.
    rows = None
    if session.data.report.train_rows is not None:
        rows = round(sample.total * len(sample.kept(limit)) / len(lengths))
    eval_rows, processes = session.data.report.eval_rows or None, int(recipe.launch.num_processes)
    session.plan = plan_batch(batch_inputs(recipe, processes, rows, eval_rows))
    limits = {"model.path": _context_of(recipe.model)}
    if (teacher := find_teacher(recipe)) is not None:
        limits["teacher.path"] = _context_of(teacher.model)
    if recipe.generation.backend == "vllm":
        limits[prompts.VLLM_LENGTH] = recipe.setting("vllm_max_model_length")
    fits = prompts.check_lengths(
        sample,
        longest_allowed=limit,
        completion=recipe.generation.max_completion_length,
        limits=limits,
    )
    declared = declared_eos_token_ids(load_generation_config(recipe.model))
    if not recipe.environment and not recipe.has_images:
        session.add(prompts.check_differ(rendered))
    session.add(replace(problem, subject="batch") for problem in session.plan.problems)
    session.add(fits)
    session.add(prompts.check_stop_tokens(tokenizer, declared, chosen, kwargs))
    system = "model.chat_template" if recipe.dataset.prompt.system is None else SYSTEM
    session.add(prompts.check_template(tokenizer, chosen[0], kwargs, system))


def _context_of(model: ModelConfig) -> int | None:
    """Return how many positions a model was made for; None if its config does not say."""
    from grpo_cli.models.loading import load_config

    return getattr(load_config(model).get_text_config(), "max_position_embeddings", None)


def _choose_places(session: Session) -> list[int]:
    """Return rows spread evenly over the data, and those with the longest prompts.

    Where an environment begins an episode in each row, they are few.
    """
    train = session.data.train
    count = session.prompts_sampled if session.recipe.environment else _ROWS
    some = spread(len(train), _MOST_ROWS)
    sizes = [len(text_of(prompt)) for prompt in train.select(some)["prompt"][:]]
    order = sorted(range(len(some)), key=lambda place: -sizes[place])
    longest = [some[place] for place in order[:_LONGEST]]
    return sorted({*spread_rows(train, range(len(train)), count), *longest})


def _read_prompts(
    session: Session, places: Sequence[int]
) -> tuple[list[Any], list[str], list[int]]:
    """Return the prompts of some rows, these as the model reads them, and their tokens.

    All are empty if episodes cannot begin, which is a finding.
    """
    from grpo_cli.data.table import list_rows
    from grpo_cli.environments.player import open_player
    from grpo_cli.fast.tokens import count_row_tokens

    rows, tokenizer, kwargs = (
        session.data.train.select(places),
        session.tokenizer,
        session.chat_kwargs,
    )
    if not session.recipe.has_episodes:
        chosen = rows["prompt"][:]
        rendered = [prompts.render(tokenizer, prompt, kwargs) for prompt in chosen]
        return chosen, rendered, count_row_tokens(session.processing_class, rows, kwargs)
    episodes: list[Episode] = []
    path = "environment" if session.recipe.environment else "tools"
    with (
        session.failing("episodes", path),
        open_player(session.recipe, session.processing_class) as player,
    ):
        episodes = player.begin(list_rows(rows))
        player.close(episodes)
    ids = [each.prompt_ids for each in episodes]
    return [each.prompt for each in episodes], list(map(tokenizer.decode, ids)), list(map(len, ids))


# --- memory and disk ---------------------------------------------------------------------------


def _estimate(session: Session, runs: Path) -> None:
    """Estimate memory and disk; activations that cannot be counted are left out."""
    from grpo_cli.probing.counting import count_weight_bytes, read_shape

    session.tell("counting the model")
    recipe, plan, sample = session.recipe, session.plan, session.probe.prompts
    if plan is None or sample is None:
        return
    device = find_device(recipe)
    longest = min(sample.longest, session.prompt_limit or sample.longest)
    shape = read_shape(
        recipe.model,
        batch=recipe.training.per_device_train_batch_size,
        length=longest + recipe.generation.max_completion_length,
        activations="bfloat16" if device.autocast else None,
        cuda=device.kind == "cuda",
        images=_process_most_images(session) if recipe.dataset.has_images else None,
    )
    if shape.saved_bytes_per_token is None:
        seen = "activations are not in the estimate: they cannot be counted for this architecture"
        fix, why = (
            "watch the memory of the first steps",
            "with long completions they are the largest part",
        )
        session.add([Issue(seen, fix, level="note", subject="cost: memory", why=why)])
    if recipe.has_images and (shape.images is None or recipe.has_episodes):
        seen = "the memory that images take while they are read is not in the estimate"
        fix = "watch the memory of the first steps; `model.processor` can make images smaller"
        why = "the weights of the vision part are counted, and images as tokens of their prompts"
        session.add([Issue(seen, fix, level="note", subject="cost: memory", why=why)])
    inputs = memory_inputs(recipe, device, longest, session.sampled_at_once())
    if (teacher := find_teacher(recipe)) is not None:
        size = count_weight_bytes(teacher.model, cuda=device.kind == "cuda")
        inputs = replace(inputs, teacher_bytes=size)
    stages = [inputs]
    if recipe.warmup is not None:
        stages.append(warmup_inputs(inputs, recipe.warmup, _longest_answer(session)))
    memory = max(
        (estimate_memory(shape, each) for each in stages), key=lambda each: each.peak_bytes
    )
    disk = cost.estimate_disk(recipe, plan, shape)
    session.shape = shape
    session.probe.memory, session.probe.memory_available = memory, device.available
    session.probe.disk = disk
    session.add(judge_memory(memory, device, recipe, plan))
    folder = next(path for path in (runs, *runs.absolute().parents) if path.is_dir())
    session.add(cost.judge_disk(disk, shutil.disk_usage(folder).free))


def _process_most_images(session: Session) -> Mapping[str, Any] | None:
    """Return what the processor makes of the images of a row with the most; None if none has any."""
    sample = session.probe.prompts
    rows = session.data.train.select(sample.places if sample else ())
    counts = list(map(len, rows.select_columns([IMAGES]).to_dict()[IMAGES]))
    if not any(counts):
        return None
    images = rows[counts.index(max(counts))][IMAGES]
    made = session.processing_class.image_processor(images=images, return_tensors="pt")
    return {name: each for name, each in made.items() if hasattr(each, "nbytes")}


def _longest_answer(session: Session) -> int:
    """Return the tokens of the longest answer of the warm-up; of a completion if the recipe does not say them."""
    from grpo_cli.fast.tokens import encode_answer

    recipe, warmup = session.recipe, session.recipe.warmup
    if warmup is None or not warmup.answer or warmup.train or recipe.has_episodes:
        return recipe.generation.max_completion_length
    rows = session.data.train.select(range(min(warmup.limit, len(session.data.train))))
    texts = [
        render_template(warmup.answer[0], row, f"row {row['row_id'] + 1}", "warmup.answer")
        for row in rows
    ]
    return max(len(encode_answer(session.tokenizer, text)) for text in texts)
