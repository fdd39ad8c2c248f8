"""What the driver gives each worker of its trainer."""

from dataclasses import dataclass

from sunspot.elastic.control import ControlClient
from sunspot.elastic.membership_channel import MembershipAddress
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.claimant import Claimant


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker needs to join the run."""

    plan: Plan
    owner: str
    driver: str
    control: ControlClient
    threads: int
    warm_key: str
    "Identifies the nodes' servers of this training (sunspot/warm); empty: workers are not forked."
    collective_timeout_s: float
    membership: MembershipAddress | None = None
    "Where workers that outlive each other form their groups; None: Ray Train forms them, and ends them together."
    folder: str = ""
    "The driver's working directory, which relative paths in TASK_ARGS mean."

    @property
    def limit_s(self) -> float:
        """The longest wait in one collective: one that waits for storage in a step keeps the others waiting."""
        return self.plan.settings.storage_timeout_s + self.collective_timeout_s

    def claimant(self) -> Claimant:
        """Who claims the run, with a connection of this process to its storage."""
        run = open_run(self.plan.settings.storage_path, self.plan.settings.run_name)
        return Claimant(run, self.owner, self.driver)
