"""Why a run is pending, slow, stuck or failed, and whether a cluster and a bucket are ready for one."""
