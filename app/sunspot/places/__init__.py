"""Chooses the place where a run trains. A place is a cluster, or a group of nodes in a cluster.

1. `experience.Experience` remembers what share of a run's nodes a place provided, and gradually forgets it.
2. `choice.choose_place` compares the places' prices and experiences with the run's deadline and budget.

Nothing here reads a clock, a cluster or storage, so `python -m scripts.spot_places` can run the same code on recorded
traces of spot capacity.
"""

from sunspot.places.choice import Choice, Goal, Move, Offer, Situation, choose_place
from sunspot.places.experience import Experience, Sighting, learn

__all__ = ["Choice", "Experience", "Goal", "Move", "Offer", "Sighting", "Situation", "choose_place", "learn"]
