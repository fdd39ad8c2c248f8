"""`sunspot ui`: serves a live page of all runs, from storage alone."""

import argparse
import contextlib

from sunspot.local_http import host_name
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
        help="address to listen on; default: 127.0.0.1, for this machine alone",
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        type=_host,
        action="append",
        default=[],
        help="another host name by which browsers reach the page, such as that of an ingress; repeatable",
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
        raise argparse.ArgumentTypeError(f"{text}: give a port from 0 to 65535")
    return int(text)


def _host(text: str) -> str:
    if host_name(text) != text.lower():
        raise argparse.ArgumentTypeError(f"{text}: give the name of a host, without a scheme or a port")
    return text


def run(args: argparse.Namespace) -> None:
    """Serve the pages until Ctrl-C, and print their URL. Raises `SettingsError` if the port is taken."""
    storage = find_storage(args.storage)
    pages = PageProcess(storage.locate("").rstrip("/") or "/")
    with contextlib.closing(pages), Server(args.address, args.port, Site(storage, pages.read), args.host) as server:
        if args.json:
            print_json_line({"url": server.url, "storage": storage.locate("")})
        else:
            print_text(f"{server.url} shows the runs in {storage.locate('')}; Ctrl-C ends it", flush=True)
        if not server.loopback:
            warn(f"everyone who can reach {server.url} sees all runs, settings and logs; put a login in front of it")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
