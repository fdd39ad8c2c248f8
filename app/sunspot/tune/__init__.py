"""A search over settings: each trial is a run of its own, and the best trial's checkpoint becomes the search's.

`python -m sunspot.tune` takes these steps:

1. `search.main` reads the search space, opens the search's run and takes it over, or resumes it.
2. `trials.await_nodes` waits for nodes, and divides their resources among the trials.
3. `trials.run_trials` trains the trials with Ray Tune. Its scheduler, ASHA, gives up bad trials early; their runs are
   stopped as a user would stop them, and keep their checkpoints.
4. `promotion.promote` copies the best trial's checkpoint into the search's run.
5. `search.RunningSearch.publish_results` writes the table of results and the report.
"""
