"""Serves a site by HTTP, for reading alone."""

import hashlib
import ipaddress
import logging
import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from sunspot.errors import SettingsError, shorten
from sunspot.ui.site import Answer, Site

log = logging.getLogger(__name__)

MAX_REQUESTS = 32
"""Requests that are answered at once; others are refused."""

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""A browser may only load what this server has, whatever text a run contains. (A confusion matrix has styles.)"""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Server(socketserver.ThreadingTCPServer):
    """Serves a site by HTTP, a thread for each request, and so many at once."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: str, port: int, site: Site) -> None:
        """Listen; raises `SettingsError` when that cannot be."""
        self.site = site
        self.loopback = _is_loopback(address)
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            super().__init__((address, port), _Handler)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"{address}, port {port}: {shorten(error)}; try another --port") from error
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request failed", exc_info=True)  # most often, the browser has gone


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; anything else is refused, as nothing here can be changed."""

    server: Server
    timeout = 15
    server_version, sys_version = "sunspot", ""

    def do_GET(self) -> None:
        answer = self._make()
        tag = f'"{hashlib.sha256(answer.body).hexdigest()[:32]}"'
        same = answer.status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else answer.status)
        for name, value in {**HEADERS, "ETag": tag, "Content-Type": answer.kind}.items():
            self.send_header(name, value)
        if not same:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if not same and self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def _make(self) -> Answer:
        try:
            if self.server.loopback and not _is_loopback(_host_in(self.headers.get("Host", ""))):
                return Answer(b"this is for this machine alone\n", HTTPStatus.FORBIDDEN, "text/plain")
            return self.server.site.answer(self.path)
        except Exception as error:
            log.exception("%s failed", self.path)
            return Answer(f"{shorten(error)}\n".encode(), HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _host_in(place: str) -> str:
    """Return the name before the port. A page of another site may reach this machine by a name of its own."""
    try:
        return urlsplit(f"//{place}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
