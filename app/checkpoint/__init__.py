"""The training state, copied to shared memory and committed to storage behind the training."""
