"""Survives preempted nodes, lost workers and hung ranks, and adds workers when there is room for more.

There are two modes; `plan.can_outlive` chooses one for a run. In survivor mode, a loss does not stop the other
workers. They repeat the interrupted step without the lost worker, unless the step was complete. Ray replaces only the
lost process. Survivor mode needs LOADER=torch and a single node group, and the task must use Sunspot's training loop or
define `train(run)`. SURVIVORS=off disables survivor mode. In restart mode, a loss ends the whole worker group, and Ray
Train starts a new group from the newest state.

Who decides that a worker is lost
---------------------------------
In survivor mode, membership_channel.MembershipServer.declare_lost decides, in the driver. Each worker has a connection
to the server, and member_connections.MemberConnections serves all connections in one thread. A worker counts as lost
at once if its connection ends because the process has exited. The worker counts as lost after MACHINE_LIMIT_S (1 s) if
the kernel of its machine no longer acknowledges packets, and after PROCESS_LIMIT_S (10 s) if its process sends no
heartbeat. A worker may be silent for longer while it does something that can take any time, such as building its model
(`Watchdog.paused`).
Ray notices the loss later than the server. failures.FailureJudge then counts the loss against MAX_FAILURES, and Ray
replaces the process.

In restart mode, Ray Train's controller decides. A worker counts as lost if its actor has died or does not answer a
health check. Ray then calls failure_callback.FailureCallback, which asks failures.FailureJudge whether another group
starts. The judge treats the errors in ray_internals.controller.LOST as the loss of a worker, and any other error as one
that the worker raised itself.

Several observers report each loss. merged_incidents.Incidents merges their reports into one incident.

In both modes, watchdog.Watchdog terminates its own process if the process takes no step for HANG_TIMEOUT_S. The process
then counts as lost. Three more functions handle lost nodes or workers, but do not decide whether a worker is lost.
nodes.find_lost only reports that a node is gone, so that the receipt can name the cause of the loss.
ray_internals.nodes.reachable_nodes chooses nodes for new workers. In survivor mode, ray_internals.controller.end_lost
shuts down dead and unresponsive workers that Ray is about to replace. A worker that has not answered Ray for LIVING_S
(10 minutes) is also shut down, even if the server considers it alive.

A loss in survivor mode, from the last packet of a process to the next step
---------------------------------------------------------------------------
These functions and classes take part. Step 3 often begins before steps 1 and 2, because the kernel closes the
connections of a killed process at once, and gloo then raises an error. After such an error, `Survivor.outlives` waits
up to CLOSED_WITHIN_S (3 s) for the message of step 2. In a run on GPUs, gloo can raise this error, too, because
decisions and the exchange of row IDs (AUDIT) always use gloo.

 1. membership_channel.MembershipServer   declares the process lost (`declare_lost`, called by MemberConnections),
                                          reports the loss for its receipt (`_note_loss`), and tells the other members
                                          of its group that this group has ended. A group is also called a generation
 2. membership_channel.MembershipClient   receives this message in each member, and aborts the collectives of the
                                          member's process, so that no step hangs (`ProcessGroups.abort_collectives`).
                                          Gloo's collectives then raise an error. NCCL's collectives return without an
                                          error, but with wrong sums
 3. train.loop.train_in_group             catches the error that ends the step. The error comes from a gloo collective,
                                          from `StepGuard` if NCCL's sums were aborted, or from `Worker` if the worker
                                          sees that its group has ended. The hooks on the model are removed
                                          (`TrainingRun.close`), a thread starts writing the group's remaining logs,
                                          metrics and status (`Survivor.write_outputs`), and the group's other threads
                                          end (`Joining`). `train_in_groups` then abandons the group, and joins the next
                                          one
 4. train.survivor.Survivor               decides whether the process can join another group after this error
                                          (`outlives`), before the threads of step 3 end. If it cannot, it tells the
                                          server that no other group follows (`end`). Otherwise, it keeps the learner
                                          for that group (`abandon_group`). Commits of checkpoints that have not begun
                                          are dropped, and the others continue (`CheckpointManager.leave_group`)
 5. train.step_guard.StepGuard            decides whether the abandoned step counts. It counts if `Worker.finish_step`
                                          has accepted it, unless the GPU has cancelled it because the step's sums
                                          were aborted. train.undo.StepUndo then restores the state as of the newest
                                          step that counts. If StepUndo cannot restore it, the process keeps no state,
                                          and gets another worker's. If no worker has the state, all return to the
                                          newest copy or checkpoint. Under hsdp, a worker that waits for the others
                                          before its optimizer's step asks the server whether to take this step
                                          (parallel.step_barrier.StepBarrier). On a CPU, under ddp, each accepted step
                                          counts at once, before the rest of `finish_step`. "One step" in
                                          the docstring of sunspot.train says what StepUndo copies
 6. train.joining.Joining                 makes the process a worker of the next group. Its methods `form`, `claim` and
                                          `build` lead to steps 7, 8 and 9. Each group has its own attempt, Worker,
                                          CheckpointManager, watchdog and log
 7. membership.Membership                 decides that the group forms (`decide`) once all living members have asked to
                                          join it, and SETTLE_S (50 ms) after the newest request or loss. Members keep
                                          their order, and new processes get the ranks after them. They ask in
                                          `Survivor.form`, and parallel.process_group.ProcessGroups connects them.
                                          Membership also decides in step 1 that a group has ended
 8. claim.agree_on_start                  finds out which ranks have the newest state (`choose_live`), and claims an
                                          attempt that starts from it (`claim_in_place`). Storage accepts only one claim
                                          of each attempt (run.attempts.claim_next). The attempt counts once its start
                                          is recorded
 9. train.survivor.Survivor               sends that state to the ranks that lack it (`continue_from`, `hand_over`),
                                          gives the learner its place in the group and discards its gradients
                                          (`Learner.move`), loads a received state, and compares all ranks' parameters.
                                          If they are equal, train.joining.build_worker makes the worker, and the loop
                                          takes the next step, or repeats the interrupted step or evaluation (at most
                                          EVALUATION_TRIES times). If the parameters differ, all ranks form another
                                          group, which returns to the newest copy or checkpoint

The receipt of the loss begins in step 1: control.ControlChannel.add_loss passes the loss to merged_incidents.Incidents.
In step 9, rank 0 gets the merged incident (train.reporter.Reporter.announce, control.ControlChannel.begin_group). After
the group's first step, receipts.OpenIncident makes the receipt (train.reporter.Reporter.took_step). If the group first
repeats an evaluation, the receipt is made after the evaluation (train.reporter.Reporter.add_evaluation).

If a node is preempted with a notice, a node is sick (sick_nodes.SickNodes), another worker is ready to join, or a user
wants fewer workers (wanted_workers.WantedWorkers), steps 1 and 2 do not happen. Instead, the membership server asks for
a change between two steps, and `Worker.finish_step` raises RegroupError. Step 3 follows. If a replacement cannot train,
only its own process exits (train.replacement.end_replacement).

These types describe the state on its way to the next group:

- copies.LiveState names the state that one survivor has. train.survivor.StateMetadata contains the state's
  metrics and consumed rows. The tensors stay in the learner.
- copies.SurvivingState names the newest of these states, and the ranks that have it.
- claim.StartPoint is what the next group starts from: a SurvivingState, a copy in memory, a checkpoint, or nothing.
- restore.TrainingState is the loaded or received state. It contains no tensors on a rank that already has them.

A restart of the whole group, from the notice to the first step of the new group
--------------------------------------------------------------------------------
 1. kubelet                               sends SIGTERM to the node's pods, and kills them `notice_s` (profile) later
 2. ray start                             marks the node as draining, for RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
 3. supervisor.Supervisor.tick            reads ray_internals.nodes.draining_nodes twice a second -> NodeMonitor.check
 4. control.ControlChannel.restart_group  records the incident, and sets Command.restart with its deadline
 5. control.CommandPoller.poll            passes the command to rank 0, after a step (`Worker.choose_actions`)
 6. parallel.decisions.StepDecisionBroadcast.agree  passes it to all ranks (train.worker.Worker.finish_step)
 7. checkpoint.CheckpointManager.save     copies the state to shared memory, and starts committing it to storage
 8. checkpoint.CheckpointManager.drain    waits for that commit, until one second before the deadline at the latest
 9. train.worker.Worker.restart_group     raises GroupRestartError and exits, so that the idle node can shut down
10. Ray Train                             starts a group on ray_internals.nodes.staying_nodes -> train.joining.Joining
11. claim.agree_on_start                  finds the newest state in memory or storage, and claims an attempt from it
12. restore.load_start                    loads that state on every rank; train.loop.train_loop takes the first step
13. receipts.OpenIncident                 makes a receipt of the restart (train.reporter.Reporter.took_step)

If the run scales up or moves to better nodes, steps 1 and 2 are skipped, and NodeMonitor finds the new nodes in step 3.
A loss in restart mode begins with step 10. If the head node is preempted, step 4 is
`control.ControlChannel.request_save`: the workers save, and keep training until the head is gone. A new driver then
continues the run.
"""
