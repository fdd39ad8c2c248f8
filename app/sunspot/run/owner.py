"""Owners of runs: the RayJob or process that trains a run.

A RayJob's name is unique only within a namespace, and only until the job is deleted and created again. An owner
therefore also has a cluster, a namespace and a submission. Attempts and statuses store it as the text
`JOB#SUBMISSION@NAMESPACE/CLUSTER`, without the parts that are not known.
"""

import hashlib
import os
import socket
import uuid
from pathlib import Path
from typing import NamedTuple

CERTIFICATES = Path("/etc/sunspot/cluster-ca.crt")
"""The path of the cluster's CA certificates in a pod, mounted from the ConfigMap `kube-root-ca.crt` if it exists."""

POD_NAMESPACE = "POD_NAMESPACE"
"""The environment variable that contains a pod's namespace (k8s/rayjob.yaml)."""

CLUSTER_DIGITS = 10
"""Number of hexadecimal digits in a cluster's ID. For 1,000 clusters, the collision probability is below 10^-6."""


class Owner(NamedTuple):
    """A RayJob that trains a run, or a process outside a cluster, for which only `job` is set."""

    job: str
    submission: str = ""
    "Digits that are unique to each `sunspot submit`. Empty if another tool applied the job."
    namespace: str = ""
    cluster: str = ""
    "The ID of the Kubernetes cluster (`cluster_identity`)."

    @classmethod
    def parse(cls, text: str) -> "Owner":
        """Parse the text that attempts and statuses store."""
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
        """The namespace and cluster as readable text, or an empty string if neither is known."""
        parts = [f"namespace {self.namespace}"] if self.namespace else []
        return " of ".join([*parts, f"cluster {self.cluster}"] if self.cluster else parts)

    def describe(self) -> str:
        """Return the job, namespace and cluster as readable text."""
        return f"{self.job} in {self.place}" if self.place else self.job

    def record(self) -> dict[str, str]:
        """Return the cluster, namespace and job as fields for a JSON document."""
        return {"cluster": self.cluster, "namespace": self.namespace, "job": self.job}


def new_submission(job: str) -> str:
    """Return a unique JOB_ID for a new submission of a job."""
    return str(Owner(job, uuid.uuid4().hex[:8]))


def new_owner(job_id: str) -> str:
    """Return this process's owner: the pod's RayJob, or the process itself if `job_id` is empty.

    `job_id` is the setting JOB_ID. All retries of a RayJob have the same owner.
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
    """Return a Kubernetes cluster's ID, a digest of its CA certificates. The ID is empty if `certificates` is.

    `certificates` is the content of `ca.crt` in the ConfigMap `kube-root-ca.crt` that every namespace has.
    """
    content = certificates.strip()
    return hashlib.sha256(content.encode()).hexdigest()[:CLUSTER_DIGITS] if content else ""
