"""What a run shows while it trains: its metrics, progress on the terminal, what it prints, and Prometheus metrics."""
