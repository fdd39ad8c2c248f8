"""Trains a plan: from the driver of one start, through its worker groups, to each step.

In the order in which things happen:

1. `driver.train_run` runs in the driver. It finds the newest checkpoint, plans the training, and records the outcome.
2. `trainer.fit` starts one of Ray's trainers after another (`group.train_group`), until the run ends or fails. Before
   each, `group.open_context` checks that all nodes reach the storage (`probe`), and leaves out nodes whose GPUs cannot
   compute (`broken_gpus`). `group_outcome.next_start` decides whether another trainer follows.
3. `loop.train_loop` runs in each worker process that Ray Train has started. A process may outlive its groups (a
   `survivor.Survivor`). Then the loop trains in one group after another.
4. `joining.Joining` makes the process a worker of the run. It forms a group, claims the run with it
   (`elastic.claim.agree_on_start`), and builds the worker from the state that the group starts from.
5. `build.build_worker` builds the `learner.Learner` (model, optimizer and rows), the checkpoint manager, and on rank 0
   the `reporter.Reporter`.
6. `loop.take_step` takes each step through `run.TrainingRun`. A task may bring its own loop, and the adapter of a
   library may run the library's loop (`sunspot.adapters`).
7. `worker.Worker` ends each step (`finish_step`), and then saves, evaluates, reports, stops or restarts.
   `Worker.wait_before_change` keeps parameters unchanged until the copy of the previous state is complete.
8. If a worker is lost, the others leave the broken step: `undo.StepUndo` takes it back, `Survivor.leave` keeps the
   state, and the loop joins the next group. `replacement.end_replacement` ends a replacement that cannot train.

Beside this path, `task_check` runs a task's first steps for `sunspot check`, and `pod_probe` checks the GPUs (`gpu`)
and the network (`all_reduce`) from inside a pod for `sunspot doctor`.
"""
