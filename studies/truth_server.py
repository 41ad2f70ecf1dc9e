"""A server of streaming completions that does nothing but keep time, and says afterwards what it really did.

    python studies/truth_server.py --port 8000 --ttft 0.05 --itl 0.1

Every token of a request is due at a time that is fixed when the request arrives: its arrival, `--ttft`, and so many
`--itl`. GET /truth tells of each request when it arrived (by the kernel, where it says so), when it was read, and when
each of its tokens was about to be written, in seconds of the monotonic clock, which client and server on one host
share; GET /forget begins anew. Faults are planted by `--fault`, or by a request whose body has a "fault".
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import re
import resource
import select
import socket
import ssl
import struct
import sys
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("ll")
PIECE = 1 << 16
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\nX-Request-Number: %d\r\n\r\n"
)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
REQUEST_ID = re.compile(rb"\r\nx-request-id: *([^\r\n]+)", re.IGNORECASE)
FAULTS = {
    "die": "close the connection in the middle of the stream",
    "malformed": "a chunk whose size is no number",
    "garbage": "an event that is no JSON",
    "no-done": "end the stream without saying that it is complete",
    "multi": "two tokens in an event",
    "no-usage": "no usage at the end",
    "error": "status 500, with the request's own Authorization in the text",
    "error-event": "an error in the stream",
    "silent": "a stream that is complete, without a token in it",
    "hang": "never answer",
    "stall": "stop in the middle of the stream",
    "plain": "answer without streaming",
    "close": "close after each answer, which has no length",
    "drop": "say nothing more about it, but close right after the answer",
}


@dataclass(slots=True)
class Request:
    """One completion: what is known of it, and how far it is."""

    number: int
    arrived: float
    read: float
    tokens: int
    fault: str
    name: str
    usage: bytes
    chat: bool
    connection: Connection
    due: float = 0.0
    writes: array[float] = field(default_factory=lambda: array("d"))

    def truth(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "name": self.name,
            "arrived": self.arrived,
            "read": self.read,
            "writes": self.writes.tolist(),
        }


class Connection:
    __slots__ = ("buffer", "socket", "unsent")

    def __init__(self, sock: Any) -> None:
        self.socket = sock
        self.buffer = b""
        self.unsent = b""


def chunk(event: bytes) -> bytes:
    body = b"data: %s\n\n" % event
    return b"%x\r\n%s\r\n" % (len(body), body)


def event(text: str, chat: bool, finish: str | None = None, number: int = 0) -> bytes:
    """As vLLM words it, with all that it repeats in every event."""
    said = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    kind = "chat.completion.chunk" if chat else "text_completion"
    facts = {"id": f"cmpl-{number:032x}", "object": kind, "created": 1700000000, "model": "truth"}
    return chunk(json.dumps({**facts, "choices": [choice]}).encode())


TOKEN = {chat: event(" t", chat) for chat in (False, True)}
LAST = {chat: event(" t", chat, "length") for chat in (False, True)}
END = chunk(b"[DONE]") + b"0\r\n\r\n"


class TruthServer:
    """Listens when made; `serve` until its process ends. ttft_s, itl_s: seconds. accept_s: waits so long before it
    accepts each connection."""

    def __init__(
        self,
        port: int = 0,
        ttft_s: float = 0.05,
        itl_s: float = 0.1,
        fault: str = "",
        accept_s: float = 0.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.ttft_s, self.itl_s, self.fault, self.accept_s, self.tls = ttft_s, itl_s, fault, accept_s, tls
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.epoll = select.epoll()
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.connections: dict[int, Connection] = {}
        self.due: list[tuple[float, int, Request]] = []  # a heap
        self.ended: list[Request] = []
        self.numbers = count()

    def serve(self) -> None:
        while True:
            self.write_due()
            self.wait()
            # Time of day first, and the least of three: none is too small, whatever comes between two reads.
            ahead = min(-time.time() + time.monotonic() for _ in range(3))
            for number, _ in self.epoll.poll(0, 4096):
                if number == self.listener.fileno():
                    self.accept()
                elif connection := self.connections.get(number):
                    self.advance(connection, ahead)

    def wait(self) -> None:
        left = self.due[0][0] - time.monotonic() if self.due else 1.0
        if left > 0:
            select.select([self.epoll], [], [], left)

    def accept(self) -> None:
        time.sleep(self.accept_s)
        with suppress(BlockingIOError):
            for _ in range(16):
                self.take(self.listener.accept()[0])

    def take(self, sock: Any) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        if self.tls:
            try:
                sock = self.tls.wrap_socket(sock, server_side=True)
            except OSError:  # the client does not trust us
                return sock.close()
        sock.setblocking(False)
        self.connections[sock.fileno()] = Connection(sock)
        self.epoll.register(sock.fileno(), select.EPOLLIN)

    def advance(self, connection: Connection, ahead: float) -> None:
        try:
            if connection.unsent:
                self.write(connection, b"")
            data, arrived = receive(connection.socket, ahead)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            data, arrived = b"", 0.0
        if not data:
            return self.drop(connection)
        connection.buffer += data
        head, blank, rest = connection.buffer.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        wanted = int(length[1]) if length else 0
        if blank and len(rest) >= wanted:
            connection.buffer = rest[wanted:]
            self.answer(connection, head, rest[:wanted], arrived)

    def drop(self, connection: Connection) -> None:
        self.connections.pop(connection.socket.fileno(), None)
        connection.socket.close()

    def answer(self, connection: Connection, head: bytes, body: bytes, arrived: float) -> None:
        if head.startswith(b"GET") or b"completions" not in head[:80]:
            return self.on_progress(connection, head.split(b" ")[1].decode())
        now = time.monotonic()
        asked = json.loads(body)
        name = REQUEST_ID.search(head)
        prompt = asked.get("prompt", "")
        tokens = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
        request = Request(
            next(self.numbers),
            arrived or now,
            now,
            tokens,
            asked.get("fault") or self.fault,
            name[1].decode() if name else str(prompt)[:40],
            usage_event(asked, tokens),
            b"/chat/" in head[:80],
            connection,
        )
        if request.fault in ("error", "plain", "hang"):
            return self.refuse(request, head)
        request.due = request.arrived + self.ttft_s
        heapq.heappush(self.due, (request.due, request.number, request))

    def refuse(self, request: Request, head: bytes) -> None:
        if request.fault == "error":
            key = re.search(rb"\r\nauthorization: *([^\r\n]+)", head, re.IGNORECASE)
            text = b'{"error": {"message": "planted, for %s"}}' % (key[1] if key else b"nobody")
            self.reply(request.connection, b"500 Internal Server Error", text)
        elif request.fault == "plain":
            self.reply(request.connection, b"200 OK", b'{"choices": [{"text": " t t t"}]}')

    def reply(self, connection: Connection, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self.write(connection, head + body)

    def on_progress(self, connection: Connection, path: str) -> None:
        if path == "/truth":
            rows = [request.truth() for request in self.ended]
            return self.reply(connection, b"200 OK", json.dumps({"cpu_s": time.process_time(), "rows": rows}).encode())
        if path == "/forget":
            self.ended.clear()
        models = {"object": "list", "data": [{"id": "truth", "object": "model", "owned_by": "nobody"}]}
        self.reply(connection, b"200 OK", json.dumps(models).encode())

    def write_due(self) -> None:
        """Every token whose time has come by now; what arrives meanwhile must be heard, too."""
        now, due = time.monotonic(), self.due
        while due and due[0][0] <= now:
            request = due[0][2]
            if self.write_token(request):
                request.due += self.itl_s
                heapq.heapreplace(due, (request.due, request.number, request))
            else:
                heapq.heappop(due)

    def write_token(self, request: Request) -> bool:
        """The next; whether more will follow."""
        written = len(request.writes) + 1
        last = written >= request.tokens
        head = head_of(request) if written == 1 else b""
        if request.fault:
            data = with_fault(request, written, last)
        elif not head:
            data = LAST[request.chat] + request.usage + END if last else TOKEN[request.chat]
        else:
            data = head + event(f"{request.number}", request.chat, "length" if last else None)
            data += request.usage + END if last else b""
        if request.fault and head:
            data = head + data
        request.writes.append(time.monotonic())
        self.write(request.connection, data)
        if request.fault and self.broken(request, written, last):
            return False
        if last:
            self.ended.append(request)
        return not last

    def broken(self, request: Request, written: int, last: bool) -> bool:
        """Whether nothing more comes."""
        middle = written == 3
        if (request.fault == "die" and middle) or (last and request.fault in ("close", "drop")):
            self.drop(request.connection)
        return middle and request.fault in ("die", "stall", "error-event")

    def write(self, connection: Connection, data: bytes) -> None:
        data = connection.unsent + data
        try:
            sent = connection.socket.send(data) if data else 0
        except (BlockingIOError, ssl.SSLWantWriteError):
            sent = 0
        except OSError:
            return
        if bool(connection.unsent) != (sent < len(data)):
            waits = select.EPOLLOUT if sent < len(data) else 0
            self.epoll.modify(connection.socket.fileno(), select.EPOLLIN | waits)
        connection.unsent = data[sent:]


def head_of(request: Request) -> bytes:
    if request.fault == "close":
        return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    return HEAD % request.number


def with_fault(request: Request, written: int, last: bool) -> bytes:
    text = " t" if written > 1 else f"{request.number}"
    token = event(text, request.chat, "length" if last and request.fault != "no-done" else None)
    match request.fault:
        case "malformed" if written == 3:
            return b"what?\r\n"
        case "garbage" if written == 3:
            return chunk(b"{what?")
        case "error-event" if written == 3:
            return chunk(b'{"error": {"message": "planted"}}')
        case "no-done":
            return token + b"0\r\n\r\n" if last else token
        case "close":
            body = b"".join(re.findall(rb"data: [^\n]*\n\n", token))
            return body + b"data: [DONE]\n\n" if last else body
        case "silent":
            return request.usage + END if last else b""
        case "no-usage":
            return token + END if last else token
        case "multi":
            return multi(request, last)
    return token + request.usage + END if last else token


def multi(request: Request, last: bool) -> bytes:
    """Two tokens in each event, said only by the usage in the end."""
    usage = {"prompt_tokens": 1, "completion_tokens": 2 * request.tokens}
    told = chunk(json.dumps({"choices": [], "usage": usage}).encode()) if request.usage else b""
    token = event(" t t", request.chat, "length" if last else None)
    return token + told + END if last else token


def usage_event(asked: dict[str, Any], tokens: int) -> bytes:
    if not (asked.get("stream_options") or {}).get("include_usage"):
        return b""
    prompt = asked.get("prompt", "")
    count = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
    usage = {"prompt_tokens": count, "completion_tokens": tokens, "total_tokens": count + tokens}
    return chunk(json.dumps({"id": "cmpl-0", "object": "text_completion", "choices": [], "usage": usage}).encode())


def receive(sock: Any, ahead: float) -> tuple[bytes, float]:
    """What came, and when its last packet did, or 0 where nobody knows."""
    if isinstance(sock, ssl.SSLSocket):
        return sock.recv(PIECE), 0.0
    data, told, _, _ = sock.recvmsg(PIECE, socket.CMSG_SPACE(TIMESPEC.size))
    if not told:
        return data, 0.0
    seconds, nanoseconds = TIMESPEC.unpack(told[0][2])
    return data, seconds + nanoseconds / 1e9 + ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: any; it is printed")
    parser.add_argument("--ttft", type=float, default=0.05, help="seconds")
    parser.add_argument("--itl", type=float, default=0.1, help="seconds")
    parser.add_argument("--fault", choices=FAULTS, default="", help="; ".join(f"{n}: {t}" for n, t in FAULTS.items()))
    parser.add_argument("--accept", type=float, default=0.0, help="seconds before each connection is accepted")
    parser.add_argument("--core", type=int, help="run on this core alone")
    parser.add_argument("--certificate", nargs=2, metavar=("CERTIFICATE", "KEY"), help="speak TLS")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tls = None
    if args.certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*args.certificate)
    server = TruthServer(args.port, args.ttft, args.itl, args.fault, args.accept, tls)
    print(server.port, flush=True)
    with suppress(KeyboardInterrupt):
        server.serve()
    sys.exit(0)


if __name__ == "__main__":
    main()
