"""Run folders as a training leaves them, for tests of what reads them."""

from pathlib import Path

from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.status import StatusFile


def make_run(tmp_path: Path, rewards=(0.1, 0.2, 0.3)) -> RunFolder:
    """A run of ten steps that has logged some rewards."""
    folder = RunFolder(tmp_path / "name" / "1")
    folder.completions.mkdir(parents=True)
    StatusFile(folder.status).update(state="running", phase="training", total_steps=10, step=3)
    for step, reward in enumerate(rewards, start=1):
        append_record(
            folder.metrics,
            {
                "event": "train",
                "step": step,
                "total_steps": 10,
                "reward": reward,
                "rewards/math/mean": reward,
                "frac_reward_zero_std": 0.25,
                "completions/mean_length": 10.0 + step,
                "completions/clipped_ratio": 0.5,
                "step_time": 2.0,
                "tokens_per_s": 123.4,
            },
        )
    return folder
