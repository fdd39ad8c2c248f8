"""Reports a run's metrics and progress while it trains.

`metrics` reduces all workers' numbers over a window of steps to one record of the metric history. `ranks` writes each
rank's numbers, and combines old records. `progress` shows records and progress on the driver's terminal. `prometheus`
exports each rank's metrics, and on rank 0 those of the whole run.
"""
