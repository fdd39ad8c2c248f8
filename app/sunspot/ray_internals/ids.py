"""IDs that Ray draws as a module is imported, after which all forks of the process would draw equal ones.

ray.actor.ActorClassID     draws an ID for each class under @ray.remote from the generator of Ray's C++ library. That is
                           seeded at its first use in a process, and not again after a fork: two forks would give their
                           tasks and objects the same IDs, and one would read the other's. No public API seeds it.
ray.ObjectRef.from_random  draws from that generator: the way to see that forks differ
"""

import os


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
