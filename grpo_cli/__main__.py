"""The entry point of `grpo`, and of `python -m grpo_cli`."""

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from grpo_cli.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
