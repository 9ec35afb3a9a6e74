"""`python -m grpo_cli`: the same as `grpo`."""

from grpo_cli.cli.app import main

if __name__ == "__main__":
    main()
