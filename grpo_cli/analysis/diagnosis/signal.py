"""Rules on what is sampled: whether completions differ, their lengths, the time, and the sources of a mixture."""

from statistics import fmean

from grpo_cli.analysis.diagnosis.history import (
    LIKELY,
    NOW,
    History,
    judges,
    lasting_share,
    near_best,
    rewards_of,
)
from grpo_cli.analysis.diagnosis.rule import (
    AXOLOTL,
    PROBE,
    Rule,
    rewarded_only,
    sampled_only,
    slower,
    try_rewards,
)
from grpo_cli.issues import Issue
from grpo_cli.recipe.recipe import Recipe

_SILENT = "frac_reward_zero_std"
_LEFT = "dynamic_sampling/frac_reward_zero_std"
"""The same after groups were replaced: of what is trained on."""
_CLIPPED, _LENGTH = "completions/clipped_ratio", "completions/mean_length"
_LIMIT = "generation.max_completion_length"
_DIFFERENCE = "sampling/sampling_logp_difference/mean"
_NEUTRAL = {"temperature": "1.0", "top_p": "1.0", "top_k": "0", "min_p": "null"}
MOST_SILENT = 0.8
"""Share of groups whose rewards are all equal."""
COLLAPSED = 0.01
"""Entropy in nats a token below which all completions are the same."""
_MOST_REPEATED, _NEARLY_ALL, _FEW_TOKENS = 0.5, 0.95, 20
"""Answers of fewer tokens are often equal because there is one right way to put them."""
MANY_CLIPPED, _MOST_CLIPPED = 0.5, 0.8
_LEAST_RISE = 0.1
"""Of a reward's size or spread: a smaller rise does not make up for answers that are cut off."""
_GROWTH, _NEAR_LIMIT, _SHRINKAGE = 2.0, 0.8, 0.25
_BEGUN = 3
"""Records that the first length is the mean of: a length that is rewarded changes within ten steps."""
_USUAL_DIFFERENCE, _MOST_DIFFERENCE = 0.1, 1.0
"""Nats a token between the log-probabilities of vLLM and of the trainer."""
_MOST_SAMPLING = 0.9
"""Share of a step's time."""


def is_solved(history: History) -> bool:
    """Return whether groups agree because their answers are right, or as good as they get."""
    entropy = history.mean("entropy")
    # A policy that gives one answer only agrees with itself, whatever that is worth.
    collapsed = entropy is not None and entropy < COLLAPSED
    return history.is_near_best() or (history.has_risen() and not collapsed)


def _widen(history: History, *names: str) -> str:
    """Return the edits that set what narrows sampling to its neutral value; empty if nothing does."""
    values = {name: getattr(history.recipe.generation, name) for name in names}
    return ", ".join(
        f"{history.advice.edit(f'generation.{name}', _NEUTRAL[name])} (it is {value:g})"
        for name, value in values.items()
        if value and (_NEUTRAL[name] != "1.0" or value < 1)
    )


@Rule(
    "rewards of a group are all equal",
    (_SILENT, "reward"),
    threshold=f"a mean above {MOST_SILENT}, with the reward neither risen nor near its highest",
    source=AXOLOTL,
    skip_reason=rewarded_only,
)
def no_signal(history: History) -> Issue | None:
    """Completions of a group that score the same teach nothing: their advantages are all 0."""
    generation = history.recipe.generation
    dynamic = generation.dynamic_sampling
    share = history.mean(_LEFT if dynamic else _SILENT)
    if share is None or share <= MOST_SILENT or is_solved(history):
        return None
    rewards, spread = history.last("reward") or [0.0], history.last("reward_std")
    seen = (
        f"{share:.0%} of the groups of the last 10 records had no "
        f"two different rewards {'after replacing ' if dynamic else ''}(at most {MOST_SILENT:.0%}), with a "
        f"mean reward of {fmean(rewards):.3g}"
    )
    repeated = history.mean("completions/repeated_share")
    if history.recipe.warmup is not None and (repeated or 0.0) > _MOST_REPEATED:
        fix = (
            "a shorter warm-up (`warmup.max_steps`): it left hardly more than one answer to a prompt, and "
            "equal answers have nothing to be compared with"
        )
    elif spread and max(spread) < 1e-6 and max(rewards) - min(rewards) < 1e-6:
        fix = f"{try_rewards(history)} shows why every answer gets the same reward"
    else:
        more = history.advice.edit("generation.num_generations", 2 * generation.num_generations)
        if history.advice.is_own:
            rounds = 2 * dynamic.max_resample if dynamic else 3
            more += f" or `generation.dynamic_sampling.max_resample: {rounds}`"
        fix = f"{try_rewards(history)} shows whether right answers score; if they do, easier prompts or {more}"
    return Issue(seen, fix, level="error" if share > 0.999 else "warning")


