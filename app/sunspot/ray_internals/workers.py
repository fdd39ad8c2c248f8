"""A worker's process as Ray starts it: its command line, its environment, and the IDs that it draws.

sys.argv of a worker                       when Ray launched it, and on which node: the public API tells of actors and
                                           tasks, when the process has begun and imported Ray
RAY_RAYLET_PID in a worker's environment   Ray's process on the node, without which there are no workers
ray.actor.ActorClassID                     draws an ID for each class under @ray.remote, as its module is imported, from
                                           the generator of Ray's C++ library. That is seeded at its first use in a
                                           process, and not again after a fork: two forks would give their tasks and
                                           objects the same IDs, and one would read the other's. No public API seeds it
ray.ObjectRef.from_random                  draws from that generator: the way to see that forks differ
"""

import os
import sys

LAUNCHED_AT = "--worker-launch-time-ms="
"""Begins the argument in which Ray tells a worker when it was launched."""

NODE = "--node-id="
"""Begins the argument in which Ray tells a worker its node."""


def launch_time() -> float | None:
    """When Ray launched this worker, in seconds since the epoch; None: it does not tell."""
    given = [argument.removeprefix(LAUNCHED_AT) for argument in sys.argv if argument.startswith(LAUNCHED_AT)]
    return int(given[-1]) / 1000 if given and given[-1].isdigit() else None


def raylet_process() -> int:
    """The process without which this node has no workers."""
    return int(os.environ.get("RAY_RAYLET_PID", os.getppid()))


def draw_class_ids_apart() -> None:
    """Have Ray draw the IDs of this process's actor classes from the operating system, so that it can be forked."""
    import ray.actor

    class ClassID(ray.ActorClassID):
        @classmethod
        def from_random(cls) -> ray.ActorClassID:
            return ray.ActorClassID(os.urandom(len(ray.ActorClassID.nil().binary())))

    ray.actor.ActorClassID = ClassID


def forks_draw_alike() -> bool:
    """Return whether processes that are forked from this one would draw equal IDs."""
    import ray

    def draw() -> bytes:
        end, begin = os.pipe()
        if (child := os.fork()) == 0:
            os.write(begin, ray.ObjectRef.from_random().binary())
            os._exit(0)
        os.close(begin)
        with open(end, "rb") as drawn:
            found = drawn.read()
        os.waitpid(child, 0)
        return found

    return draw() == draw()
