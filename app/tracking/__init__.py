"""A run's parameters, metrics, report and best model, delivered to MLflow or Weights & Biases (SUNSPOT_TRACKING).

The run's own history in storage is the truth, and this a delivery of it, from one place: a process beside the driver
(process.py) that the training never waits for, and that ends, hangs or fails by itself. It asks storage, sends what is
not delivered yet (delivery.py) to the service (mlflow.py, wandb.py), and notes in the run how far it is; so does
`python -m app.tracking RUN` later, when the service was away until the end.
"""
