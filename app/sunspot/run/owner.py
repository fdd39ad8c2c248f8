"""Owners of runs: who trains a run, told apart from everybody else, and where that is.

A RayJob's name is unique only in one namespace of one cluster, and only until it is deleted and created again. So an
owner has the namespace, the cluster and the submission, too. As text, which is what attempts and statuses record, it
is `JOB#SUBMISSION@NAMESPACE/CLUSTER`; parts that are not known are left out.
"""

import hashlib
import os
import re
import socket
import uuid
from pathlib import Path
from typing import NamedTuple

CERTIFICATES = Path("/etc/sunspot/cluster-ca.crt")
"""The file in which a pod has the ConfigMap `kube-root-ca.crt` (k8s/rayjob.yaml), if its namespace has one."""

POD_NAMESPACE = "POD_NAMESPACE"
"""The environment variable that holds a pod's namespace (k8s/rayjob.yaml)."""

CLUSTER_DIGITS = 10
"""Hexadecimal digits of a cluster's identity: for a thousand clusters, two share one with a probability below 10^-6."""

COUNTED = re.compile("[0-9]{1,7}")
"""The submission in an owner that an earlier version recorded: how often the job had been submitted."""


class Owner(NamedTuple):
    """A RayJob that trains a run, or a process that no cluster started (then `job` alone is known)."""

    job: str
    submission: str = ""
    "Unique to each time that `sunspot submit` applied the job; empty if something else applied it."
    namespace: str = ""
    cluster: str = ""
    "The identity of the Kubernetes cluster (`cluster_identity`)."

    @classmethod
    def parse(cls, text: str) -> "Owner":
        """Return the owner that attempts and statuses record as this text."""
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
        """The namespace and the cluster, for people; empty if neither is known."""
        parts = [f"namespace {self.namespace}"] if self.namespace else []
        return " of ".join([*parts, f"cluster {self.cluster}"] if self.cluster else parts)

    def describe(self) -> str:
        """Return the job and where it is, for people."""
        return f"{self.job} in {self.place}" if self.place else self.job

    def record(self) -> dict[str, str]:
        """Return where the run lives, by the names of the JSON documents."""
        return {"cluster": self.cluster, "namespace": self.namespace, "job": self.job}


def new_submission(job: str) -> str:
    """Return the job's identity (the setting JOB_ID) for a new submission: no other submission has the same."""
    return str(Owner(job, uuid.uuid4().hex[:8]))


def new_owner(job_id: str) -> str:
    """Return the owner that a driver claims for: its RayJob, in the cluster of this pod, or else this process.

    `job_id` is the setting. Every retry of a RayJob returns the same.
    """
    if not job_id:
        return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        certificates = CERTIFICATES.read_text(errors="replace")
    except OSError:  # optional in the manifest, and not there outside of a cluster
        certificates = ""
    namespace = os.environ.get(POD_NAMESPACE, "")
    return str(Owner.parse(job_id)._replace(namespace=namespace, cluster=cluster_identity(certificates)))


def cluster_identity(certificates: str) -> str:
    """Return what tells one Kubernetes cluster from another: a digest of the certificates that its namespaces have.

    `certificates` is the content of `ca.crt` in the ConfigMap `kube-root-ca.crt`. Returns an empty text without any.
    """
    content = certificates.strip()
    return hashlib.sha256(content.encode()).hexdigest()[:CLUSTER_DIGITS] if content else ""
