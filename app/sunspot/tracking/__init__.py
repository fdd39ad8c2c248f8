"""Delivers a run's parameters, metrics, report and best model to the service that SUNSPOT_TRACKING names.

The driver starts a separate process (process.py), and training never waits for it. This process reads the run's history
from storage, sends the records that the service (service.py) does not have yet (delivery.py), and writes its progress
to the run. If the service is unreachable until the end, `python -m sunspot.tracking RUN` delivers the rest later.
"""
