"""`sunspot ui`: serves a live web page with all runs in storage."""

import argparse
import contextlib

from sunspot.machine.local_http import host_name
from sunspot.submitter.printing import print_json_line, print_text, warn
from sunspot.submitter.runs import find_storage
from sunspot.ui.http_server import Server
from sunspot.ui.page_process import PageProcess
from sunspot.ui.site import Site

PORT = 8321


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST",
        default="127.0.0.1",
        help="address to listen on; default: 127.0.0.1, which only this machine can reach",
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        type=_host,
        action="append",
        default=[],
        help="an additional host name for the page, such as an ingress host; this option can be repeated",
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=_port,
        default=PORT,
        help=f"port to listen on, or 0 for any free port; default: {PORT}",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be a port from 0 to 65535")
    return int(text)


def _host(text: str) -> str:
    if host_name(text) != text.lower():
        raise argparse.ArgumentTypeError(f"{text}: must be a host name without a scheme or port")
    return text


def run(args: argparse.Namespace) -> None:
    """Print the URL, and serve the pages until Ctrl-C. Raises `SettingsError` if the port is in use."""
    storage = find_storage(args.storage)
    pages = PageProcess(storage.locate("").rstrip("/") or "/")
    with contextlib.closing(pages), Server(args.address, args.port, Site(storage, pages.read), args.host) as server:
        if args.json:
            print_json_line({"url": server.url, "storage": storage.locate("")})
        else:
            print_text(f"{server.url} shows the runs in {storage.locate('')}; Ctrl-C ends it", flush=True)
        if not server.loopback:
            warn(f"anyone who can reach {server.url} sees all runs, settings and logs; put a login in front of it")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
