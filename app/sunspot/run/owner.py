"""Owners of runs: the RayJob or the process that trains a run, and the namespace and cluster that it is in.

A RayJob's name is unique only in one namespace of one cluster, and only until the job is deleted and created again. So
an owner also has the namespace, the cluster and the submission. Attempts and statuses record an owner as the text
`JOB#SUBMISSION@NAMESPACE/CLUSTER`, without the parts that are not known.
"""

import hashlib
import os
import socket
import uuid
from pathlib import Path
from typing import NamedTuple

CERTIFICATES = Path("/etc/sunspot/cluster-ca.crt")
"""The file in which a pod finds the ConfigMap `kube-root-ca.crt` (k8s/rayjob.yaml), if its namespace has one."""

POD_NAMESPACE = "POD_NAMESPACE"
"""The environment variable that holds a pod's namespace (k8s/rayjob.yaml)."""

CLUSTER_DIGITS = 10
"""Hexadecimal digits of a cluster's identity. Two of 1,000 clusters share one with a probability below 10^-6."""


class Owner(NamedTuple):
    """A RayJob that trains a run, or a process outside a cluster, of which only `job` is known."""

    job: str
    submission: str = ""
    "Digits unique to each submission by `sunspot submit`. Empty if something else applied the job."
    namespace: str = ""
    cluster: str = ""
    "Identity of the Kubernetes cluster (`cluster_identity`)."

    @classmethod
    def parse(cls, text: str) -> "Owner":
        """Parse an owner as attempts and statuses record it."""
        name, _, place = text.partition("@")
        job, _, submission = name.partition("#")
        namespace, _, cluster = place.partition("/")
        return cls(job, submission, namespace, cluster)

    def __str__(self) -> str:
        submission = f"#{self.submission}" if self.submission else ""
        cluster = f"/{self.cluster}" if self.cluster else ""
        return f"{self.job}{submission}" + (f"@{self.namespace}{cluster}" if self.namespace or cluster else "")

    @property
    def place(self) -> str:
        """The namespace and the cluster as readable text, or an empty text if neither is known."""
        parts = [f"namespace {self.namespace}"] if self.namespace else []
        return " of ".join([*parts, f"cluster {self.cluster}"] if self.cluster else parts)

    def describe(self) -> str:
        """Return the job and its place as readable text."""
        return f"{self.job} in {self.place}" if self.place else self.job

    def record(self) -> dict[str, str]:
        """Return the cluster, the namespace and the job under their names in JSON documents."""
        return {"cluster": self.cluster, "namespace": self.namespace, "job": self.job}


def new_submission(job: str) -> str:
    """Return a job's identity (the setting JOB_ID) for a new submission, which no other submission has."""
    return str(Owner(job, uuid.uuid4().hex[:8]))


def new_owner(job_id: str) -> str:
    """Return the owner for which a driver claims runs: the RayJob of this pod, or else this process.

    `job_id` is the setting JOB_ID. The owner is the same for every retry of a RayJob.
    """
    if not job_id:
        return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        certificates = CERTIFICATES.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the ConfigMap is optional, and exists only in a cluster
        certificates = ""
    namespace = os.environ.get(POD_NAMESPACE, "")
    return str(Owner.parse(job_id)._replace(namespace=namespace, cluster=cluster_identity(certificates)))


def cluster_identity(certificates: str) -> str:
    """Return the identity of a Kubernetes cluster: a digest of the CA certificates that each of its namespaces has.

    `certificates` is the content of `ca.crt` in the ConfigMap `kube-root-ca.crt`. If it is empty, so is the identity.
    """
    content = certificates.strip()
    return hashlib.sha256(content.encode()).hexdigest()[:CLUSTER_DIGITS] if content else ""
