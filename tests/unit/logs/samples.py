"""Small logs in the forms that tools write, made from one series of rewards."""

import json
import random


def learning(steps=60, **more):
    """Records of a run that learns, by TRL's names."""
    chance = random.Random(0)
    return [
        {
            "loss": 0.01,
            "grad_norm": 0.5,
            "learning_rate": 1e-6,
            "reward": 0.2 + step / steps / 2 + chance.gauss(0, 0.02),
            "reward_std": 0.3,
            "frac_reward_zero_std": 0.2,
            "completions/mean_length": 80.0,
            "completions/clipped_ratio": 0.0,
            **more,
            "step": step,
        }
        for step in range(1, steps + 1)
    ]


def dead(steps=60):
    """Records of a run in which all completions score the same and are cut off."""
    same = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    cut = {"completions/mean_length": 256.0, "completions/max_length": 256.0}
    return learning(steps, **same, **cut, **{"completions/clipped_ratio": 1.0})


def as_trainer_state(records):
    return json.dumps({"global_step": len(records), "max_steps": 100, "log_history": records})


def as_lines(records):
    return "\n".join(map(json.dumps, records))


def as_csv(records):
    names = list(records[0])
    rows = [",".join(str(record.get(name, "")) for name in names) for record in records]
    return "\n".join([",".join(names), *rows])


def as_console(records, text=str):
    """Dicts behind progress bars, without a step, as TRL prints them."""
    lines = []
    for number, record in enumerate(records, 1):
        own = {name: value if text is str else text(value) for name, value in record.items()}
        own.pop("step")
        own["epoch"] = number / 1000
        lines.append(f" 10%|█   | {number}/100 [00:01<00:02,  1.0it/s]\r{own!r}")
    return "\n".join(["Loading weights: 100%", *lines])


def as_verl(records):
    """Lines of Ray's workers with colours."""
    names = {
        "reward": "critic/score/mean",
        "completions/mean_length": "response_length/mean",
        "completions/max_length": "response_length/max",
        "completions/clipped_ratio": "response_length/clip_ratio",
        "grad_norm": "actor/grad_norm",
        "loss": "actor/pg_loss",
    }
    lines = ["data.max_response_length=512", "(main pid=1) 'actor_rollout_ref.rollout.n=8'"]
    for record in records:
        pairs = [
            f"{own}:np.float64({record[name]})" for name, own in names.items() if name in record
        ]
        pairs += ["actor/lr:0.000", "timing_s/gen:2.0"]
        prefix = "\x1b[36m(TaskRunner pid=12, ip=10.0.0.1)\x1b[0m "
        lines.append(f"{prefix}step:{record['step']} - {' - '.join(pairs)}")
    return "\n".join(lines)


def as_notebook(records):
    """The table of a notebook."""
    names = {
        "step": "Step",
        "loss": "Training Loss",
        "reward": "reward",
        "reward_std": "reward_std",
    }
    head = "".join(f"<th>{name}</th>" for name in names.values())
    rows = ["".join(f"<td>{record[name]}</td>" for name in names) for record in records]
    table = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    output = {"output_type": "display_data", "data": {"text/html": [table]}}
    return json.dumps({"nbformat": 4, "cells": [{"outputs": [output]}]})


def as_markdown(records):
    lines = ["Step | Training Loss | reward | kl", "-- | -- | -- | --"]
    lines += [f"{each['step']} | {each['loss']} | {each['reward']} | No Log" for each in records]
    return "\n".join(lines)


def as_blocks(records):
    """NeMo-RL's blocks, with a validation after step 10."""
    lines = []
    for record in records:
        lines += [
            f"========================= Step {record['step']}/100 =========================",
            "📊 Training Results:",
            f"  • Loss: {record['loss']}",
            f"  • Avg Reward: {record['reward']}",
            f"  • Mean Generation Length: {record['completions/mean_length']}",
            "⏱️  Timing:",
            "  • Total step time: 44.74s",
        ]
        if record["step"] == 10:
            lines += ["📊 Validation Results:", "    • Accuracy: 0.9"]
    return "\n".join(lines)


def as_fields(records):
    """prime-rl's lines."""
    return "\n".join(
        f"02:33:26 SUCCESS Step {each['step']} | Time: 7.1s | Reward: {each['reward']:.4f} | "
        f"Throughput: 24.9 tokens/s | Seq. Length: {each['completions/mean_length']} tokens/sample"
        for each in records
    )


def as_postfix(records):
    """OpenRLHF's progress bars."""
    return "\n".join(
        f"Train epoch [1/1]: 100%|███| 8/8 [00:05<00:00,  1.5it/s, act_loss=0.01, kl=0.001, "
        f"rm={each['reward']:.4f}, glen={each['completions/mean_length']}]"
        for each in records
    )


def as_rollouts(records):
    """slime's lines: two steps of learning to a rollout, with numbers of their own."""
    lines = []
    for each in records:
        step, reward = each["step"], each["reward"]
        lines.append(f"rollout {step}: {{'rollout/raw_reward': {reward}, 'rollout/rewards': 1e-9}}")
        learned = "{'train/loss': 0.1, 'train/grad_norm': 1.0}"
        lines += [f"step {2 * step + add}: {learned}" for add in (0, 1)]
    return "\n".join(lines)


def as_chart(records):
    """A chart that W&B exports: columns with the name of the run, and their extremes."""
    names = ("train/reward", "train/reward__MIN", "train/reward__MAX")
    lines = [",".join(["Step", *(f"run-12 - {name}" for name in names)])]
    lines += [f"{each['step']},{each['reward']},-9,9" for each in records]
    return "\n".join(lines)


def as_columns(records):
    return json.dumps(
        {name: [each[name] for each in records] for name in ("step", "reward", "loss")}
    )


FORMS = {
    "columns": as_columns,
    "slime": as_rollouts,
    "W&B chart": as_chart,
    "trainer state": as_trainer_state,
    "list": json.dumps,
    "JSON Lines": as_lines,
    "CSV": as_csv,
    "console": as_console,
    "numbers as text": lambda records: as_console(records, text=lambda value: f"{value:.4g}"),
    "verl": as_verl,
    "verl file logger": lambda records: as_lines(
        [{"step": each["step"], "data": {"critic/score/mean": each["reward"]}} for each in records]
    ),
    "notebook": as_notebook,
    "Markdown": as_markdown,
    "NeMo-RL": as_blocks,
    "prime-rl": as_fields,
    "OpenRLHF": as_postfix,
}
