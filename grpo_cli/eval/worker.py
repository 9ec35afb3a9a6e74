"""The work of an evaluation: every chunk of every subject sampled, scored and written down.

`grpo eval` measures in its own process, or in several: `accelerate launch -m grpo_cli.eval.worker FOLDER COUNT`,
each of which reads the folder's request and does its share of the chunks.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.errors import ExitCode, GrpoError, SetupError, UsageError
from grpo_cli.eval.folder import Chunk, EvalFolder, make_chunks
from grpo_cli.eval.request import EvalRequest, Progress, Subject
from grpo_cli.machine import pick_device
from grpo_cli.processes import stop_with_parent
from grpo_cli.runs.files import write_json


@dataclass(frozen=True)
class _Plan:
    rows: Any
    chunks: Sequence[Chunk]
    data: dict[str, Any]
    train_rows: int | None
    """Prompts of an epoch of the training; None if they are not counted."""


def measure(
    request: EvalRequest,
    folder: EvalFolder,
    tell: Progress,
    *,
    device: Any = None,
    rank: int = 0,
    world: int = 1,
    wait_for_all: Callable[[], None] = lambda: None,
) -> None:
    """Measure this process's share of all subjects; chunks that are in the folder already are left out.

    `device` None is that of `launch`; `wait_for_all` waits until all `world` processes have done their share.

    Raises `GrpoError` if the data, a model or a reward cannot be loaded, or a reward fails; or the evaluation
    is resumed, and was begun with other data.
    """
    import torch

    from grpo_cli.analysis.samples import MetricLog, score_samples
    from grpo_cli.eval.samplers import open_sampler
    from grpo_cli.rewards.building import build_rewards, reward_context
    from grpo_cli.rewards.scoring import reward_columns

    device = device or torch.device(pick_device(request.recipe.launch))
    plans = _plan(request, folder)
    context = reward_context(request.recipe, str(device), plans[0].train_rows)
    rewards = build_rewards(request.recipe.rewards, context)
    reads_tokens = any(reward.meta.reads_tokens for reward in rewards)
    if rank == 0 and not folder.data.is_file():
        write_json(folder.data, plans[0].data)
    for subject, plan in zip(request.subjects, plans, strict=True):
        tell(subject.name, 0, 0)
        done = folder.read_chunks(subject.name).keys()
        # Every `world`-th chunk, so that long prompts are spread over all processes.
        mine = plan.chunks[rank::world]
        to_do = [chunk for chunk in mine if chunk.number not in done]
        total, left = (sum(len(chunk.places) for chunk in chunks) for chunks in (mine, to_do))
        with open_sampler(request, subject, device) as sample:
            for chunk in to_do:
                tell(subject.name, (total - left) * request.samples, total * request.samples)
                rows = plan.rows.select(list(chunk.places))
                started = time.perf_counter()
                sampled = sample(rows, chunk.seed)
                seconds, log = time.perf_counter() - started, MetricLog()
                columns = reward_columns(rows, rewards)
                scored = score_samples(rewards, columns, sampled, chunk.seed, log)
                ids: Any = [each.token_ids for group in sampled for each in group]
                ids = ids if reads_tokens else None
                folder.append(subject.name, rank, chunk, seconds, scored, log.rewards, ids)
                left -= len(chunk.places)
        tell(subject.name, total * request.samples, total * request.samples)
    wait_for_all()
    if rank == 0:
        _log_over_all(request, folder, plans, rewards)


def _log_over_all(
    request: EvalRequest, folder: EvalFolder, plans: Sequence[_Plan], rewards: Sequence[Any]
) -> None:
    """Write what rewards log of all completions of each subject in one call."""
    from grpo_cli.analysis.samples import batch_of_scored, log_over_all
    from grpo_cli.rewards.scoring import reward_columns

    logged = {}
    for subject, plan in zip(request.subjects, plans, strict=True):
        records = [each for chunk in folder.read_chunks(subject.name).values() for each in chunk]
        names = {name for each in records for name in each.get("logged_by", ())}
        if names:
            batch = batch_of_scored(records, reward_columns(plan.rows, rewards))
            logged[subject.name] = log_over_all(rewards, names, [batch], request.seed)
    if logged:
        write_json(folder.logged, logged)


def _plan(request: EvalRequest, folder: EvalFolder) -> list[_Plan]:
    """Return what each subject is measured on, before the first of them is loaded."""
    plans: dict[str, _Plan] = {}
    keys = [subject.model.model_dump_json() for subject in request.subjects]
    for subject, key in zip(request.subjects, keys, strict=True):
        if key not in plans:
            plans[key] = _read_rows(request, subject)
        if plans[key].data != plans[keys[0]].data:
            raise UsageError(
                f"`{subject.name}` gets other prompts than `{request.subjects[0].name}`: its chat template "
                "(or, with `max_prompt_length`, its tokenizer) differs",
                "measure it by itself, with --baseline none",
            )
    folder.check_data(plans[keys[0]].data)
    return [plans[key] for key in keys]


def _read_rows(request: EvalRequest, subject: Subject) -> _Plan:
    from grpo_cli.data.build import build_datasets
    from grpo_cli.fast.tokens import count_prompt_tokens, count_row_tokens
    from grpo_cli.models.processor import load_processing_class

    recipe = request.recipe
    processing_class = load_processing_class(subject.model, has_images=recipe.has_images)
    template = recipe.setting("chat_template_kwargs")
    count = partial(count_prompt_tokens, processing_class, chat_template_kwargs=template)
    data = build_datasets(
        recipe,
        has_chat_template=bool(processing_class.chat_template),
        # Counting takes long, and only a limit needs it.
        count_tokens=count
        if any(each.max_prompt_length for each in recipe.dataset.parts)
        else None,
    )
    rows = data.train if request.split == "train" else data.eval
    if rows is None or len(rows) == 0:
        raise UsageError(
            "the recipe holds no rows out to measure on",
            "give the dataset an eval split (`eval`, "
            "`eval_split`, `eval_size` or `eval_fraction`), or measure on --split train",
        )
    # A mixture repeats rows within an epoch.
    first = {row: place for place, row in reversed([*enumerate(rows["row_id"])])}
    rows = rows.select(sorted(first.values()))
    if request.limit is not None:
        rows = rows.select(range(min(request.limit, len(rows))))
    about = {
        "split": request.split,
        "rows": len(rows),
        "fingerprint": data.report.fingerprint,
        "exact_duplicates_between_splits": data.report.exact_duplicates_between_splits,
    }
    lengths = count_row_tokens(processing_class, rows, template)
    chunks = make_chunks(lengths, request.chunk_size, request.seed)
    return _Plan(rows, chunks, about, data.report.train_rows)


def main(argv: list[str]) -> int:
    """Measure this process's share; return the exit code. `argv`: the folder, and the number of processes."""
    stop_with_parent()
    # As in a training's worker.
    os.environ.pop("PYTHONSAFEPATH", None)
    folder, planned = EvalFolder(Path(argv[0])), int(argv[1])
    try:
        from accelerate import PartialState

        request = folder.read_request()
        state = PartialState(cpu=pick_device(request.recipe.launch) == "cpu")
        if state.num_processes != planned:
            raise SetupError(
                f"{planned} processes were planned but {state.num_processes} work together",
                "see `grpo doctor`, or measure with --num-processes 1",
            )
        ranks = {"rank": state.process_index, "world": state.num_processes}
        options: dict[str, Any] = {**ranks, "wait_for_all": state.wait_for_everyone}
        measure(request, folder, lambda *_: None, device=state.device, **options)
    except GrpoError as error:
        folder.write_failure(error)
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
