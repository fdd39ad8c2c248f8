"""Joins a Ray cluster or starts a local Ray session for this process.

`start_errors.py` explains why Ray does not start.
"""

from sunspot.ray_session.session import (
    MAX_SOCKET_PATH_BYTES,
    RAY_ENVIRONMENT,
    cores_here,
    enter_folder,
    ray_session,
    start_local_ray,
    starts_own_session,
)

__all__ = [
    "MAX_SOCKET_PATH_BYTES",
    "RAY_ENVIRONMENT",
    "cores_here",
    "enter_folder",
    "ray_session",
    "start_local_ray",
    "starts_own_session",
]
