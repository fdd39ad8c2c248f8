"""`sunspot dashboard`: forwards a live run's Ray dashboard to a local port, and adds the token to every request."""

import argparse
import base64
import contextlib
import threading
import time
from typing import Any

from sunspot.errors import ClusterError, NotFoundError, StorageError
from sunspot.submitter.cluster.api import Cluster, RefusedError, UnreachableError
from sunspot.submitter.cluster.observation import RunAccess, reach_run, stored_arguments
from sunspot.submitter.cluster.port_forward import LocalPort
from sunspot.submitter.cluster.views import pod_view
from sunspot.submitter.commands.arguments import add_run_and_cluster, count, run_target
from sunspot.submitter.printing import print_json_line, print_text, progress_note, warn

PORT = 8265
"""The Ray dashboard's port on the head, and the default local port."""

LOOK_EVERY_S = 3.0
"""Seconds between checks of the head."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_and_cluster(parser)
    parser.add_argument("--port", metavar="N", type=count, default=PORT, help=f"local port; default: {PORT}")


def run(args: argparse.Namespace) -> None:
    """Print the dashboard's local URL, and forward requests until Ctrl-C or until the head is gone."""
    access = reach_run(run_target(args))
    cluster = access.require_cluster()
    run = access.run
    with progress_note("looking for the head of the run"):
        head = _find_head(access, cluster)
        name = head["metadata"]["name"]
        token, token_error = _read_token(cluster, head)
        cluster.dial(name, PORT).close()  # fail now if the port cannot be forwarded
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with LocalPort(args.port, lambda: cluster.dial(name, PORT), headers) as local:
        threading.Thread(target=local.serve_forever, daemon=True).start()
        try:
            if args.json:
                print_json_line({"run": run.name, "url": local.url, "pod": name, "token_added": bool(token)})
            else:
                print_text(f"{local.url} is the Ray dashboard of {run.name} (pod {name})", flush=True)
            if token:
                warn(
                    "the dashboard's token is added to every request, so all users of this machine have access until "
                    "Ctrl-C"
                )
            if token_error:
                warn(token_error)
            _watch(access, cluster, head)
        except KeyboardInterrupt:
            warn("")
        finally:
            local.shutdown()


def _find_head(access: RunAccess, cluster: Cluster) -> dict[str, Any]:
    """Find the run's newest ready head pod."""
    run = access.run
    for job in cluster.list_jobs(run.name):
        ready = [pod for pod in cluster.list_pods([job]) if pod.head and pod.ready and not pod.deleting]
        found = cluster.find("pod", ready[0].name) if ready else None
        if found:
            return found
    snapshot = access.observe()
    access.require_known(snapshot)
    state, reason = snapshot.state()
    instead = f"`sunspot report {stored_arguments(run)}` shows what is in storage"
    raise NotFoundError(f"{run.name} has no ready head, so it has no dashboard: {state}, {reason}; {instead}")


def _read_token(cluster: Cluster, head: dict[str, Any]) -> tuple[str, str]:
    """Return the head's token, or an empty string and the reason why it cannot be read.

    Both strings are empty if the head needs no token.
    """
    environment = {entry["name"]: entry for entry in head["spec"]["containers"][0].get("env", ())}
    variable = environment.get("RAY_AUTH_TOKEN", {})
    if "value" in variable:
        return str(variable["value"]), ""
    source = variable.get("valueFrom", {}).get("secretKeyRef")
    if not source:
        return "", ""
    why = f"the Secret does not exist in namespace {cluster.namespace}"
    try:
        secret = cluster.find("Secret", source["name"])
        if secret:
            return base64.b64decode(secret["data"][source["key"]]).decode(), ""
    except (RefusedError, KeyError, ValueError) as error:
        why = str(error)
    wanted = f"{source['key']} of Secret {source['name']}"
    return "", f"the dashboard will ask for its token ({wanted}), because it cannot be read: {why}"


def _watch(access: RunAccess, cluster: Cluster, head: dict[str, Any]) -> None:
    """Watch the head until it is gone, then raise `NotFoundError`."""
    name = head["metadata"]["name"]
    away = False
    while True:
        time.sleep(LOOK_EVERY_S)
        try:
            now = cluster.find("pod", name)
        except UnreachableError as error:
            if not away:
                warn(f"still forwarding, but the API server does not answer: {error}")
            away = True
            continue
        away = False
        same = now is not None and now["metadata"].get("uid") == head["metadata"].get("uid")
        if now is None or not same or pod_view(now).deleting or now.get("status", {}).get("phase") != "Running":
            why = ""
            with contextlib.suppress(ClusterError, StorageError):
                state, reason = access.observe().state()
                why = f"; {access.run.name} is {state}, {reason}"
            raise NotFoundError(f"the head {name} is gone, and its dashboard with it{why}")
