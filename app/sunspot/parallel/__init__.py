"""Collective operations of all workers, in the order in which training needs them.

`process_group` forms the groups of torch in survivor mode, and breaks them after a loss. `collectives` lets all workers
agree, wait for each other, or compare. `sharding` moves the whole model to each worker (ddp), or cuts each of its
tensors into parts (fsdp). `gradients` averages gradients over the workers once per optimizer step, under ddp with the
model in `data_parallel`. After a step, `decisions` brings what rank 0 decided to all workers. `nccl_log` reads which
network NCCL uses.
"""
