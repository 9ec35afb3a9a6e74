"""A probe: static checks without weights, then sampling and one training step.

`python -m grpo_cli.probing.procedure RUN [RECIPE]` is the quick probe of a run folder, in a process of its own:
rewards and libraries that it loads must not stay beside the training. It prints JSON.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.analysis.samples import ScoredCompletion, score_samples
from grpo_cli.data.mixing import spread_rows
from grpo_cli.errors import GrpoError, ProblemsError
from grpo_cli.issues import Issue
from grpo_cli.probing.cost import estimate_time, judge_time
from grpo_cli.probing.session import PROMPTS, Probe, Progress, Session
from grpo_cli.probing.signal import (
    judge,
    judge_episodes,
    read_episodes,
    read_lengths,
    read_signal,
)
from grpo_cli.probing.static_checks import check_statically
from grpo_cli.recipe.recipe import Recipe, resolve_fast
from grpo_cli.rewards.building import right_scores
from grpo_cli.rewards.scoring import reward_columns
from grpo_cli.runs.files import finite
from grpo_cli.runs.folder import RunFolder

if TYPE_CHECKING:
    from grpo_cli.probing.model_run import ModelRun


def probe_recipe(
    recipe: Recipe,
    *,
    source: Path | None = None,
    runs: Path = Path("runs"),
    prompts_sampled: int = PROMPTS,
    quick: bool = False,
    on_progress: Progress = lambda what: None,
    known: Iterable[Issue] = (),
) -> Probe:
    """Look for what would make a training of a recipe fail, or learn nothing.

    Args:
        recipe: A recipe without errors, its number of processes worked out.
        source: The recipe's file, for the result.
        runs: Where run folders go.
        prompts_sampled: Prompts to sample completions for.
        quick: Leave out all that needs the model's weights.
        on_progress: Called with what is being done.
        known: What `check_recipe` found; settings with which little is learned are findings too.

    Raises:
        GrpoError: The model, the data or a reward cannot be loaded.
    """
    started = time.monotonic()
    probe = Probe(str(source or recipe.name), quick=quick)
    session = Session(recipe, probe, on_progress, prompts_sampled=prompts_sampled)
    session.add(issue for issue in known if issue.subject)
    check_statically(session, runs, costly=not quick)
    if not quick and recipe.is_sampled:
        _sample_and_judge(session)
    probe.seconds = time.monotonic() - started
    return probe


def _sample_and_judge(session: Session) -> None:
    """Sample completions of some prompts with the real model, and take one training step if that fits."""
    available, shape, memory = session.probe.memory_available, session.shape, session.probe.memory
    if shape and available is not None and shape.weight_bytes > available:
        seen = "nothing was sampled: the weights alone do not fit into this machine's memory"
        fix = "run the probe where the training will run"
        session.add([Issue(seen, fix, level="note", subject="signal")])
        return
    rows = _choose_rows(session)
    if rows is None:
        # The static checks have said which prompts do not fit.
        return
    from grpo_cli.probing.model_run import run_model
    from grpo_cli.probing.special_tokens import check_sampled

    run, scored = None, []
    fits = not memory or available is None or memory.peak_bytes <= available
    if session.recipe.has_images:
        seen = "no training step was taken, so the time of the training is not estimated"
        fix, why = "see the first steps", "a step with images cannot be timed yet"
        session.add([Issue(seen, fix, level="note", subject="cost: time", why=why)])
    with session.failing("sampling", "training", why="a training would meet the same"):
        run = run_model(
            session.recipe,
            session.processing_class,
            rows,
            batch_size=session.sampled_at_once(),
            takes_step=fits and not session.recipe.has_images,
            tell=session.tell,
        )
    if run is None:
        return
    session.add(check_sampled(session.recipe, session.tokenizer, run.sampled))
    session.tell("scoring")
    began = time.perf_counter()
    with session.failing("rewards: failure", "rewards"):
        columns = reward_columns(rows, session.rewards)
        scored = score_samples(session.rewards, columns, run.sampled)
    if scored:
        score_s = (time.perf_counter() - began) / len(scored)
        _judge_signal(session, scored)
        _judge_time(session, run, score_s)


def _choose_rows(session: Session) -> Any:
    """Return rows spread evenly over those whose prompts are neither dropped nor too long to be answered."""
    train, sample = session.data.train, session.probe.prompts
    if sample is None:
        return None
    limits = [sample.longest, session.prompt_limit]
    if session.shape is not None and session.shape.context is not None:
        limits.append(session.shape.context - session.recipe.generation.max_completion_length)
    longest = min(limit for limit in limits if limit is not None)
    pairs = zip(sample.places, sample.lengths, strict=True)
    kept = [place for place, length in pairs if length <= longest]
    return train.select(spread_rows(train, kept, session.prompts_sampled)) if kept else None


def _judge_signal(session: Session, scored: list[ScoredCompletion]) -> None:
    probe, recipe = session.probe, session.recipe
    probe.samples = scored
    probe.lengths = read_lengths(scored, recipe.generation.max_completion_length)
    masked = bool(recipe.setting("mask_truncated_completions"))
    context, room = session.shape.context if session.shape else None, None
    kept = probe.prompts.kept(session.prompt_limit) if probe.prompts else []
    if context is not None and kept:
        room = max(context - max(kept), 1)
    if recipe.learns_from_rewards:
        right = right_scores(recipe.rewards)
        probe.signal = read_signal(scored, right)
        issues = judge(probe.signal, probe.lengths, masked=masked, room=room)
        if any(reward.kind == "environment" for reward in recipe.rewards):
            first = f"see that reward() tells right from wrong: grpo env test {probe.recipe}"
            issues = (
                replace(each, fix=f"{first}; if it does, {each.fix}")
                if each.path in ("rewards", "dataset")
                else each
                for each in issues
            )
        if recipe.warmup is not None:
            # What it samples is what the warm-up is to change.
            issues = (
                replace(each, level="note", seen=f"before the warm-up, {each.seen}")
                for each in issues
            )
        session.add(issues)
    if recipe.has_episodes:
        probe.episodes = read_episodes(scored)
        session.add(judge_episodes(probe.episodes, recipe.episode))


def _judge_time(session: Session, run: "ModelRun", score_s: float) -> None:
    recipe, probe, plan = session.recipe, session.probe, session.plan
    if run.timings is None or plan is None:
        return
    dynamic = recipe.generation.dynamic_sampling
    silent = probe.signal.frac_reward_zero_std if probe.signal else 0.0
    # Groups without signal after each time of sampling, as shares of those that are learned from.
    shares = [silent ** (n + 1) for n in range((dynamic.max_resample if dynamic else 0) + 1)]
    learned = _learned_share(session, run, shares[-1])
    timings = replace(run.timings, score_s=score_s, learned=learned, resampled=sum(shares[:-1]))
    report = session.data.report
    of_sources = {name: each["eval_rows"] for name, each in (report.sources or {}).items()}
    probe.time = estimate_time(recipe, plan, timings, report.eval_rows or 0, of_sources)
    if probe.time is not None:
        session.add(judge_time(recipe, probe.time))


def _learned_share(session: Session, run: "ModelRun", silent: float) -> float:
    """Return the share of a micro-batch's tokens that is computed, going by the completions sampled."""
    recipe, prompts = session.recipe, session.probe.prompts
    fast = resolve_fast(recipe)
    share = 1 - silent if fast.no_signal else 1.0
    if not fast.shared_prompts or prompts is None:
        return share
    prompt = sum(prompts.lengths) / len(prompts.lengths) / recipe.generation.num_generations
    size = recipe.training.per_device_train_batch_size
    return share * min(size * (prompt + run.mean_tokens) / run.step_tokens, 1.0)


def probe_run(run: Path, source: Path | None = None) -> dict[str, Any]:
    """Probe the recipe in `RUN/resolved.json` quickly; return the issues, and the exit code of an error."""
    folder = RunFolder(run)
    try:
        probe = probe_recipe(
            folder.read_recipe(), source=source, runs=folder.path.parent, quick=True
        )
    except GrpoError as error:
        problems = error.problems if isinstance(error, ProblemsError) else [error.as_issue()]
        issues = [problem.as_json() for problem in problems]
        return {"exit_code": int(error.exit_code), "issues": issues}
    return {"exit_code": None, "issues": probe.as_json()["findings"]}


if __name__ == "__main__":
    # What rewards and libraries print is not the result.
    result, sys.stdout = sys.stdout, sys.stderr
    json.dump(finite(probe_run(*map(Path, sys.argv[1:]))), result)
