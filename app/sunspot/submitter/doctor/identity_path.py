"""Which way the network policy leaves open to the credentials that a cloud gives to pods."""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.storage.prove import Check, Result
from sunspot.submitter.cluster.api import Cluster
from sunspot.submitter.manifest.pods import head_group, ray_container
from sunspot.submitter.manifest.render import Rendered

POLICY = "to-workload-identity"
"""The policy of k8s/base that lets pods reach the servers of credentials."""

DATAPLANE_V2 = "k8s-app=cilium"
"""The label of the pods by which GKE's Dataplane V2 is known."""


@dataclass(frozen=True)
class Way:
    """A server that gives credentials to pods."""

    name: str
    address: str
    port: int
    overlay: str
    "What of k8s/ opens it."


GKE = Way("GKE's Workload Identity", "169.254.169.252", 988, "base")
GKE_V2 = Way("Workload Identity under GKE's Dataplane V2", "169.254.169.254", 80, "base-gke")
EKS = Way("EKS Pod Identity", "169.254.170.23", 80, "base")
EKS_IPV6 = Way("EKS Pod Identity over IPv6", "fd00:ec2::23", 80, "base-eks")


def check_identity(cluster: Cluster, rendered: Rendered) -> Iterator[Check]:
    """Check that pods reach the credentials of their cloud, if they have no Secret with others."""
    if ray_container(head_group(rendered.manifest)).get("envFrom"):
        return
    policy = cluster.find("NetworkPolicy", POLICY)
    nodes = cluster.list_all("nodes")
    if not policy or not nodes:
        return
    provider = nodes[0].get("spec", {}).get("providerID", "").partition(":")[0]
    if provider == "gce":
        way = GKE_V2 if cluster.list_all("all pods", DATAPLANE_V2) else GKE
    elif provider == "aws":
        own = [entry["address"] for entry in nodes[0]["status"].get("addresses", ()) if entry["type"] == "InternalIP"]
        way = EKS_IPV6 if any(":" in address for address in own) else EKS
    elif provider == "azure":
        yield Check("identity", Result.OK, "Azure's Workload Identity goes over port 443, which is open")
        return
    else:
        return
    seen = f"{way.name} is at {way.address}, port {way.port}"
    if any(_leads(rule, way) for rule in policy["spec"].get("egress", ())):
        yield Check("identity", Result.OK, f"{seen}, which {POLICY} leaves open")
    else:
        seen += f", which {POLICY} does not open: where policies are enforced, pods get no credentials"
        yield Check("identity", Result.WARNING, seen, f"`kubectl apply -k k8s/{way.overlay}` opens it")


def _leads(rule: Mapping[str, Any], way: Way) -> bool:
    """Whether a rule of egress lets pods reach it."""
    blocks = [ipaddress.ip_network(peer["ipBlock"]["cidr"]) for peer in rule.get("to", ()) if "ipBlock" in peer]
    ports = [port.get("port") for port in rule.get("ports", ())]
    return any(ipaddress.ip_address(way.address) in block for block in blocks) and way.port in ports