@Rule(
    "nothing left to learn",
    (_SILENT, "reward"),
    threshold=f"a mean above {MOST_SILENT}, with the reward risen or near its highest",
    source=f"{AXOLOTL}; ours: a reward that rose, or is within a tenth of its maximum, has succeeded",
)
def all_solved(history: History) -> Issue | None:
    """These prompts have taught all they can, so more steps change little."""
    share, change, risen = history.mean(_SILENT), history.change("reward"), history.has_risen()
    if share is None or share <= MOST_SILENT or change is None or not is_solved(history):
        return None
    rose = f"rose from {change.before:.3g} to" if risen else "has been near its highest value,"
    seen = (
        f"{share:.0%} of the groups of the last 10 records agree (at most "
        f"{MOST_SILENT:.0%}), and the reward {rose} {change.now:.3g}"
    )
    if risen:
        step, end = history.metrics.step, history.metrics.total_steps
        edit = history.advice.edit("training.max_steps", step, "")
        enough = "" if step == end else f"{edit} is enough; "
        fix = f"{enough}harder prompts to learn more"
        return Issue(seen, fix, level="note")
    return Issue(seen, "harder prompts, or a reward that tells more answers apart", level="warning")


@Rule(
    "the same answer again and again",
    ("completions/repeated_share", "reward"),
    threshold=f"a mean above {_MOST_REPEATED} ({_NEARLY_ALL} below {_FEW_TOKENS} tokens), "
    "the reward not near its highest",
    source="ours: long texts are rarely identical by chance; short answers often are",
)
def repeated_answers(history: History) -> Issue | None:
    """Equal completions score the same, so a group of them has little to compare."""
    share, length = history.mean("completions/repeated_share"), history.mean(_LENGTH)
    limit = _MOST_REPEATED if length is not None and length >= _FEW_TOKENS else _NEARLY_ALL
    if share is None or share <= limit or history.is_near_best():
        return None
    seen = (
        f"{share:.0%} of the completions of the last 10 records equal another one of their group "
        f"(at most {limit:.0%})"
    )
    fix = _widen(history, "temperature", "top_p", "top_k")
    fix = fix or f"{slower(history)}, from an earlier checkpoint"
    return Issue(seen, fix, level="warning")


def _one_answer(recipe: Recipe) -> str | None:
    episodes = "`budget_ends_episodes` checks the limits of episodes"
    return sampled_only(recipe) or (episodes if recipe.has_episodes else None)


@Rule(
    "completions are cut off",
    (_CLIPPED,),
    skip_reason=_one_answer,
    threshold=f"a mean above {MANY_CLIPPED} that does not fall (an error above {_MOST_CLIPPED} if a reward "
    "judges answers); a note if the reward rises",
    source=f"{MANY_CLIPPED} is {PROBE}; {_MOST_CLIPPED}: {AXOLOTL}",
)
def truncation(history: History) -> Issue | None:
    """Text after the cutoff is never scored, and the answer is usually at the end."""
    share, recipe = lasting_share(history.last(_CLIPPED), MANY_CLIPPED), history.recipe
    if share is None:
        return None
    limit = recipe.generation.max_completion_length
    masked = recipe.setting("mask_truncated_completions")
    left_out = "; they take no part in the loss (mask_truncated_completions)" if masked else ""
    # A reward that judges no answers may well score a completion without its end.
    judged = any(map(judges, recipe.rewards))
    at = "the limit" if _LIMIT in history.advice.unknown else f"{limit} tokens"
    severe = judged and share > _MOST_CLIPPED
    error = f"; above {_MOST_CLIPPED:.0%} an error" if severe else ""
    seen = (
        f"{share:.0%} of the completions of the last 10 records were cut off at {at} "
        f"(at most {MANY_CLIPPED:.0%}{error}), and no fewer towards the end{left_out}"
    )
    fix = f"{history.advice.edit(_LIMIT, 2 * limit)}, or a prompt that asks for shorter answers"
    change = history.change("reward")
    scale = max(abs(change.before), *history.first("reward_std", 1), 0.0) if change else 0.0
    if history.has_risen(LIKELY) and change and change.difference > _LEAST_RISE * scale:
        return Issue(f"{seen}; the reward rises all the same", fix, level="note")
    return Issue(seen, fix, level="error" if severe else "warning")


