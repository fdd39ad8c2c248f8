"""A search over settings. Each trial is a run, and the search keeps the best trial's checkpoint.

`python -m sunspot.tune` takes these steps:

1. `search.main` reads the search space, and begins or resumes the search's own run.
2. `trials.await_nodes` waits for nodes, and divides their resources among the trials.
3. `trials.run_trials` trains the trials with Ray Tune. Tune's ASHA scheduler stops bad trials early. Their runs are
   stopped as if by a user, and keep their checkpoints.
4. `promotion.promote` copies the best trial's checkpoint into the search's run.
5. `search.RunningSearch.publish_results` prints the results and writes the report.
"""
