"""A read-only HTTP server for a site."""

import hashlib
import io
import logging
import socket
import threading
from collections.abc import Collection
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from sunspot.errors import SettingsError, shorten
from sunspot.formatting import visible
from sunspot.machine.local_http import LocalServer, as_address, host_name, is_loopback
from sunspot.ui.site import Answer, Site

log = logging.getLogger(__name__)

MAX_REQUESTS = 32
"""Largest number of concurrent requests."""

BUSY_S = 10.0
"""Seconds that requests beyond MAX_REQUESTS wait before they are rejected."""

MAX_HOST = 255
"""Largest number of characters of a host name in a message."""

SEND_WITHIN_S = 15.0
"""Seconds within which a browser must accept the response."""

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""The content security policy. A browser loads only content from this server, even if a run's text contains links to
other sites. Inline styles are allowed, because a confusion matrix has them."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Server(LocalServer):
    """Serves a site over HTTP. The Host header must contain this machine's address or one of its names."""

    def __init__(self, address: str, port: int, site: Site, hosts: Collection[str] = ()) -> None:
        """Listen on the address, and accept `hosts` as additional names. Raises `SettingsError` if listening fails."""
        self.site = site
        self.loopback = is_loopback(address)
        self.free = threading.BoundedSemaphore(MAX_REQUESTS)
        self._address = address
        self._names = {name.lower() for name in (address, *hosts)}
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            super().__init__((address, port), _Handler)
        except (OSError, OverflowError) as error:
            raise SettingsError(
                f"cannot listen on {address}, port {port}: {shorten(error)}; try another --port"
            ) from error
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.server_address[1]}/"

    def answers_to(self, host: str) -> bool:
        """Return True if a Host header names this server.

        A server that listens on all addresses accepts any address in the header. This is safe, because in a DNS
        rebinding attack, the header contains another site's name and never an address.
        """
        name = host_name(host)
        listens = as_address(self._address)
        everywhere = listens is not None and listens.is_unspecified
        return is_loopback(name) or name in self._names or (everywhere and as_address(name) is not None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request failed", exc_info=True)  # usually because the browser has closed the connection


class _Handler(BaseHTTPRequestHandler):
    """A handler for GET and HEAD requests. Other methods are rejected."""

    server: Server
    server_version, sys_version = "sunspot", ""
    default_request_version = "HTTP/1.0"  # so that responses to malformed requests also have headers

    def setup(self) -> None:
        super().setup()
        head, _ = self.server.read_head(self.connection)
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(head))  # type: ignore[arg-type]
        self.connection.settimeout(SEND_WITHIN_S)

    def handle(self) -> None:
        if self.server.free.acquire(timeout=BUSY_S):
            try:
                super().handle()
            finally:
                self.server.free.release()

    def do_GET(self) -> None:
        answer = self._make()
        tag = f'"{hashlib.sha256(answer.body).hexdigest()[:32]}"'
        same = answer.status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else answer.status)
        self.send_header("ETag", tag)
        self.send_header("Content-Type", answer.kind)
        if not same:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if not same and self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def end_headers(self) -> None:
        for name, value in HEADERS.items():  # error responses need them, too
            self.send_header(name, value)
        super().end_headers()

    def _make(self) -> Answer:
        try:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not self.server.answers_to(hosts[0]):
                asked = visible(" and ".join(hosts))[:MAX_HOST]
                message = f"{asked!r} is not a name of this server; `sunspot ui --host NAME` adds a name\n"
                return Answer(message.encode(), HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8")
            return self.server.site.answer(self.path)
        except Exception as error:
            log.exception("%s failed", self.path)
            return Answer(f"{shorten(error)}\n".encode(), HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
