"""Explains why a run that has begun is slow or stuck, has failed, or uses more and more memory.

The explanations are based on the run's files in storage. All functions are pure.
"""
