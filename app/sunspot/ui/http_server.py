"""HTTP server of a site, which answers only requests that read."""

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
from sunspot.local_http import LocalServer, as_address, host_name, is_loopback
from sunspot.ui.site import Answer, Site

log = logging.getLogger(__name__)

MAX_REQUESTS = 32
"""Largest number of requests that are answered at the same time."""

BUSY_S = 10.0
"""Seconds that further requests wait before they are refused."""

MAX_HOST = 255
"""Largest number of characters that are shown of a host name."""

SEND_WITHIN_S = 15.0
"""Seconds in which a browser must accept the answer."""

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content security policy. A browser only loads what this server serves, whatever text a run contains. (A confusion
matrix has styles.)"""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Server(LocalServer):
    """Serves a site over HTTP, for requests that name this machine by its address or by one of its names."""

    def __init__(self, address: str, port: int, site: Site, hosts: Collection[str] = ()) -> None:
        """Listen, and also answer to the names `hosts`. Raises `SettingsError` if the address cannot be used."""
        self.site = site
        self.loopback = is_loopback(address)
        self.free = threading.BoundedSemaphore(MAX_REQUESTS)
        self._address = address
        self._names = {name.lower() for name in (address, *hosts)}
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            super().__init__((address, port), _Handler)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"{address}, port {port}: {shorten(error)}; try another --port") from error
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.server_address[1]}/"

    def answers_to(self, host: str) -> bool:
        """Return True if a Host header names this server.

        A page of another site can make a browser send requests here, but only under that site's name, never under an
        address. So a server that listens on all addresses accepts any address.
        """
        name = host_name(host)
        listens = as_address(self._address)
        everywhere = listens is not None and listens.is_unspecified
        return is_loopback(name) or name in self._names or (everywhere and as_address(name) is not None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request failed", exc_info=True)  # usually because the browser has closed the connection


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET and HEAD. Other methods are refused, because nothing can be changed here."""

    server: Server
    server_version, sys_version = "sunspot", ""
    default_request_version = "HTTP/1.0"  # so that answers to malformed requests have headers, too

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
        for name, value in HEADERS.items():  # refusals need them, too
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
