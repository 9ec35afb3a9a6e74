"""axolotl's weights, adapters, precision and data as a recipe's `model` and `dataset`.

Source: axolotl, `src/axolotl/utils/schemas/` (model, peft, datasets) and docs/rlhf.qmd.
"""

from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.from_trl import (
    BUILDERS,
    PROMPT_EXAMPLE,
    take_prompt_length,
    take_source,
)
from grpo_cli.convert.key_report import Ledger, find
from grpo_cli.convert.weights import take_dtype, take_plain, take_quantization
from grpo_cli.recipe.explanation import Path

_KERNELS = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
_PRECISIONS = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
}
_LISTED = {"lora_target_modules", "lora_target_linear"}
_DATA = {"path", "name", "split", "type", "data_files", "ds_type", "revision"}
_ENDINGS = (".json", ".jsonl", ".csv", ".parquet")


def load_weights(ledger: Ledger) -> None:
    """Takes the model, its kernel, its template and its adapters."""
    take_plain(ledger, ("base_model",), "model.path")
    take_plain(ledger, ("revision_of_model",), "model.revision")
    take_plain(ledger, ("trust_remote_code",), "model.trust_remote_code")
    take_plain(ledger, ("attn_implementation",), "model.attn_implementation")
    for name, kernel in _KERNELS.items():
        if ledger.is_on(name):
            ledger.keep((name,), "model.attn_implementation", kernel)
        elif ledger.node(name) is not None:
            ledger.settle((name,), "model.attn_implementation", "off")
    _take_template(ledger)
    _take_adapter(ledger)
    take_quantization(ledger)


def _take_template(ledger: Ledger) -> None:
    take_plain(ledger, ("chat_template_jinja",), "model.chat_template")
    key = ("chat_template",)
    name = ledger.get(*key)
    if ledger.node(*key) is None:
        return
    if name in (None, "jinja") or str(name).startswith("tokenizer_default"):
        ledger.settle(key, "model.chat_template", "the tokenizer's own, or the Jinja given")
    else:
        reason = f"axolotl's own template `{name}`; the tokenizer's is used. Another one, as Jinja, goes to "
        ledger.drop(key, f"{reason}`model.chat_template`")


def _take_adapter(ledger: Ledger) -> None:
    adapter = ledger.get("adapter")
    names = {*_LORA, *_LISTED}
    if adapter not in ("lora", "qlora"):
        if ledger.node("adapter") is not None:
            if adapter is None:
                ledger.settle(("adapter",), "model", "all weights are trained")
            else:
                ledger.drop(("adapter",), f"recipes have LoRA, and no `{adapter}`")
        for name in names:
            if ledger.node(name) is not None:
                ledger.drop((name,), "`adapter` is not lora, so all weights are trained without it")
        return
    ledger.keep(("adapter",), "model.lora", {}, "" if adapter == "lora" else "qlora")
    for name, target in _LORA.items():
        take_plain(ledger, (name,), f"model.lora.{target}")
    _take_targets(ledger)
    if adapter == "qlora" and ledger.node("load_in_4bit") is None:
        ledger.add("model.quantization", "4bit", "adapter: qlora")


def _take_targets(ledger: Ledger) -> None:
    modules, linear = ("lora_target_modules",), ("lora_target_linear",)
    target = "model.lora.target_modules"
    if ledger.is_on(*linear):
        ledger.keep(linear, target, "all-linear")
        if ledger.node(*modules) is not None:
            ledger.drop(modules, "`lora_target_linear` takes all linear modules")
        return
    take_plain(ledger, modules, target)
    if ledger.node(*linear) is not None:
        ledger.settle(linear, target, "off")


def take_precision(ledger: Ledger) -> None:
    """Takes axolotl's switches of precision, which say how weights are loaded too."""
    for name in ("torch_dtype", "dtype"):
        if ledger.get(name) is not None:
            take_dtype(ledger, (name,))
    bf16 = ledger.get("bf16")
    if bf16 == "full":
        ledger.keep(("bf16",), "training.bf16_full_eval", True)
    elif isinstance(bf16, bool):
        ledger.keep(("bf16",), "training.bf16", bf16)
    elif ledger.node("bf16") is not None:
        ledger.settle(("bf16",), "training.bf16", "TRL's default: bf16, unless fp16 is set")
    for name, dtype in _PRECISIONS.items():
        if ledger.is_on(name):
            ledger.keep((name,), "model.dtype", dtype)
        elif ledger.node(name) is not None:
            ledger.settle((name,), "model.dtype", "off")
    if find(ledger.recipe, "model.dtype") is None:
        low = "float16" if ledger.is_on("fp16") else "float32"
        dtype = low if bf16 is False or ledger.is_on("fp16") else "bfloat16"
        ledger.add("model.dtype", dtype, "axolotl loads weights in the precision it trains in")


