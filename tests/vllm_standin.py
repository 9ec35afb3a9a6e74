"""A stand-in for the `vllm` command: takes `serve`'s flags, and answers as its server does, after a while."""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Run by its path, beside this module.
from json_reply import send_json


def flag(name):
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models":
            names = [flag("--served-model-name"), flag("--lora-modules").partition("=")[0]]
            common = {"object": "model", "created": 0, "owned_by": "x"}
            return send_json(
                self, {"object": "list", "data": [{"id": name, **common} for name in names]}
            )
        return send_json(self, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words = f"{asked['model']} heard {len(asked['messages'])}".split(" ")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for word in words:
            delta = {"index": 0, "delta": {"content": word + " "}, "finish_reason": None}
            piece = {
                "id": "1",
                "object": "chat.completion.chunk",
                "created": 0,
                "model": "x",
                "choices": [delta],
            }
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        return

    def log_message(self, *args):
        pass


if os.environ.get("STANDIN_FAILS"):
    sys.exit("ValueError: no room for the key-value cache")
print("loading weights", flush=True)
time.sleep(0.5)
ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()
