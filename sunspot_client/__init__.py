"""Runs from a Python program or a notebook, by the functions behind the verbs of `sunspot`.

    run = submit("digits", profile="gke-spot", settings={"EPOCHS": 3})
    run.wait()
    run.metrics().to_pandas().plot(x="step", y="loss")

What a verb says while it works is printed here too; a mistake raises an error of app/errors.py with its one message.
"""

from sunspot_client.run import Run, submit

__all__ = ["Run", "submit"]
