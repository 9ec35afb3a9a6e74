"""What the test servers share: an answer in JSON over HTTP."""

import json


def send_json(handler, told, status=200, headers=None):
    """Answers a request of a `BaseHTTPRequestHandler`; a text is sent as it is."""
    body = (told if isinstance(told, str) else json.dumps(told)).encode()
    handler.send_response(status)
    every = {"Content-Type": "application/json", **(headers or {}), "Content-Length": len(body)}
    for name, value in every.items():
        handler.send_header(name, str(value))
    handler.end_headers()
    handler.wfile.write(body)
    handler.wfile.flush()
