"""What all workers do together: shard a model, average gradients, agree on what comes after a step.

Each worker has a copy of the model (ddp) or a part of each of its tensors (fsdp). Both average gradients over the
workers, once for each optimizer step.
"""
