"""Delivers a run's parameters, metrics, report and best model to the service that SUNSPOT_TRACKING names.

The run's history in storage is the truth. A process beside the driver (process.py), which training never waits for,
reads it, sends what the service (service.py) does not have yet (delivery.py), and records its progress in the run.
`python -m sunspot.tracking RUN` does the same later, if the service was away until the end.
"""
