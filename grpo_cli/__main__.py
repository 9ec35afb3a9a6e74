"""The entry point of `grpo`, and of `python -m grpo_cli`."""

import gc
import os
import sys
import warnings


def main() -> None:
    """Load the command line and run it."""
    # What is loaded stays; looking for garbage in it takes an eighth of the time that a check needs.
    gc.set_threshold(200_000)
    # Pydantic would read the metadata of every installed package in search of plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # transformers warns of names that TRL and peft still use, and Python of the source of packages it compiles.
    # Child processes read the variable.
    if "PYTHONWARNINGS" not in os.environ:
        os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning,ignore::SyntaxWarning"
        for category in (FutureWarning, SyntaxWarning):
            warnings.simplefilter("ignore", category)
    try:
        from grpo_cli.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
