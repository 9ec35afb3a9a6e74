"""A probe: static checks without weights, then sampling and one training step.

`python -m grpo_cli.probing.procedure RUN [RECIPE]` is the quick probe of a run folder, in a process of its own:
rewards and libraries that it loads must not stay beside the training. It prints JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.analysis.metrics import Metric
from grpo_cli.analysis.samples import ScoredCompletion, score_samples
from grpo_cli.batch.plan import BatchPlan
from grpo_cli.data.mixing import spread_rows
from grpo_cli.errors import GrpoError, ProblemsError, RunError
from grpo_cli.issues import Issue, Level
from grpo_cli.probing.cost import DiskEstimate, TimeEstimate, estimate_time, judge_time
from grpo_cli.probing.memory import MemoryEstimate
from grpo_cli.probing.prompts import PromptSample
from grpo_cli.probing.rewards import HangError
from grpo_cli.probing.signal import (
    Lengths,
    Signal,
    judge,
    judge_episodes,
    read_episodes,
    read_lengths,
    read_signal,
)
from grpo_cli.probing.static_checks import check_statically
from grpo_cli.recipe.recipe import Recipe, resolve_fast
from grpo_cli.reward_test.testing import RewardTestResult
from grpo_cli.rewards.building import right_scores
from grpo_cli.rewards.scoring import Reward, reward_columns
from grpo_cli.runs.files import finite
from grpo_cli.runs.folder import RunFolder

if TYPE_CHECKING:
    from grpo_cli.probing.counting import ModelShape
    from grpo_cli.probing.model_run import ModelRun

PROMPTS = 16
Progress = Callable[[str], None]
_LEVELS: Sequence[Level] = ("error", "warning", "note", "ok")


@dataclass
class Probe:
    """Everything a probe saw; what it did not come to is None or empty."""

    recipe: str
    """Path of the recipe."""
    findings: list[Issue] = field(default_factory=list)
    prompts: PromptSample | None = None
    trial: RewardTestResult | None = None
    memory: MemoryEstimate | None = None
    memory_available: int | None = None
    """Bytes for one process on the device it will train on."""
    disk: DiskEstimate | None = None
    time: TimeEstimate | None = None
    """None if nothing was sampled, or the number of steps is not known."""
    signal: Signal | None = None
    episodes: dict[str, Metric] | None = None
    """What became of the episodes, by the names of `EPISODE_METRICS`; None if there were none."""
    lengths: Lengths | None = None
    samples: list[ScoredCompletion] = field(default_factory=list)
    quick: bool = False
    """Whether all that needs weights was left out."""
    seconds: float = 0.0
    """How long the probe took."""

    @property
    def errors(self) -> list[Issue]:
        """What forbids a training."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def sorted_findings(self) -> list[Issue]:
        """The worst first."""
        return sorted(self.findings, key=lambda finding: _LEVELS.index(finding.level))

    def as_json(self) -> dict[str, Any]:
        """Return the probe as plain values."""
        return {
            "recipe": self.recipe,
            "quick": self.quick,
            "healthy": not self.errors,
            "errors": len(self.errors),
            "warnings": sum(finding.level == "warning" for finding in self.findings),
            "findings": [finding.as_json() for finding in self.sorted_findings],
            "prompts": self.prompts.as_json() if self.prompts else None,
            "signal": asdict(self.signal) if self.signal else None,
            "episodes": {name: each.as_json() for name, each in self.episodes.items()}
            if self.episodes
            else None,
            "completion_lengths": asdict(self.lengths) if self.lengths else None,
            "reward_test": self.trial.as_json() if self.trial else None,
            "memory": self.memory.as_json() if self.memory else None,
            "memory_available_bytes": self.memory_available,
            "disk": {**asdict(self.disk), "total_bytes": self.disk.total} if self.disk else None,
            "time": asdict(self.time) if self.time else None,
            "samples": [asdict(sample) for sample in self.samples],
            "probe_seconds": round(self.seconds, 1),
        }


@dataclass
class Session:
    """A recipe, what was loaded for it, and what was found so far."""

    recipe: Recipe
    probe: Probe
    tell: Progress
    tokenizer: Any = None
    processing_class: Any = None
    """The processor if prompts may hold images, otherwise the tokenizer."""
    data: Any = None
    """`BuiltData`."""
    prompts_sampled: int = PROMPTS
    """Prompts to sample completions for."""
    plan: BatchPlan | None = None
    rewards: tuple[Reward, ...] = ()
    shape: "ModelShape | None" = None

    def add(self, findings: Iterable[Issue]) -> None:
        """Keep what was found, once."""
        known = self.probe.findings
        known += [finding for finding in findings if finding not in known]

    @contextmanager
    def failing(
        self, subject: str, path: str, level: Level = "error", why: str = ""
    ) -> Iterator[None]:
        """Make a finding of a failure that the training would meet too."""
        try:
            yield
        except RunError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            # Names of parameters alone are relative to the entry of the recipe that failed.
            path = error.path if "." in error.path else path
            issue = error.as_issue(path, level=level, subject=subject)
            fix = (
                issue.fix or f"correct it, and try it alone: grpo rewards test {self.probe.recipe}"
            )
            why = why or "the same error would end the training"
            self.add([replace(issue, fix=fix, why=why, details=())])
        except HangError as error:
            why = "a training would wait for it"
            self.add([replace(error.issue, level=level, subject=subject, why=why)])

    @property
    def prompt_limit(self) -> int | None:
        """The longest prompt that is not dropped; None if none is, or what an environment adds is not counted."""
        return None if self.recipe.has_episodes else self.recipe.dataset.longest_prompt

    @property
    def chat_kwargs(self) -> dict[str, Any] | None:
        """The recipe's variables for the chat template."""
        return self.recipe.setting("chat_template_kwargs")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def sampled_at_once(self) -> int:
        """Return the completions one process samples at a time: its share of a generation batch."""
        steps = (self.plan.steps_per_generation if self.plan else None) or 1
        return steps * self.recipe.training.per_device_train_batch_size


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
