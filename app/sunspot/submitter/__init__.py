"""The verbs of `sunspot`, for a laptop, CI or in a GitOps pipeline; they know nothing of torch or Ray."""
