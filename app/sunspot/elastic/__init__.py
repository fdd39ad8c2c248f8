"""Nodes that come and go: notices, losses, hung ranks and room to scale up, what each leads to, and its receipt.

Where workers outlive each other, a loss, from the last packet of a process to the step that the others take:

 1. membership_channel.MembershipServer   notices it, and tells the others that their group (a generation) is closed
 2. parallel.process_group.ProcessGroups  ends the collectives of each: the step that cannot end raises an error
 3. train.survivor.Survivor.leave         puts back the state as it was before that step (train.undo.StepUndo)
 4. membership.Membership.decide          names the next group's members, once all that live stand -> Survivor.form
 5. claim.agree_on_start                  finds out who has the newest state, and claims an attempt from it
 6. restore.hand_over                     gives that state to who lacks it; the step is taken again
 7. receipts.make_receipt                 says what that cost (train.reporter.Reporter.took_step)

With a notice, `MembershipServer.drain` asks for another group, and `Worker.finish_step` raises RegroupError in place
of 1 and 2; so it does when another worker is ready to join. One that cannot train ends alone:
train.replacement.end_replacement. The server hears of members by member_connections.MemberListener.

A restart of all of them, from the notice to the first step of the new worker group:

 1. kubelet                               sends SIGTERM to the node's pods, and kills them `notice_s` (profile) later
 2. ray start                             marks the node as draining, for RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
 3. supervisor.Supervisor.tick            reads ray_internals.nodes.draining_nodes twice a second -> NodeMonitor.check
 4. control.ControlChannel.restart_group  notes the incident, and sets Command.restart with its deadline
 5. control.CommandPoller.poll            brings the command to rank 0, after a step (train.worker.Worker.wanted)
 6. parallel.decisions.StepDecisionBroadcast.agree  brings it to all ranks (train.worker.Worker.finish_step)
 7. checkpoint.CheckpointManager.save     copies the state to shared memory, and begins to commit it to storage
 8. checkpoint.CheckpointManager.drain    waits for that commit, but no longer than a second before the deadline
 9. train.worker.Worker.restart_group     raises GroupRestartError and exits: the node is idle, and ends
10. Ray Train                             starts a group on ray_internals.nodes.staying_nodes -> train.joining.Joining
11. claim.agree_on_start                  finds the newest state in memory or storage, and claims an attempt from it
12. restore.load_start                    gives that state to every rank; train.loop.train_loop takes the first step
13. receipts.make_receipt                 says what the restart cost (train.reporter.Reporter.took_step)

Scaling up, and moving to better nodes, differ in step 3: NodeMonitor finds them. Without a notice, a restart begins at
step 10, after `nodes.find_lost` and `receipts.FailureRecorder` have noted the loss, or `watchdog.Watchdog` has
ended a hung rank. When the head is told to go, step 4 is `control.ControlChannel.request_save`: the workers save, and
train on until the head takes them with it and a new driver begins.
"""
