"""An export on the Hugging Face hub: one commit, private unless asked otherwise.

Owns the passage to huggingface_hub. The token is the one it finds in its usual places; it is never
read, shown or stored here.
"""

import re
from pathlib import Path

from httpx import HTTPError
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from grpo_cli.errors import RunError, SetupError, UsageError

_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def check_login(repo: str) -> None:
    """Refuses a push that cannot end well, before anything is written.

    Raises:
        UsageError: The name is not one of a repository.
        SetupError: There is no token, or the hub refuses it or cannot be reached.
    """
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{repo} is no name of a repository. Fix: --push ORGANISATION/NAME")
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError:
        raise SetupError(
            "there is no token for the hub. Fix: `hf auth login`, or set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise SetupError(
            f"the hub: {_first_line(error)}. Fix: `hf auth login`, or try later"
        ) from None


def push(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Uploads a folder as one commit.

    Args:
        folder: What is uploaded.
        repo: `organisation/name`; made where it is not there.
        private: Whether a repository that is made is private; one that exists stays as it is.
        message: Of the commit.

    Returns:
        The commit's address.

    Raises:
        RunError: The hub refuses it, or the connection breaks; the export on the disk stays.
    """
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise RunError(
            f"{repo} could not be pushed: {_first_line(error)}. The export is kept in {folder}. "
            f"Fix: `hf upload {repo} {folder}` when the cause is mended"
        ) from None
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
