"""Trains a plan: the driver starts worker groups, and the workers of a group take the steps.

The modules are used in this order:

1. `driver.train_run` runs in the driver. It finds the newest checkpoint, plans the training, and records the outcome.
2. `trainer.fit` runs one Ray trainer after another (`group.train_group`), until the run ends or fails. Before each
   trainer, `group.open_context` checks that all nodes can use the run's storage (`probe`), and excludes nodes with
   broken GPUs (`broken_gpus`). After each trainer, `group_outcome.next_start` decides whether another one follows.
3. `loop.train_loop` runs in each worker process that Ray Train has started. If the process outlives its group
   (`survivor.Survivor`), the loop continues in the next group.
4. `joining.Joining` makes the process a worker of the run. It forms a group, claims the run together with the group
   (`elastic.claim.agree_on_start`), and builds the worker from the state that the group starts from.
5. `joining.build_worker` builds the checkpoint manager, and on rank 0 the `reporter.Reporter`. It also builds the
   `learner.Learner` (model, optimizer and rows, `build`), unless the process has kept one from an earlier group.
6. `loop.take_step` takes each step through `run.TrainingRun`. A task can have its own loop instead, and an adapter can
   use the loop of its library (`sunspot.adapters`).
7. `worker.Worker` ends each step (`finish_step`). It then saves, evaluates, reports, stops or restarts if needed.
   `Worker.wait_before_change` keeps parameters unchanged until the copy of the previous state is complete.
8. If a worker is lost, the other workers continue in the next group (`loop.train_in_groups`). `Survivor.abandon_group`
   keeps their state, `step_guard.StepGuard` decides whether the interrupted step counts, and `undo.StepUndo` undoes it
   otherwise. `sunspot.elastic` describes how a group handles a loss. `replacement.end_replacement` stops a replacement
   that cannot train.

One step, from its rows to the beginning of the next step
---------------------------------------------------------
 1. run.TrainingRun.batches        takes this worker's rows of the step from the loader (`data.order` assigns them)
 2. worker.Worker.begin_step       in survivor mode, starts exchanging the rows' IDs (AUDIT). If the model has changed
                                   since the previous step ended, StepUndo renews its copies
 3. run.TrainingRun.parts          splits the rows into parts that fit in memory (MICRO_BATCH_SIZE)
 4. loop.take_step                 runs the forward and backward pass of each part
 5. parallel.data_parallel         averages the gradients over all workers (ddp), mostly during the last backward pass.
                                   `run.clip` averages the rest, even if CLIP_NORM is 0, and clips the gradients. The
                                   statistics of batch norms differ between workers until `save` or an evaluation
                                   copies those of rank 0 to all workers
 6. worker.Worker.wait_before_change  is called by a hook of the optimizer. It waits until the previous state is copied,
                                   until the exchange of row IDs is complete, and, in survivor mode, until the
                                   gradients are complete. Under hsdp, they must be complete on all workers
                                   (`parallel.step_barrier`). Under ddp on a GPU, a fused optimizer does not wait,
                                   because the GPU cancels its step if a sum was aborted (`parallel.sum_guard`). On a
                                   CPU, the gradients are complete by then. StepUndo copies an optimizer's parameters
                                   and state if another optimizer steps later
 7. optimizer.step                 changes the parameters
 8. worker.Worker.finish_step      counts the step, or counts it one step later if the GPU could still cancel it. In
                                   survivor mode, StepUndo copies the buffers and the frozen parameters that change, so
                                   that the next step can be undone. `finish_step` gets from `parallel.decisions` what
                                   rank 0 decided after this step or the previous one: to save, copy, report, stop,
                                   restart or form a new group. After an epoch, it copies the state to memory and
                                   evaluates. It then reports, and saves if this was decided, after each epoch, and
                                   every CHECKPOINT_EVERY_STEPS steps. It raises DivergedError if the loss or weights
                                   stay infinite or NaN
 9. checkpoint.CheckpointManager.save  is called in item 8, by all workers together. It copies rank 0's buffers to all
                                   workers, and starts copying the state if a copy or a checkpoint is due, or before an
                                   evaluation

If a worker is lost in items 2 to 9, a collective raises an error on the other workers, or `Worker` raises RegroupError.
On GPUs, NCCL's collectives raise no error, so `step_guard.StepGuard` raises RegroupError if their sums were aborted.
Decisions and the exchange of row IDs (AUDIT) use gloo on GPUs, too, and can raise an error first.
`Survivor.continue_from` can also raise RegroupError while the next group starts. In survivor mode, the interrupted step
is handled as follows (`survivor.abandon_step`, `step_guard.StepGuard`):

- If the step was complete, it counts. Survivors can differ by this one step; all of them continue with the newer state.
- If it was not complete, its gradients are discarded, and none of its rows count. The parameters, optimizer states and
  buffers are those from before the step, because the optimizer had not changed them, or because StepUndo restores them.
  The next group takes the same step again, with the rows divided among its members.
- If StepUndo cannot restore them, this process gets the state from another worker. If no worker has it, or under
  PARALLEL=fsdp, all workers return to the newest copy in memory or to the newest checkpoint.

Under PARALLEL=hsdp, a worker has only its shard of the state, and gets it from a worker with the same shard. In item 6,
all workers agree that their gradients are complete, so that their shards belong to the same step.

In restart mode, all processes exit, and the next group starts from the newest copy or checkpoint (`sunspot.elastic`).

Two modules do not train: `task_check` runs a task's first steps for `sunspot check`, and `pod_probe` checks the GPUs
(`gpu`) and the network (`all_reduce`) from inside a pod for `sunspot doctor`.
"""
