"""axolotl's sections `trl` and `vllm`: fields of `GRPOConfig`, and the server beside the training.

Source: axolotl, `src/axolotl/utils/schemas/` (trl, vllm) and `src/axolotl/core/trainers/grpo/`.
"""

from grpo_cli.convert.axolotl_keys import SERVER_DROPPED, SERVER_FLAGS, TRL_DROPPED
from grpo_cli.convert.key_report import Ledger, find
from grpo_cli.convert.sampling import take_sampling
from grpo_cli.convert.trl_table import drop_known, drop_unknown, field_names, take_field
from grpo_cli.convert.weights import take_plain

_LOCAL = frozenset({"None", "0.0.0.0", "127.0.0.1", "localhost"})


def take_section(ledger: Ledger) -> None:
    """Takes the section `trl`, whose keys are mostly `GRPOConfig`'s own."""
    if ledger.node("trl") is None:
        return
    ledger.settle(("trl",), "training", "its keys")
    for name in ledger.rest("trl"):
        key = ("trl", name)
        if name in TRL_DROPPED:
            ledger.drop(key, TRL_DROPPED[name])
        elif not take_field(ledger, key, name) and not drop_known(ledger, key, name):
            drop_unknown(ledger, key, {*field_names(), *TRL_DROPPED, "reward_funcs"})
    if find(ledger.recipe, "training.sync_ref_model"):
        for name, value in (("ref_model_mixup_alpha", 0.9), ("ref_model_sync_steps", 64)):
            if find(ledger.recipe, f"training.{name}") is None:
                ledger.add(f"training.{name}", value, "axolotl's default")
    if ledger.node("rl_beta") is not None:
        if find(ledger.recipe, "training.beta") is None:
            take_plain(ledger, ("rl_beta",), "training.beta")
        else:
            ledger.drop(("rl_beta",), "`trl.beta` is given too, and wins")


def take_server(ledger: Ledger) -> None:
    """Takes where vLLM runs: a server on this machine is one that `grpo train` starts itself."""
    host = ledger.get("trl", "vllm_server_host")
    ours = str(host) in _LOCAL and ledger.is_on("trl", "use_vllm")
    colocated = ledger.get("trl", "vllm_mode") == "colocate"
    if ours and not colocated:
        for name in ("vllm_server_host", "vllm_server_port", "vllm_server_timeout"):
            if ledger.node("trl", name) is not None:
                reason = "`grpo train` starts the server itself; for one of yours set `base_url`"
                ledger.drop(("trl", name), reason)
    if ledger.node("trl") is not None:
        take_sampling(ledger, ("trl",), server_first=True, managed=ours and not colocated)
    if ledger.node("vllm") is None:
        return
    ledger.settle(("vllm",), "generation.vllm", "its keys")
    if not ledger.is_on("trl", "use_vllm"):
        for name in ledger.rest("vllm"):
            ledger.drop(("vllm", name), "`trl.use_vllm` is not set, so nothing reads it")
        return
    _take_server_settings(ledger, ours=ours or colocated, colocated=colocated)


def _take_server_settings(ledger: Ledger, *, ours: bool, colocated: bool) -> None:
    if not ours:
        for name in ledger.rest("vllm"):
            ledger.drop(("vllm", name), "of a server elsewhere, which is started there")
        return
    for name in ("host", "port"):
        if ledger.node("vllm", name) is not None:
            ledger.drop(("vllm", name), "`grpo train` starts the server itself, on a free port")
    for name, target in (
        ("tensor_parallel_size", "tensor_parallel_size"),
        ("gpu_memory_utilization", "gpu_memory_utilization"),
        ("max_model_len", "max_model_length"),
    ):
        take_plain(ledger, ("vllm", name), f"generation.vllm.{target}")
    for name, flag in SERVER_FLAGS.items():
        if not colocated:
            take_plain(ledger, ("vllm", name), f"generation.vllm.server_args.{flag}")
        elif ledger.node("vllm", name) is not None:
            ledger.drop(("vllm", name), "only a server has it, and vLLM shares the training's GPUs")
    for name in ledger.rest("vllm"):
        key = ("vllm", name)
        if name in SERVER_DROPPED:
            ledger.drop(key, SERVER_DROPPED[name])
        else:
            drop_unknown(ledger, key, {*SERVER_FLAGS, *SERVER_DROPPED, "max_model_len"})