@Rule(
    "completions grow to the limit",
    (_LENGTH,),
    min_records=20,
    settings=(_LIMIT,),
    threshold=f"{_GROWTH:g} times the first {_BEGUN} records, and above {_NEAR_LIMIT:g} of "
    "max_completion_length",
    source=f"growth to the limit: {AXOLOTL}; the two numbers are ours: longer reasoning below the limit is "
    "not a problem",
)
def length_explosion(history: History) -> Issue | None:
    """Length that grows up to the limit is rewarded by itself, on purpose or not."""
    limit, change = history.recipe.generation.max_completion_length, history.change(_LENGTH, _BEGUN)
    if change is None or change.now < max(_GROWTH * change.before, _NEAR_LIMIT * limit):
        return None
    seen = (
        f"completions grew from {change.before:.0f} to {change.now:.0f} of {limit} tokens "
        f"(at most {_GROWTH:g} times, or {_NEAR_LIMIT:.0%} of the limit)"
    )
    has_penalty = any(entry.kind == "soft_overlong" for entry in history.recipe.rewards)
    kind = (
        "`rewards: [..., {kind: soft_overlong}]`"
        if history.advice.is_own
        else "a penalty of length"
    )
    add = "" if has_penalty else f"{kind}, or "
    return Issue(seen, f"{add}remove what rewards length", level="warning")


@Rule(
    "completions shrink to nothing",
    (_LENGTH, "reward"),
    min_records=20,
    threshold=f"below {_SHRINKAGE:g} of the first {_BEGUN} records, with a reward that has not risen",
    source="ours: many rewards favor short answers; shorter without a better reward is a loss",
)
def length_collapse(history: History) -> Issue | None:
    """The model stops early and gains nothing by it: it gives up answering."""
    length, reward = history.change(_LENGTH, _BEGUN), history.change("reward", 10)
    if length is None or reward is None or reward.difference > 0:
        return None
    if length.now > _SHRINKAGE * length.before:
        return None
    seen = (
        f"completions shrank from {length.before:.0f} to {length.now:.0f} tokens (at least "
        f"{_SHRINKAGE:.0%}), and the reward went from {reward.before:.3g} to {reward.now:.3g}"
    )
    fix = f"{slower(history)}; look in {history.advice.completions} for what rewards short answers"
    return Issue(seen, fix, level="warning")


def _vllm_only(recipe: Recipe) -> str | None:
    if recipe.is_sampled and recipe.generation.backend != "vllm":
        return "`generation.backend` is not `vllm`"
    corrected = recipe.setting("vllm_importance_sampling_correction")
    off = None if corrected else "`vllm.importance_sampling_correction` is off"
    return sampled_only(recipe) or off


@Rule(
    "vLLM and the trainer disagree",
    (_DIFFERENCE,),
    threshold=f"a mean above {_USUAL_DIFFERENCE} (an error above {_MOST_DIFFERENCE:g})",
    source=AXOLOTL,
    skip_reason=_vllm_only,
)
def sampling_mismatch(history: History) -> Issue | None:
    """The completions are another policy's, so learning from them misleads the trained one."""
    difference, generation = history.mean(_DIFFERENCE), history.recipe.generation
    if difference is None or difference <= _USUAL_DIFFERENCE:
        return None
    fix = _widen(history, "top_p", "top_k", "min_p")
    if not fix and generation.vllm.mode == "server" and not generation.vllm.is_managed:
        fix = "start the server with the command that `grpo serve RECIPE --dry-run` prints"
    seen = (
        f"vLLM's log-probabilities are {difference:.2g} from the trainer's over the last 10 records "
        f"(below {_USUAL_DIFFERENCE} is usual, at most {_MOST_DIFFERENCE:g})"
    )
    fix = fix or "`model.dtype: float32`, which tells whether rounding is the cause"
    return Issue(seen, fix, level="error" if difference > _MOST_DIFFERENCE else "warning")


