"""HTTP requests whose whole reply has a limit of time and one of size, however a server sends it."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

MOST_REPLY_BYTES = 16 * 2**20
"""Of a reply, decompressed."""


class ReplyTooLargeError(httpx.RemoteProtocolError):
    """A reply exceeds its limit of size."""


class BoundedClient(httpx.AsyncClient):
    """Reads each reply whole; httpx itself has a limit for each read only, and none of size."""

    def __init__(self, limit_s: float, most_bytes: int = MOST_REPLY_BYTES, **options: Any) -> None:
        super().__init__(timeout=limit_s, **options)
        self._limit_s, self._most_bytes = limit_s, most_bytes

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request; raises `httpx.HTTPError` if the reply exceeds a limit."""
        try:
            async with asyncio.timeout(self._limit_s):
                response = await super().send(request, **{**options, "stream": True})
                body = await self._read(response)
        except TimeoutError:
            late = f"no whole reply in {self._limit_s:g} s"
            raise httpx.ReadTimeout(late, request=request) from None
        # The body is decompressed.
        headers = response.headers.copy()
        for name in ("content-encoding", "content-length", "transfer-encoding"):
            headers.pop(name, None)
        return httpx.Response(
            response.status_code, headers=headers, content=body, request=response.request
        )

    async def _read(self, response: httpx.Response) -> bytes:
        body = bytearray()
        try:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > self._most_bytes:
                    large = f"the reply is larger than {self._most_bytes // 2**20} MiB"
                    raise ReplyTooLargeError(large, request=response.request)
        finally:
            await response.aclose()
        return bytes(body)


def request(
    method: str, url: str, *, limit_s: float, json: Any = None, **options: Any
) -> httpx.Response:
    """Return the reply to one request, or raise `httpx.HTTPError`; `options` are those of `BoundedClient`."""

    async def send() -> httpx.Response:
        async with BoundedClient(limit_s, **options) as client:
            return await client.request(method, url, json=json)

    reply: httpx.Response = run_async(send())
    return reply


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end; in a thread of its own if this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
