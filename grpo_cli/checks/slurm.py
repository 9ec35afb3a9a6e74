"""What only a job of Slurm's can have wrong: `launch.slurm` against the rest of the recipe.

Does not look at the cluster: sbatch judges partitions, accounts and limits.
"""

from collections.abc import Iterator

from grpo_cli.errors import Problem
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.slurm import SlurmConfig

_NEEDED = {
    "chdir": "where the command is run",
    "job-name": "`name`",
    "nodes": "`launch.num_machines`",
    "ntasks": "one for each machine",
    "ntasks-per-node": "1",
    "no-requeue": "`launch.slurm.requeue`",
    "open-mode": "append",
    "output": "a file beside the run folder",
    "parsable": "always on",
    "signal": "`launch.slurm.signal_before_end_s`",
    "wrap": "the script's own",
}
"""Options without a key of their own, and what decides them."""


def check_slurm(recipe: Recipe) -> Iterator[Problem]:
    """Options that the script sets itself, and a server without anybody to serve."""
    slurm = recipe.launch.slurm
    if slurm is None:
        return
    own = {name.replace("_", "-"): f"`launch.slurm.{name}`" for name in SlurmConfig.model_fields}
    for name in slurm.options:
        if home := {**own, **_NEEDED}.get(name):
            yield Problem(
                f"`{name}` is set already (by {home})" if "`" in home else f"`{name}` is {home}",
                f"use {home}" if "`launch." in home or home == "`name`" else "remove it",
                path=f"launch.slurm.options.{name}",
            )
    vllm = recipe.generation.backend == "vllm" and recipe.generation.vllm.mode == "server"
    if slurm.server_nodes and not vllm:
        yield Problem(
            "a node for the vLLM server is of no use: nothing would talk to it",
            "set `generation.backend: vllm` with `generation.vllm.mode: server`, or remove it",
            path="launch.slurm.server_nodes",
        )
    elif slurm.server_nodes and recipe.launch.use_cpu:
        yield Problem(
            "on a CPU weights are handed to the vLLM server in a folder of the same machine",
            "remove `server_nodes`: `grpo train` then runs the server beside the training",
            path="launch.slurm.server_nodes",
        )
    elif slurm.server_nodes and slurm.gpus is not None:
        wanted = int(recipe.generation.vllm.extras.get("tensor_parallel_size", 1))
        if wanted > slurm.gpus:
            yield Problem(
                f"is {wanted}, and the node of the server has {slurm.gpus} GPUs (launch.slurm.gpus_per_node)",
                f"write {slurm.gpus} or less",
                path="generation.vllm.tensor_parallel_size",
            )
    if recipe.launch.use_cpu and slurm.gpus_per_node is not None:
        yield Problem(
            "the job asks for GPUs, and `launch.use_cpu` leaves them idle",
            "remove one of them",
            path="launch.slurm.gpus_per_node",
            level="warning",
        )
    if slurm.gpus_per_node is not None and slurm.cpus_per_task is None:
        yield Problem(
            "many clusters give a job that does not ask one processor a node, which starves the GPUs",
            "set `launch.slurm.cpus_per_task` (8 or more for each GPU)",
            path="launch.slurm",
            level="note",
        )
    if recipe.training.extras.get("save_on_each_node"):
        yield Problem(
            "the machines of a job write into one folder, and would overwrite each other's files",
            "remove it",
            path="training.save_on_each_node",
        )
