"""A judge for tests: a real HTTP server on loopback with scripted behaviour."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.json_reply import send_json

FENCED = re.compile(
    r"^([A-Z]+(?: [A-Z]+)?(?: \d+)?)\n(~{8,})\n(.*?)\n\2$", re.DOTALL | re.MULTILINE
)


@dataclass
class Answer:
    """What the server sends back."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


def say(text, **choice):
    """A chat completion that says `text`."""
    message = {"role": "assistant", "content": text}
    return Answer(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "judge",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}],
        }
    )


def fail(status, message="no", headers=None, **error):
    """An error as OpenAI words it."""
    return Answer({"error": {"message": message, **error}}, status, headers or {})


def sections(request):
    """The fenced parts of a request's material, by title."""
    return {title: text for title, _, text in FENCED.findall(request["messages"][1]["content"])}


def answers_in(request):
    """The answers shown, in order."""
    return [text for title, text in sections(request).items() if re.match(r"ANSWER\b", title)]


def judge_by(score: Callable[[str], Any]):
    """A judge whose score is a function of the answer's text."""

    def judge(request):
        verdicts = [{"reason": f"saw {text}", "score": score(text)} for text in answers_in(request)]
        if len(verdicts) == 1:
            return say(json.dumps(verdicts[0]))
        numbered = [{"answer": place, **each} for place, each in enumerate(verdicts, start=1)]
        return say(json.dumps({"scores": numbered[::-1]}))

    return judge


class JudgeServer:
    """Serves `/v1/chat/completions` and `/v1/models` until closed; keeps every request."""

    def __init__(self, judge: Callable[[dict], Answer], script=(), models=("judge",)):
        self.judge = judge
        self.script = list(script)
        """Answers given before the judge is asked, in order."""
        self.models = models
        self.requests: list[dict] = []
        self.keys: set[str] = set()
        self.connections: set[tuple[str, int]] = set()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self):
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request, handler):
        with self._lock:
            self.requests.append(request)
            self.keys.add(handler.headers["Authorization"])
            self.connections.add(handler.client_address)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            scripted = self.script.pop(0) if self.script else None
        answer = scripted or self.judge(request)
        self._closed.wait(answer.delay_s)
        with self._lock:
            self._at_once -= 1
        return answer


def _handler_of(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                return self._send(fail(404, "no such page"))
            return self._send(server.answer(request, self))

        def do_GET(self):
            if self.path != "/v1/models" or server.models is None:
                return self._send(fail(404, "no such page"))
            data = [
                {"id": name, "object": "model", "created": 1, "owned_by": "x"}
                for name in server.models
            ]
            return self._send(Answer({"object": "list", "data": data}))

        def _send(self, answer):
            with contextlib.suppress(OSError):
                send_json(self, answer.body, answer.status, answer.headers)

        def log_message(self, *args):
            pass

    return Handler


def http_date(seconds_from_now):
    """A moment as `Retry-After` may write it."""
    moment = time.gmtime(time.time() + seconds_from_now)
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", moment)
