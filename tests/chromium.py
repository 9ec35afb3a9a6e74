"""A page in headless Chromium, driven over the DevTools protocol through a pipe: no package, no port.

Source: https://chromedevtools.github.io/devtools-protocol/ (`--remote-debugging-pipe`: JSON messages that end in
a zero byte, read from descriptor 3 and written to descriptor 4).
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()
_PATIENCE_S = 60


def find_chromium() -> str | None:
    """The browser's command, where this machine has one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab: what it says, what went wrong in it, what it asked the network for."""

    def __init__(self, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        self.problems: list[str] = []
        """Errors and exceptions of the page."""
        self.requests: list[str] = []
        """Addresses that were asked for."""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._start(width, height)
        self._last = 0
        self._rest = b""
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def _start(self, width: int, height: int) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = [find_chromium(), *_FLAGS, f"--user-data-dir={self._profile.name}"]
        # Descriptors 3 and 4 are the protocol's; a shell puts ours there.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command, f"--window-size={width},{height}"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and waits for its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._last:
                assert "error" not in reply, reply
                return reply["result"]

    def open(self, path: Path, hash_: str = "") -> float:
        """Opens a file; gives the seconds until it had loaded."""
        started = time.monotonic()
        self.send("Page.navigate", url=f"{path.absolute().as_uri()}{hash_}")
        self.wait_for("document.readyState === 'complete'")
        return time.monotonic() - started

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        told = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Waits until an expression is true."""
        ends_at = time.monotonic() + _PATIENCE_S
        while not (value := self.ask(expression)):
            assert time.monotonic() < ends_at, f"never true: {expression}; {self.problems}"
            time.sleep(0.02)
        return value

    def fill(self, selector: str, value: str) -> None:
        """Writes into a field, or chooses, as a person would."""
        told = json.dumps(value)
        self.ask(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {told};"
            "field.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is seen, or of the whole page."""
        import base64

        told = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE_S)
            assert ready, "the browser says nothing"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "the browser has gone"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        self._note(told)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        method, params = told.get("method"), told.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(json.dumps(params["args"]))
