"""What a user runs on a laptop, in CI or in a GitOps pipeline: the command `sunspot`. Knows nothing of torch or Ray."""
