"""The owner of a run: the RayJob or process that trains it.

A RayJob's name is unique only within a namespace, and only until the job is deleted and created again. An owner
therefore also has a cluster, a namespace and a submission. Attempts and statuses store an owner as
`JOB#SUBMISSION@NAMESPACE/CLUSTER/PLACE`, without the parts that are not known. The place is a name in the user's
profile, and is empty if the profile has no places.
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
    place: str = ""
    "The name of the cluster or group of nodes in the profile's `places`."

    @classmethod
    def parse(cls, text: str) -> "Owner":
        """Parse an owner's text form (`str(owner)`), which attempts and statuses contain."""
        name, _, location = text.partition("@")
        job, _, submission = name.partition("#")
        namespace, _, rest = location.partition("/")
        cluster, _, place = rest.partition("/")
        return cls(job, submission, namespace, cluster, place)

    def __str__(self) -> str:
        submission = f"#{self.submission}" if self.submission else ""
        place = f"/{self.place}" if self.place else ""
        cluster = f"/{self.cluster}" if self.cluster or place else ""
        location = f"@{self.namespace}{cluster}{place}" if self.namespace or cluster else ""
        return f"{self.job}{submission}{location}"

    @property
    def location(self) -> str:
        """The place, namespace and cluster as readable text, or an empty string if none of them is known."""
        parts = [f"namespace {self.namespace}"] if self.namespace else []
        within = " of ".join([*parts, f"cluster {self.cluster}"] if self.cluster else parts)
        return f"{self.place} ({within})" if self.place and within else self.place or within

    def describe(self) -> str:
        """Return the job, place, namespace and cluster as readable text."""
        return f"{self.job} in {self.location}" if self.location else self.job

    def record(self) -> dict[str, str]:
        """Return the cluster, namespace, job and (if it is known) the place as fields for a JSON document."""
        place = {"place": self.place} if self.place else {}
        return {"cluster": self.cluster, "namespace": self.namespace, "job": self.job, **place}


def new_submission(job_id: str) -> str:
    """Return a JOB_ID that is unique to a new submission of a job. Only its submission part differs from `job_id`."""
    return str(Owner.parse(job_id)._replace(submission=uuid.uuid4().hex[:8]))


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
    """Return a digest of a Kubernetes cluster's CA certificates, which serves as the cluster's ID.

    Returns an empty string if there are no certificates.

    `certificates` is the content of `ca.crt` in the ConfigMap `kube-root-ca.crt`, which exists in every namespace.
    """
    content = certificates.strip()
    return hashlib.sha256(content.encode()).hexdigest()[:CLUSTER_DIGITS] if content else ""
