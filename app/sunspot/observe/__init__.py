"""Everything that a run shows while it trains.

`metrics` reduces the numbers of all workers over a window of steps to one record of the metric history. `ranks` writes
the numbers of each rank, and combines old ones. `progress` shows the records and the progress on the driver's terminal.
`prometheus` exports each rank's metrics, and on rank 0 those of the whole run.
"""
