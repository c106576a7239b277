"""A small OpenAI-compatible judge on 127.0.0.1 that knows the right verdicts and can be told to misbehave.

The right verdict on a criterion is a function of its text (`truth`), so that a test can check every answer. A fault is
a `Reply`, chosen per request. In a thread (`with FakeJudge() as server`), or alone: `fake_server.py PORT LATENCY`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Request = dict[str, Any]
HELD = 30.0


@dataclass
class Reply:
    """What the server does with one request. A plain Reply(text) is a 200 with that text as the judge's answer."""

    text: str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    finish_reason: str = "stop"
    reasoning: str | None = None
    refusal: str | None = None
    error: str = "injected"
    code: str | None = None
    raw: bytes | None = None  # sent as the body, whatever it is
    delay: float = 0.0
    until: Callable[[], bool] | None = None  # held until this is true, or for HELD seconds
    reset: bool = False  # the connection is reset
    drip: float = 0.0  # seconds between single bytes of the body


def truth(criterion: str) -> bool:
    return bool(hashlib.sha256(criterion.encode()).digest()[0] & 1)


def score(criterion: str) -> int:
    return 1 + hashlib.sha256(criterion.encode()).digest()[1] % 10


def user_text(request: Request) -> str:
    return request["messages"][-1]["content"]


def criteria_of(request: Request) -> list[tuple[str | None, str]]:
    """(id or None, first line) of the criteria, looked for behind the response."""
    tail = user_text(request).rpartition("</response>")[2]
    return re.findall(r'<criterion(?: id="(\w+)")?>\n(.*)', tail)


def honest(request: Request) -> Reply:
    """The right answer in the form that the prompt asks for."""
    scored = '"score"' in request["messages"][0]["content"]

    def verdict(text: str) -> dict[str, Any]:
        return {"score": score(text)} if scored else {"criteria_met": truth(text)}

    listed = criteria_of(request)
    if '"verdicts"' in request["messages"][0]["content"]:
        entries = [{"id": i, "explanation": "as seen", **verdict(text)} for i, text in listed]
        return Reply(json.dumps({"verdicts": entries}))
    return Reply(json.dumps({"explanation": "as seen", **verdict(listed[0][1])}))


class FakeJudge:
    """`requests`: every request body, in order. `answered`: how many got a 200."""

    def __init__(self, answer: Callable[[Request], Reply] = honest, port: int = 0, keep: bool = True) -> None:
        self.answer, self.keep = answer, keep
        self.requests: list[Request] = []
        self.arrivals: list[float] = []
        self.headers: list[str] = []
        self.answered = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.port = port
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> FakeJudge:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listens; on the same port as before if it was stopped."""
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def stop(self) -> None:
        """Stops listening and drops every connection, as a killed server does."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)
            self._loop = None

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._connections: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stopping.wait()
        server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(re.search(rb"(?i)content-length: *(\d+)", head)[1])  # type: ignore[index]
                request = json.loads(await reader.readexactly(length))
                if self.keep:
                    self.headers.append(head.decode())
                    self.requests.append(request)
                    self.arrivals.append(time.monotonic())
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    reply = self.answer(request)
                    await asyncio.sleep(reply.delay)
                    given_up = time.monotonic() + HELD
                    while reply.until is not None and not reply.until() and time.monotonic() < given_up:
                        await asyncio.sleep(0.005)
                    await self._send(writer, request, reply)
                finally:
                    self.in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, request: Request, reply: Reply) -> None:
        if reply.reset:  # SO_LINGER of 0 seconds makes the close a reset
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            raise ConnectionResetError
        body = reply.raw if reply.raw is not None else json.dumps(_body(request, reply)).encode()
        lines = [f"HTTP/1.1 {reply.status} X", "content-type: application/json", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        if reply.drip:
            for byte in body:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(reply.drip)
        else:
            writer.write(body)
        await writer.drain()
        self.answered += reply.status == 200


def _body(request: Request, reply: Reply) -> dict[str, Any]:
    if reply.status != 200:
        return {"error": {"message": reply.error, "type": "injected", "code": reply.code}}
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.refusal is not None:
        message["refusal"] = reply.refusal
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


def with_latency(seconds: float) -> Callable[[Request], Reply]:
    def answer(request: Request) -> Reply:
        reply = honest(request)
        reply.delay = seconds
        return reply

    return answer


if __name__ == "__main__":
    with FakeJudge(with_latency(float(sys.argv[2])), port=int(sys.argv[1]), keep=False) as alone:
        print(alone.url, flush=True)
        threading.Event().wait()
