"""Collective operations of all workers.

`process_group` forms torch's process groups in survivor mode, and aborts them if a worker is lost. `replica_groups`
forms a group of the workers in each replica, and a group of the workers with each shard (hsdp). `step_barrier` makes
sure that the shards of all workers belong to the same step. `sum_guard` keeps an aborted group's sums out of the
parameters. `collectives` lets all workers agree, wait for each other, or compare values. `mesh` tells torch which shard
a worker holds. `sharding` moves the model to each worker (ddp), or divides its tensors among the workers (fsdp).
`recompute` computes activations again in the backward pass, instead of keeping them. `gradients` averages gradients
once per optimizer step. `data_parallel` contains the wrapper that `gradients` uses under ddp. `decisions` sends rank
0's decisions after a step to all workers. `nccl_log` finds out which network NCCL uses. `transfers` sends tensors from
worker to worker.
"""
