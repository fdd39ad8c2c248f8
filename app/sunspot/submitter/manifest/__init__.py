"""From a profile and settings to the manifest of a RayJob, without a cluster."""
