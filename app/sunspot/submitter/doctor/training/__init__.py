"""Explains why a run that has begun is slow, stuck, growing in memory or failed, from its files in storage.

All functions are pure.
"""
