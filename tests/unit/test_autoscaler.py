"""Tests of a rendered job's groups with the scheduler of Ray's autoscaler."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _generate_available_node_types_from_ray_cr_spec
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ClusterResourceConstraint, NodeState, NodeStatus
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

from sunspot.submitter.manifest.pods import AUTOSCALER
from sunspot.submitter.manifest.render import Rendered
from tests.harness.manifests import render

SPOT, PAID = "workers", "workers-2"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    path: Path = tmp_path_factory.mktemp("profile") / "mine.yaml"
    path.write_text("extends: gke-spot\nsettings: {NUM_WORKERS: 2..4}\nworkers: [{}, {spot: false, max: 3}]")
    return render(str(path), {})


class Autoscaler:
    def __init__(self, job: Rendered) -> None:
        types = _generate_available_node_types_from_ray_cr_spec(job.manifest["spec"]["rayClusterSpec"])
        self.types = {
            name: NodeTypeConfig(name, found["min_workers"], found["max_workers"], resources=found["resources"])
            for name, found in types.items()
        }
        self.per_worker = job.settings.resources_per_worker
        self.instances: list[AutoscalerInstance] = []

    def add(self, group: str, count: int, status: int = Instance.RAY_RUNNING, idle_s: float = 0) -> None:
        """Add pods, which either run (with a worker, unless they are idle) or are still pending (ALLOCATED)."""
        total = self.types[group].resources
        for _ in range(count):
            name = f"{group}/{len(self.instances)}"
            node = NodeState(
                node_id=name.encode(),
                ray_node_type_name=group,
                total_resources=total,
                available_resources=total if idle_s else {},
                status=NodeStatus.IDLE if idle_s else NodeStatus.RUNNING,
                idle_duration_ms=int(idle_s * 1000),
            )
            pod = Instance(
                instance_id=name, instance_type=group, status=status, node_id=name, node_kind=NodeKind.WORKER
            )
            running = status == Instance.RAY_RUNNING
            self.instances.append(
                AutoscalerInstance(im_instance=pod, ray_node=node if running else None, cloud_instance_id=name)
            )

    def decide(self, **asked: int) -> tuple[dict[str, int], list[str]]:
        """Return the pods to create, and the groups of the pods to end, given the number of workers requested from each
        group.
        """
        bundles = [
            ResourceRequestUtil.make({**self.per_worker, group: 1.0})
            for group, workers in zip((SPOT, PAID), asked.values(), strict=True)
            for _ in range(workers)
        ]
        constraint = ClusterResourceConstraint(resource_requests=ResourceRequestUtil.group_by_count(bundles))
        reply = ResourceDemandScheduler().schedule(
            SchedulingRequest(
                disable_launch_config_check=True,
                node_type_configs=self.types,
                cluster_resource_constraints=[constraint],
                current_instances=self.instances,
                idle_timeout_s=AUTOSCALER["idleTimeoutSeconds"],
            )
        )
        assert not reply.infeasible_cluster_resource_constraints
        made = {request.instance_type: request.count for request in reply.to_launch}
        return made, [request.instance_type for request in reply.to_terminate]


def test_pods_of_one_group_are_requested_while_pods_of_another_group_are_pending(job: Rendered) -> None:
    autoscaler = Autoscaler(job)
    assert autoscaler.decide(spot=4, paid=0) == ({SPOT: 4}, [])
    autoscaler.add(SPOT, 4, Instance.ALLOCATED)
    assert autoscaler.decide(spot=4, paid=0) == ({}, [])
    assert autoscaler.decide(spot=4, paid=3) == ({PAID: 3}, [])
    autoscaler.add(PAID, 3)
    assert autoscaler.decide(spot=4, paid=3) == ({}, [])


def test_idle_pods_that_are_no_longer_requested_are_removed(job: Rendered) -> None:
    autoscaler = Autoscaler(job)
    autoscaler.add(SPOT, 4)
    autoscaler.add(PAID, 2)
    autoscaler.add(PAID, 1, idle_s=AUTOSCALER["idleTimeoutSeconds"] + 1)
    assert autoscaler.decide(spot=4, paid=3) == ({}, []), "the idle pod is still requested"
    assert autoscaler.decide(spot=4, paid=0) == ({}, [PAID]), "the other pods still have workers"