@Rule(
    "sampling takes nearly all of the time",
    ("time/sampling", "time/learning"),
    threshold=f"above {_MOST_SAMPLING:.0%} of the time of all phases",
    source="ours: sampling dominates many runs; above this, only a faster sampler makes steps faster",
)
def sampling_starves(history: History) -> Issue | None:
    """The trainer waits for completions."""
    share, learning = history.time_in("sampling")[1], history.time_in("learning")[1]
    if share <= _MOST_SAMPLING:
        return None
    seen = (
        f"sampling took {share:.0%} of the time of the last 10 records (at most {_MOST_SAMPLING:.0%}), "
        f"learning {learning:.0%}"
    )
    generation, training = history.recipe.generation, history.recipe.training
    if generation.backend != "vllm":
        fix = "`generation.backend: vllm`"
    elif generation.vllm.mode == "colocate":
        fix = "`generation.vllm.mode: server` on devices of its own"
    else:
        fix = f"`training.num_iterations: {training.num_iterations + 1}`, which trains on each sample once more"
    return Issue(seen, fix, level="note")


_SOURCE_REWARD, _SOURCE_SILENT = "sources/NAME/reward", "sources/NAME/frac_reward_zero_std"
_STARVED, _FED = 0.95, 0.8
"""Shares of groups without signal."""
_LEAST_FALL = 0.1
"""Of the reward that a source began with."""


def _mixed(recipe: Recipe) -> str | None:
    alone = None if len(recipe.dataset.shares) > 1 else "there is one source of prompts"
    return rewarded_only(recipe) or alone


def _place(recipe: Recipe, source: str) -> str:
    return f"dataset.sources.{list(recipe.dataset.shares).index(source)}"


@Rule(
    "a source has no signal while others have",
    (_SOURCE_SILENT, _SOURCE_REWARD),
    min_records=20,
    threshold=f"a mean above {_STARVED} for a source, and below {_FED} for another; a note if its reward is near "
    "its highest",
    source="ours: the threshold of no_signal for what others must have; a source of its own is small, and noisier",
    skip_reason=_mixed,
)
def source_starves(history: History) -> Issue | None:
    """A source whose groups all score the same takes its share of the prompts and teaches nothing."""
    recipe = history.recipe
    silent = {
        name: history.last(_SOURCE_SILENT.replace("NAME", name)) for name in recipe.dataset.shares
    }
    shares = {name: fmean(last) for name, last in silent.items() if len(last) == NOW}
    starved = [source for source in shares if shares[source] > _STARVED]
    if not starved or min(shares.values()) >= _FED:
        return None
    source = max(starved, key=lambda each: shares[each])
    reward = history.mean(_SOURCE_REWARD.replace("NAME", source)) or 0.0
    seen = (
        f"{shares[source]:.0%} of the groups of `{source}` in its last {NOW} records had no two different rewards "
        f"(at most {_STARVED:.0%}; the least of a source is {min(shares.values()):.0%}), with a mean reward of "
        f"{reward:.3g}"
    )
    place = _place(recipe, source)
    if reward >= near_best(rewards_of(recipe, source)):
        return Issue(seen, f"a lower `{place}.ratio`: it is solved; or harder rows", level="note")
    fix = f"easier rows, a reward that tells its answers apart, or a lower `{place}.ratio`"
    return Issue(seen, fix, level="warning")


@Rule(
    "a source is unlearned while the whole improves",
    (_SOURCE_REWARD, "reward"),
    min_records=20,
    threshold=f"a source's reward lower than it began by {_LEAST_FALL:.0%} of itself and by 4 standard errors, "
    "and the whole not lower",
    source="ours: the threshold of falling_reward, source by source",
    skip_reason=_mixed,
)
def source_forgets(history: History) -> Issue | None:
    """Learning from the other sources costs what the model could do on this one."""
    whole = history.change("reward", NOW)
    if whole is None or whole.falls():
        return None
    for source, share in history.recipe.dataset.shares.items():
        metric = _SOURCE_REWARD.replace("NAME", source)
        change = history.change(metric, NOW)
        if change is None or len(history.points(metric)) < 2 * NOW:
            continue
        if change.falls(_LEAST_FALL * abs(change.before)):
            seen = (
                f"the reward of `{source}` began at {change.before:.3g} and is {change.now:.3g} now (its first "
                f"and its last {NOW} records), while that of all sources went from {whole.before:.3g} to "
                f"{whole.now:.3g}"
            )
            fix = f"a higher `{_place(history.recipe, source)}.ratio` (it has {share:.0%} of the prompts)"
            return Issue(seen, fix, level="warning")
    return None
