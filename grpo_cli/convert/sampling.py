"""Where completions are sampled: TRL's switches as `generation.backend` and `generation.vllm`.

Source: trl 1.16, "vLLM integration"; trl 0.14 and 0.15 gave vLLM a GPU of its own by `vllm_device`.
"""

from grpo_cli.convert.key_report import Ledger
from grpo_cli.recipe.explanation import Path

_ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
_SERVER = (*_ADDRESS, "vllm_server_timeout", "vllm_group_port")
_BATCHING = ("use_transformers_continuous_batching", "use_transformers_paged")
SAMPLING_KEYS = frozenset({"use_vllm", "vllm_device", "vllm_mode", *_SERVER, *_BATCHING})


def take_sampling(
    ledger: Ledger, inside: Path = (), *, server_first: bool = False, managed: bool = False
) -> None:
    """Takes the switches between `generate()` and vLLM; the fields of vLLM's are left to the table.

    Args:
        ledger: The account.
        inside: The mapping of the source that holds them.
        server_first: Whether the tool means a server where no mode is given.
        managed: Whether the server it names is one that `grpo train` starts itself.
    """
    _take_batching(ledger, inside)
    key = (*inside, "use_vllm")
    if not ledger.is_on(*key):
        if ledger.node(*key) is not None:
            ledger.settle(key, "generation.backend", "off")
        for name in ("vllm_mode", "vllm_device", *_SERVER):
            if ledger.node(*inside, name) is not None:
                ledger.drop((*inside, name), "`use_vllm` is not set, so nothing reads it")
        return
    ledger.keep(key, "generation.backend", "vllm")
    _take_mode(ledger, inside, server_first=server_first, managed=managed)


def _take_batching(ledger: Ledger, inside: Path) -> None:
    for name in _BATCHING:
        key = (*inside, name)
        if ledger.is_on(*key):
            ledger.keep(key, "generation.backend", "transformers_continuous_batching")
        elif ledger.node(*key) is not None:
            ledger.settle(key, "generation.backend", "off")


def _take_mode(ledger: Ledger, inside: Path, *, server_first: bool, managed: bool) -> None:
    mode, device = (*inside, "vllm_mode"), (*inside, "vllm_device")
    given = ledger.get(*mode)
    seen = [name for name in _SERVER if ledger.get(*inside, name) is not None and not managed]
    if given in ("server", "colocate"):
        ledger.keep(mode, "generation.vllm.mode", given)
    elif ledger.node(*mode) is not None:
        ledger.drop(mode, "the modes are `server` and `colocate`")
    elif ledger.get(*device) is not None:
        ledger.keep(
            device,
            "generation.vllm.mode",
            "server",
            "vLLM had a GPU of its own",
        )
    elif seen or server_first:
        why = f"as {seen[0]} says" if seen else f"what {ledger.tool} takes where no mode is given"
        ledger.add("generation.vllm.mode", "server", why)
    if ledger.node(*device) is not None and not ledger.done(*device):
        ledger.drop(device, "removed from TRL; `grpo train` places vLLM by its mode")
    vllm = ledger.recipe.get("generation", {}).get("vllm", {})
    if vllm.get("mode") != "server":
        for name in seen:
            ledger.drop(
                (*inside, name), "only a server has it, and vLLM shares the training's GPUs"
            )
    elif any(name in _ADDRESS for name in seen):
        _take_address(ledger, inside)
    else:
        hint = "`grpo train` starts the server, on the last visible GPUs; see `managed`"
        before = ledger.comments.get("generation.vllm.mode")
        ledger.comments["generation.vllm.mode"] = f"{before}; {hint}" if before else hint


def _take_address(ledger: Ledger, inside: Path) -> None:
    whole = (*inside, "vllm_server_base_url")
    if ledger.get(*whole) is None:
        return
    ledger.keep(whole, "generation.vllm.base_url", ledger.get(*whole))
    for name in ("vllm_server_host", "vllm_server_port"):
        if ledger.node(*inside, name) is not None:
            ledger.drop((*inside, name), "`vllm_server_base_url` is given too, and wins")
