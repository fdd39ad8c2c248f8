"""Why a run that has begun is slow, stuck, climbing in memory or failed: from what it left in storage. Pure."""
