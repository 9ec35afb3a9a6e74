"""Processes and sharding: accelerate's flags, DeepSpeed's and FSDP's settings as the `launch` section.

Source: `trl/cli/accelerate_config.py` and `trl/accelerate_configs/` of trl 1.16; accelerate 1.15,
`accelerate launch`.
"""

import json
import re
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import Ledger
from grpo_cli.convert.weights import take_plain
from grpo_cli.recipe.explanation import Path

_PLAIN = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
_NAMED = {
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp2": "fsdp2",
    "multi_gpu": "ddp",
    "ddp": "ddp",
    "single_gpu": "single",
}
"""Configs that TRL and open-r1 ship, by their names, and the strategies that do the same."""
_STAGE = re.compile(r"zero[-_]?([123])(?![0-9])", re.IGNORECASE)
_FLAGS = (
    "mixed_precision dynamo_backend multi_gpu cpu use_deepspeed use_fsdp gpu_ids same_network "
    "rdzv_backend zero_stage offload_optimizer_device offload_param_device deepspeed_config_file"
).split()
_SHARED = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version")
LAUNCH_KEYS = frozenset(
    {*_PLAIN, *_FLAGS, *_SHARED, "accelerate_config", "config_file", "use_cpu", "no_cuda"}
)


def take_launch(ledger: Ledger) -> None:
    """Takes what says on how many devices to train, and how they share the model."""
    for name in _PLAIN:
        take_plain(ledger, (name,), f"launch.{name}")
    for name in ("use_cpu", "no_cuda"):
        if ledger.is_on(name):
            ledger.keep((name,), "launch.use_cpu", True)
        elif ledger.node(name) is not None:
            ledger.settle((name,), "launch.use_cpu", "off")
    for name in ("accelerate_config", "config_file"):
        if ledger.node(name) is not None:
            _take_config(ledger, (name,))
    take_deepspeed(ledger)
    take_fsdp(ledger)
    for name in _FLAGS:
        if ledger.node(name) is not None:
            ledger.drop(
                (name,), "a flag of accelerate's; `launch.strategy` and `training` decide it"
            )


def _take_config(ledger: Ledger, key: Path) -> None:
    text = str(ledger.get(*key))
    stem = FilePath(text).stem
    if text in _NAMED:
        ledger.keep(key, "launch.strategy", _NAMED[text], f"TRL's config `{text}`")
    elif text == "fsdp1":
        ledger.keep(key, "launch.strategy", "fsdp2", "FSDP1's successor, which shares the same")
    elif not FilePath(text).is_file() and stem in _NAMED:
        ledger.keep(key, "launch.strategy", _NAMED[stem], f"there is no {text} here; by its name")
    else:
        ledger.keep(key, "launch.accelerate_config", text)


def take_deepspeed(ledger: Ledger) -> None:
    """Takes DeepSpeed's settings where they are one of its three stages, without offloading."""
    key = ("deepspeed",)
    given = ledger.get(*key)
    if not given:
        if ledger.node(*key) is not None:
            ledger.drop(key, "empty, so the default holds")
        return
    stage = _read_stage(given)
    if stage is None:
        ledger.drop(
            key,
            "no plain ZeRO stage is to be seen in it; set `launch.strategy: zero1|zero2|zero3`, or write it "
            "into an accelerate config and name that in `launch.accelerate_config`",
        )
    else:
        ledger.keep(key, "launch.strategy", f"zero{stage}", "its stage alone")


def _read_stage(given: Any) -> int | None:
    """The ZeRO stage of a DeepSpeed config: a mapping, a JSON file, or a file known by its name."""
    config = given
    if isinstance(given, str):
        try:
            config = json.loads(FilePath(given).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            named = _STAGE.search(FilePath(given).name)
            offloads = "offload" in FilePath(given).name.lower()
            return int(named[1]) if named and not offloads else None
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(zero, dict) or any(_offloads(zero.get(part)) for part in _OFFLOADED):
        return None
    stage = zero.get("stage")
    return stage if stage in (1, 2, 3) else None


_OFFLOADED = ("offload_optimizer", "offload_param")


def _offloads(part: Any) -> bool:
    return isinstance(part, dict) and part.get("device", "none") != "none"


def take_fsdp(ledger: Ledger) -> None:
    """Takes FSDP as `fsdp2` where it shares everything and offloads nothing."""
    keys = [(name,) for name in ("fsdp", "fsdp_config", "fsdp_version") if ledger.get(name)]
    for name in ("fsdp", "fsdp_config", "fsdp_version"):
        if ledger.node(name) is not None and not ledger.get(name):
            ledger.drop((name,), "empty, so the default holds")
    said = " ".join(str(ledger.get(*key)) for key in keys).lower()
    if not keys:
        return
    config = ledger.get("fsdp_config")
    offloads = "'offload_params': true" in said or "fsdp_offload_params': true" in said
    if "shard_grad_op" in said or "hybrid" in said or offloads or re.search(r"\boffload\b", said):
        for key in keys:
            ledger.drop(key, "`launch.strategy: fsdp2` shares everything and offloads nothing")
        return
    old = "2" not in str(ledger.get("fsdp_version") or _version(config))
    note = "FSDP1's successor" if old else "its sharding alone"
    for key in keys:
        ledger.keep(key, "launch.strategy", "fsdp2", note if key == keys[-1] else "")


def _version(config: Any) -> Any:
    config = config if isinstance(config, dict) else {}
    return config.get("fsdp_version", config.get("version", 1))
