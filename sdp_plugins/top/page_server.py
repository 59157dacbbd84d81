"""Serves the page of one job to browsers of this machine's user.

Other users of the machine, and pages of other sites in the user's browser, can reach the port. So
every request needs the token in the page's address, and a Host header of this machine's loopback
address: a site that has its name resolved to 127.0.0.1 sends its own.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from sdp_plugins.top.sampling import Sampling
from sdp_plugins.top.timeline import SPAN_NS, lanes_of
from sdp_plugins.top.view import HEADINGS

_IDLE_S = 30.0  # a connection that sends nothing is closed
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageServer:
    """Serves from a thread of its own until it is closed.

    Args:
        sampling: Readings of the job, which another thread makes.
        port: 0: a free one.

    Attributes:
        url: The address of the page.
    """

    def __init__(self, sampling: Sampling, port: int) -> None:
        token = secrets.token_urlsafe(32)
        self._server = _Server(("127.0.0.1", port), sampling, token)
        self.url = f"http://127.0.0.1:{self._server.server_port}/{token}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    block_on_close = False  # a browser may keep its connection

    def __init__(self, address: tuple[str, int], sampling: Sampling, token: str) -> None:
        super().__init__(address, _Handler)
        self.sampling = sampling
        self.token = token.encode()
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, but for that of a browser that leaves."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_S
    server_version, sys_version = "sdp", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send the page or its data."""
        _, token, rest = self.path.split("/", 2) if self.path.count("/") > 1 else ("", "", "")
        known = hmac.compare_digest(token.encode(), self.server.token)
        if self.headers.get("Host") not in self.server.hosts or not known:
            self._send(403, "text/plain", b"open the whole address that sdp top has printed")
        elif rest == "":
            nonce = secrets.token_urlsafe(16)
            self._send(200, "text/html", _page(nonce), _POLICY.format(nonce=nonce))
        elif rest == "data":
            self._send(200, "application/json", json.dumps(_data(self.server.sampling)).encode())
        else:
            self._send(404, "text/plain", b"there is no such page")

    def _send(self, code: int, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        self.send_response(code)
        headers = {
            **_HEADERS,
            "Content-Security-Policy": policy,
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: the token is in the request."""


def _page(nonce: str) -> bytes:
    text = resources.files("sdp_plugins.top").joinpath("page.html").read_text(encoding="utf-8")
    return text.replace("NONCE", nonce).encode()


def _data(sampling: Sampling) -> dict[str, Any]:
    """What the page shows; only numbers and text, which it does not take for markup."""
    view = sampling.view()
    return {
        "title": view.title,
        "idle": view.idle,
        "ended": sampling.ended,
        "headings": HEADINGS,
        "groups": [
            {"title": group.title, "rows": [row._asdict() for row in group.rows]}
            for group in view.groups
        ],
        "seconds": SPAN_NS // 10**9,
        "lanes": [lane._asdict() for lane in lanes_of(sampling.latest())],
    }