def take_data(ledger: Ledger) -> None:
    """Takes the first dataset; what its `type` made of rows has to be written as a template."""
    key: Path = ("datasets",)
    listed = ledger.get(*key)
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
        if ledger.node(*key) is not None:
            ledger.drop(key, "should be a list of mappings with a `path`")
        ledger.to_do["dataset"] = "say where the rows come from: `kind`, and `path` or `train`"
    else:
        ledger.settle(key, "dataset", "its first entry")
        _take_rows(ledger, (*key, 0))
        for index in range(1, len(listed)):
            reason = "a recipe reads one dataset; merge them into one beforehand"
            ledger.drop((*key, index), reason)
    _take_held_out(ledger)
    take_prompt_length(ledger, ("max_prompt_len",))


def _take_rows(ledger: Ledger, key: Path) -> None:
    path, form = ledger.get(*key, "path"), ledger.get(*key, "ds_type")
    local = isinstance(path, str) and (path.endswith(_ENDINGS) or FilePath(path).is_file())
    if ledger.node(*key, "ds_type") is not None:
        ledger.settle((*key, "ds_type"), "dataset.kind", "told by the files' endings")
    if local and (form in (None, *BUILDERS)):
        ledger.recipe.setdefault("dataset", {})["kind"] = "files"
        ledger.keep((*key, "path"), "dataset.train", path)
        for name in ("name", "split", "data_files"):
            if ledger.node(*key, name) is not None:
                ledger.drop((*key, name), "files of one's own have no configurations and splits")
    else:
        take_source(ledger, key)
    take_plain(ledger, (*key, "revision"), "dataset.revision")
    _take_transform(ledger, (*key, "type"))
    for name in ledger.rest(*key):
        ledger.drop((*key, name), "how axolotl reads rows; `dataset.prompt` says it in a recipe")


def _take_transform(ledger: Ledger, key: Path) -> None:
    given = ledger.get(*key)
    said = given if isinstance(given, str) else "a mapping of fields"
    if ledger.node(*key) is not None:
        ledger.drop(
            key, f"{said} makes prompts of rows in axolotl; write `dataset.prompt` in its place"
        )
    made = f"what `{said}` made" if isinstance(given, str) else "what axolotl made"
    ledger.to_do["dataset.prompt"] = (
        f"write {made} of a row, as Jinja over its columns\n{PROMPT_EXAMPLE}"
    )


def _take_held_out(ledger: Ledger) -> None:
    key = ("val_set_size",)
    size: Any = ledger.get(*key)
    if isinstance(size, int | float) and 0 < size < 1:
        ledger.keep(key, "dataset.eval_fraction", size)
    elif size in (0, None):
        if ledger.node(*key) is not None:
            ledger.settle(key, "dataset", "nothing is held out")
    else:
        ledger.drop(key, "a share is needed: `dataset.eval_fraction`, above 0 and below 1")
    tests: Path = ("test_datasets",)
    first = ledger.get(*tests, 0)
    dataset: dict[str, Any] = ledger.recipe.get("dataset", {})
    if ledger.node(*tests) is None:
        return
    if isinstance(first, dict) and first.get("path") == dataset.get("path") and "split" in first:
        ledger.keep(tests, "dataset.eval_split", first["split"], "its first entry's split")
    elif isinstance(first, dict) and "train" in dataset and _is_file(first.get("path")):
        ledger.keep(tests, "dataset.eval", first["path"], "its first entry")
    else:
        ledger.drop(
            tests, "evaluation rows come from the same dataset (`eval_split`) or from files"
        )


def _is_file(path: Any) -> bool:
    return isinstance(path, str) and path.endswith(_ENDINGS)
