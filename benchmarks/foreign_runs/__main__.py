"""Make runs of plain TRL that learn or do not, and score what `grpo diagnose` says of them.

    python -m benchmarks.foreign_runs FOLDER [--seed 100] [--only 3,41]    # make what is not there yet
    python -m benchmarks.foreign_runs FOLDER --score

A run is a folder `NN-label` with `checkpoint-*/trainer_state.json` alone. `labels.json` says of each what
is wrong, which numbers prove it, and whether they do: the proofs look at records, samples of the trained
model and its weights, and share nothing with the rules.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.foreign_runs.proof import prove

BASES = {"modest": 0.4, "other": 0.4, "skilled": 0.97}
"""Models to start from, and the share of right sums in what they were trained on."""
EXPECTED = {
    "healthy": set[str](),
    "flat": {"flat_reward"},
    "all equal": {"no_signal", "constant_reward"},
    "clipped": {"truncation"},
    "exploding KL": {"kl_runaway", "too_high_learning_rate"},
    "collapse": {"entropy_collapse", "repeated_answers", "too_high_learning_rate"},
    "too high a rate": {"too_high_learning_rate"},
    "too low a rate": {"too_low_learning_rate"},
    "hacked length": {"length_explosion", "truncation"},
    "hacked reward": {"rewards_apart", "length_explosion", "truncation"},
}
"""Of these rules one has to be reported, as a warning or an error; of a healthy run nothing but `FINE`."""
FINE = {"all_solved"}
"""Says that a run has nothing left to learn, which is no fault of it."""


def make_runs(folder: Path, only: set[int] | None, seed: int) -> None:
    """Train the cases that have no run yet.

    Args:
        folder: Gets the runs.
        only: Numbers of cases; None takes all.
        seed: Added to a case's number, which is its seed.
    """
    import torch
    import transformers

    from benchmarks.foreign_runs.cases import load_cases
    from benchmarks.foreign_runs.models import make_base
    from benchmarks.foreign_runs.training import train_case

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    bases = folder / ".bases"
    for place, (name, right) in enumerate(BASES.items()):
        make_base(bases / name, right=right, seed=place)
    path = folder / "labels.json"
    labels = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for number, case in enumerate(load_cases()):
        name = f"{number:02}-{case.label.replace(' ', '-')}"
        if name in labels or (only is not None and number not in only):
            continue
        started = time.time()
        facts = train_case(case, seed + number, folder / name, bases)
        labels[name] = {
            "label": case.label,
            "cause": case.cause,
            "setup": vars(case),
            "facts": facts,
            "seconds": round(time.time() - started, 1),
        }
        prove_label(folder / name, labels[name])
        write_labels(path, labels)
    for name, entry in labels.items():
        prove_label(folder / name, entry)
    write_labels(path, labels)


def prove_label(run: Path, entry: dict[str, Any]) -> None:
    """Add to a label whether it is true, and what proves it."""
    is_true, proof = prove(entry["label"], read_records(run), entry["facts"])
    entry |= {"is_true": is_true, "proof": proof}
    print(f"{run.name}: {'true' if is_true else 'NOT TRUE'}; {proof}", flush=True)


def write_labels(path: Path, labels: dict[str, Any]) -> None:
    """Write the labels in the order of the runs."""
    path.write_text(json.dumps(dict(sorted(labels.items())), indent=1), encoding="utf-8")


def read_records(run: Path) -> list[dict[str, Any]]:
    """The records of training in the run's `trainer_state.json`."""
    history = json.loads(find_state(run).read_text(encoding="utf-8"))["log_history"]
    return [record for record in history if "reward" in record]


def find_state(run: Path) -> Path:
    """The only `trainer_state.json` of a run."""
    [path] = run.glob("checkpoint-*/trainer_state.json")
    return path


def score_runs(folder: Path) -> None:
    """Diagnose each run whose label is true, and print which diagnoses are right."""
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    counts: dict[str, list[bool]] = defaultdict(list)
    for name, told in labels.items():
        if not told["is_true"]:
            continue
        symptoms = diagnose(find_state(folder / name).parent)
        rules = [each["rule"] for each in symptoms if each["level"] != "note"]
        expected = EXPECTED[told["label"]]
        is_right = bool(expected & set(rules)) if expected else set(rules) <= FINE
        counts[told["label"]].append(is_right)
        print(f"{'right' if is_right else 'WRONG'}  {name:24} {', '.join(rules) or '-'}")
    for label, rights in counts.items():
        print(f"{label:18} {sum(rights)} of {len(rights)}")
    every = [right for rights in counts.values() for right in rights]
    print(f"{'all':18} {sum(every)} of {len(every)} ({sum(every) / len(every):.1%})")


def diagnose(checkpoint: Path) -> list[dict[str, Any]]:
    """What `grpo diagnose --json` finds in a checkpoint."""
    command = [sys.executable, "-m", "grpo_cli", "diagnose", str(checkpoint), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
    symptoms: list[dict[str, Any]] = json.loads(done.stdout)["symptoms"]
    return symptoms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="numbers of cases, with commas between")
    parser.add_argument("--seed", type=int, default=0, help="added to the seeds of the runs")
    parser.add_argument("--score", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.score:
        score_runs(given.folder)
        return
    only = {int(number) for number in given.only.split(",")} if given.only else None
    make_runs(given.folder, only, given.seed)


if __name__ == "__main__":
    main()
