"""How each tracker takes what a run has besides metrics: one function a tracker.

All go on with the run that the training began, found by what the ledger says of it. They may raise
anything; `handover.py` sees to that.
"""

from collections.abc import Callable
from typing import Any

from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers.contents import Contents, Sample

_STEP = "train/global_step"
"""The axis on which transformers puts its metrics in W&B and Trackio."""


def _hand_to_tensorboard(known: dict[str, Any], contents: Contents, folder: RunFolder) -> None:
    """TensorBoard keeps no files: samples and the recipe as text, measurements as scalars."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=known["folder"]) as writer:
        writer.add_text("recipe", _as_code(folder.recipe.read_text(encoding="utf-8")))
        groups: dict[int, list[Sample]] = {}
        for sample in contents.samples:
            groups.setdefault(sample.step, []).append(sample)
        for step, samples in groups.items():
            writer.add_text("completions", "\n\n---\n\n".join(map(_show, samples)), step)
        for step, values in contents.measurements:
            for name, value in values.items():
                writer.add_scalar(name, value, step)


def _show(sample: Sample) -> str:
    scores = ", ".join(f"{name} {value}" for name, value in sample.rewards.items())
    return f"{_as_code(sample.prompt)}\n\n{_as_code(sample.completion)}\n\n{_as_code(scores)}"


def _as_code(text: str) -> str:
    """Indented, so that nothing in it is read as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _hand_to_wandb(known: dict[str, Any], contents: Contents, folder: RunFolder) -> None:
    """W&B: a table of samples, measurements, and an artefact of the files."""
    import wandb

    settings = wandb.Settings(console="off", x_disable_stats=True)
    run = wandb.init(
        project=known["project"],
        entity=known["entity"] or None,
        id=known["id"],
        name=contents.name,
        resume="allow",
        settings=settings,
    )
    run.define_metric("held_out/*", step_metric=_STEP)
    for step, values in contents.measurements:
        run.log({**values, _STEP: step})
    if contents.samples:
        run.log({"completions": wandb.Table(**_as_table(contents))})
    artefact = wandb.Artifact(f"run-{known['id']}", type="grpo-run")
    # What is sent now needs no copy; what is sent some day must be as it is now, though the run goes on.
    policy = "mutable" if run.offline else "immutable"
    for name, path in contents.files.items():
        artefact.add_file(str(path), name, policy=policy, skip_cache=True)
    run.log_artifact(artefact)
    run.finish(exit_code=int(contents.state == "failed"))


def _hand_to_trackio(known: dict[str, Any], contents: Contents, folder: RunFolder) -> None:
    """Trackio: a table of samples, measurements, and an artefact of the files."""
    import trackio

    run = trackio.init(
        project=known["project"],
        name=known["name"],
        resume="allow",
        auto_log_cpu=False,
        auto_log_gpu=False,
        embed=False,
    )
    # An empty one leaves that of the training in place; it would be written over otherwise.
    run.config.clear()
    try:
        for step, values in contents.measurements:
            run.log({**values, _STEP: step}, step=step)
        if contents.samples:
            run.log({"completions": trackio.Table(**_as_table(contents))})
        artefact = trackio.Artifact(f"run-{known['name']}", type="grpo-run")
        for name, path in contents.files.items():
            artefact.add_file(path, name)
        run.log_artifact(artefact)
    finally:
        trackio.finish()


def _as_table(contents: Contents) -> dict[str, list[Any]]:
    """The samples as columns and rows; rewards that one group lacks are empty there."""
    rewards = list(dict.fromkeys(name for each in contents.samples for name in each.rewards))
    return {
        "columns": ["step", "prompt", "completion", *(f"rewards/{name}" for name in rewards)],
        "data": [
            [each.step, each.prompt, each.completion, *(each.rewards.get(name) for name in rewards)]
            for each in contents.samples
        ],
    }


def _hand_to_mlflow(known: dict[str, Any], contents: Contents, folder: RunFolder) -> None:
    """MLflow: measurements, the files in their folders, and how the run ended."""
    from mlflow import MlflowClient

    # Where it keeps its runs may hold a password, and is known from the environment.
    client = MlflowClient()
    for step, values in contents.measurements:
        for name, value in values.items():
            client.log_metric(known["id"], _metric_name(name), value, step=step)
    for name, path in contents.files.items():
        client.log_artifact(known["id"], str(path), name.rpartition("/")[0] or None)
    ends = {"completed": "FINISHED", "stopped": "KILLED"}
    client.set_terminated(known["id"], ends.get(contents.state, "FAILED"))


def _metric_name(name: str) -> str:
    """The name with what MLflow refuses replaced, as transformers does."""
    return "".join(each if each.isalnum() or each in "_-. :/" else "_" for each in name)


RECIPIENTS: dict[str, Callable[[dict[str, Any], Contents, RunFolder], None]] = {
    "tensorboard": _hand_to_tensorboard,
    "wandb": _hand_to_wandb,
    "trackio": _hand_to_trackio,
    "mlflow": _hand_to_mlflow,
}
"""The trackers that are handed more than metrics."""
