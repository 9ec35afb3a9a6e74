"""A stand-in for the hub's HTTP API on loopback: enough of it to create a repository and commit to it."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.json_reply import send_json

TOKEN = "hf_of_the_test"


class HubServer:
    """Takes repositories and commits, and remembers them."""

    def __init__(self, refuse_commits: bool = False) -> None:
        self.refuse_commits = refuse_commits
        self.repos: dict[str, dict] = {}
        """Name → what `create_repo` sent."""
        self.commits: list[dict] = []
        """Each with its summary, the files that it removes, and the others: path → content."""
        self.present: list[str] = []
        """Files that every repository has already."""
        self.blobs: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: bytes, token: str | None) -> tuple[int, dict | list]:
        if path.endswith("validate-yaml"):
            return 200, {"errors": [], "warnings": []}
        if token != TOKEN:
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"name": "tester", "type": "user", "orgs": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repos[name] = asked
            return 200, {"url": f"{self.url}/{name}", "name": name, "id": name}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {"files": [_say_mode(file) for file in files]}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": [self._place(each) for each in json.loads(body)["objects"]],
            }
        if "/commit/" in path:
            return self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        if "/tree/" in path:
            about = {"type": "file", "size": 1, "oid": "a" * 40}
            return 200, [{"path": name, **about} for name in self.present]
        if path.startswith("/api/models/"):
            return 200, {"id": path.removeprefix("/api/models/"), "siblings": []}
        return 404, {"error": f"no {path}"}

    def _place(self, asked: dict) -> dict:
        return {**asked, "actions": {"upload": {"href": f"{self.url}/blob/{asked['oid']}"}}}

    def _commit(self, repo: str, body: bytes) -> tuple[int, dict]:
        if self.refuse_commits:
            return 403, {"error": "You have no right to write here."}
        commit = {"files": {}, "deleted": []}
        for line in body.splitlines():
            record = json.loads(line)
            value = record["value"]
            if record["key"] == "header":
                commit["summary"] = value["summary"]
            elif record["key"] == "file":
                commit["files"][value["path"]] = base64.b64decode(value["content"])
            elif record["key"] == "deletedFile":
                commit["deleted"].append(value["path"])
            elif record["key"] == "lfsFile":
                commit["files"][value["path"]] = self.blobs[value["oid"]]
        self.commits.append(commit)
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/abc", "commitOid": "a" * 40}

    def store(self, path: str, body: bytes) -> None:
        oid = path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.blobs[oid] = body


def _say_mode(file: dict) -> dict:
    large = file["path"].endswith((".safetensors", ".gguf", ".png"))
    return {
        "path": file["path"],
        "uploadMode": "lfs" if large else "regular",
        "shouldIgnore": False,
    }


def _handler_of(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._reply()

        def do_POST(self):
            self._reply()

        def do_PUT(self):
            hub.store(self.path, self._body())
            send_json(self, {})

        def _reply(self):
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
            status, told = hub.answer(self.path.partition("?")[0], self._body(), token)
            send_json(self, told, status)

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        def log_message(self, *args):
            pass

    return Handler
