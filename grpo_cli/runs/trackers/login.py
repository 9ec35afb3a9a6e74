"""Whether Weights & Biases could log in by itself: a worker has no terminal to be asked at.

Reads what wandb reads (environment, netrc, settings files), without importing it and without the
network: whether a key is still valid is the server's to say.

Source: `wandb/sdk/lib/wbauth` and `wandb/sdk/wandb_settings.py` of wandb 0.31.
"""

import configparser
import netrc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_NEEDS_NO_LOGIN = frozenset({"offline", "dryrun", "disabled"})
_OFF = frozenset({"true", "1", "yes"})
_SERVER = "https://api.wandb.ai"


def lacks_wandb_login(environment: Mapping[str, str], here: Path) -> bool:
    """Whether wandb would stop a training to ask for a key.

    Args:
        environment: The variables it would see.
        here: The working directory, where `wandb offline` may have left its settings.
    """
    settings = _read_settings(environment, here)
    mode = environment.get("WANDB_MODE") or settings.get("mode", "online")
    off = environment.get("WANDB_DISABLED", settings.get("disabled", ""))
    if mode in _NEEDS_NO_LOGIN or off.lower() in _OFF:
        return False
    if any(environment.get(name) for name in _KEYS) or settings.get("api_key"):
        return False
    server = environment.get("WANDB_BASE_URL") or settings.get("base_url", _SERVER)
    return not _is_in_netrc(environment, server)


def read_local_mode(here: Path) -> str | None:
    """What `wandb offline` or `wandb online` said in a folder; None where neither was run there."""
    return _read_section(here / "wandb" / "settings").get("mode")


def _read_settings(environment: Mapping[str, str], here: Path) -> dict[str, str]:
    """The settings of the user, under those of the folder."""
    home = environment.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    return {**_read_section(Path(home) / "settings"), **_read_section(here / "wandb" / "settings")}


def _read_section(path: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _is_in_netrc(environment: Mapping[str, str], server: str) -> bool:
    host = urlsplit(server).netloc
    # The web address stands for the one of the interface.
    hosts = {host, f"api.{host}", host.removeprefix("api.")}
    for path in _netrc_paths(environment):
        try:
            known = netrc.netrc(str(path))
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if any(host in known.hosts for host in hosts) or "default" in known.hosts:
            return True
    return False


def _netrc_paths(environment: Mapping[str, str]) -> Iterator[Path]:
    if named := environment.get("NETRC"):
        yield Path(os.path.expanduser(named))
    else:
        yield from (Path.home() / name for name in (".netrc", "_netrc"))
