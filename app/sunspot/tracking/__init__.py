"""Delivers a run's parameters, metrics, report and best model to the service in SUNSPOT_TRACKING.

The driver starts a separate process for this (process.py), so training never waits for the service. That process reads
the run's history from storage, sends new records (delivery.py) to the service (service.py), and stores its progress in
the run. If the service is still unreachable when the run ends, `python -m sunspot.tracking RUN` delivers the
remaining records later.
"""
