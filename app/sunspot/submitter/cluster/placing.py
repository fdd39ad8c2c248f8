"""Chooses a run's place if its profile has several, and deletes the RayJob in the run's previous place."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sunspot.errors import ClusterError, NotFoundError, SettingsError
from sunspot.places.choice import HOUR_S, Choice, Goal, Move, Offer, Situation, choose_place, plan_move
from sunspot.places.experience import Experience, Sighting, learn
from sunspot.run import Run, open_run
from sunspot.run.owner import Owner
from sunspot.run.requests import newest_submission
from sunspot.run.seen import RunDetails, look, read_details
from sunspot.run.sightings import NODES_WITHIN_S, read_sightings
from sunspot.run.status import Status, is_alive, read_status
from sunspot.settings import Settings
from sunspot.settings.goal import parse_budget, parse_deadline
from sunspot.submitter.cluster.api import Cluster, connect
from sunspot.submitter.cluster.start import Submission, render_for_cluster, render_with_code, submit
from sunspot.submitter.cluster.stopping import GONE_WITHIN_S, delete_jobs
from sunspot.submitter.manifest.profile import Place, Profile
from sunspot.submitter.manifest.render import JobRequest, Rendered, choose_profile, render
from sunspot.submitter.printing import progress_note, warn


def render_in_place(request: JobRequest, context: str | None) -> tuple[Rendered, Cluster]:
    """Render a request, and connect to its cluster.

    If the profile has places but the request names none, a place is chosen, and is printed to stderr with the reason.
    A place whose cluster does not answer is ignored, with a warning. Raises `ClusterError` if no cluster answers in any
    place.
    """
    places = {place.name: place for place in choose_profile(request).places or ()}
    if request.place is not None or not places:
        return render_for_cluster(request, context or context_of(request))
    with progress_note("reading how many nodes recent runs got in each place"):
        prospects = read_prospects(request)
    current = prospects.situation.place
    unanswered: list[str] = []
    while len(unanswered) < len(places):
        choice = prospects.choose(unanswered)
        if current and current in places and current not in unanswered:
            choice = replace(choice, place=current, reason="the run is already there")
        if not choice.place:
            budget = prospects.settings.budget
            raise SettingsError(f"SUNSPOT_BUDGET={budget} is spent; set a larger budget, or omit it")
        placed = replace(request, place=choice.place)
        try:
            found = render_for_cluster(placed, context or places[choice.place].context)
            found[1].exists("version", "")
        except ClusterError as error:
            warn(f"place {choice.place} is ignored: {error}")
            unanswered.append(choice.place)
            continue
        warn(f"place: {choice.place}, {choice.reason}")
        if choice.warning:
            warn(f"warning: {choice.warning}")
        return found
    raise ClusterError(
        f"no cluster answers in any of the places ({', '.join(unanswered)}); check each place's context in the "
        "profile, and run `kubectl version`"
    )


def context_of(request: JobRequest) -> str | None:
    """Return the kubeconfig context of a request's place, or None for the current one."""
    places = choose_profile(request).places or ()
    return next((place.context for place in places if place.name == request.place), None)


def submit_in_place(cluster: Cluster, rendered: Rendered, dry_run: bool = False, take_over: bool = False) -> Submission:
    """Submit a job as `submit` does, and delete the RayJob in the run's previous place.

    The old RayJob is kept if its driver is alive, because that driver stops once the new RayJob takes over the run.
    """
    left = _find_left_job(rendered) if rendered.request.place and not dry_run else None
    if left and (left.cluster.server, left.cluster.namespace) == (cluster.server, cluster.namespace):
        left.delete()  # before the new RayJob, because two live RayJobs of a run in a namespace are a conflict
        left = None
    submission = submit(cluster, rendered, dry_run, take_over)
    if left:
        left.delete()
    return submission


@dataclass(frozen=True)
class RunJob:
    """A RayJob in the place that its run is leaving."""

    cluster: Cluster
    name: str
    run: str
    place: str

    def delete(self) -> None:
        """Delete the RayJob, so that it does not start later. Warns if this fails."""
        try:
            found = [job for job in self.cluster.list_jobs(self.run) if job.name == self.name]
            with progress_note(f"removing {self.name} from place {self.place}"):
                gone = delete_jobs(self.cluster, found, GONE_WITHIN_S)
            if not gone:
                warn(f"warning: {self.name} and its pods still exist in {self.place}; Kubernetes will remove them")
        except ClusterError as error:
            warn(f"warning: {_fix(self.name, self.place)}: {error}")


def _find_left_job(rendered: Rendered) -> RunJob | None:
    """Return the run's RayJob in its previous place.

    Returns None if the run has not changed places, if its driver is alive, or if the profile no longer has the previous
    place.
    """
    request, settings = rendered.request, rendered.settings
    run = open_run(settings.storage_path, settings.run_name)
    before = newest_submission(run)
    status = read_status(run)
    if not before or not before.place or before.place == request.place or (status and is_alive(status, time.time())):
        return None
    try:
        return find_job_in_place(request, run, before.place, before.job)
    except SettingsError as error:
        warn(f"warning: {_fix(before.job, before.place)}: {error}")
        return None


def find_job_in_place(request: JobRequest, run: Run, place: str, job: str) -> RunJob:
    """Return a run's RayJob in one of the profile's places. Raises `SettingsError` if the profile has no such place.

    Sends no requests, so the RayJob need not exist.
    """
    there = replace(request, place=place)
    return RunJob(connect(context_of(there), choose_profile(there).namespace), job, run.name, place)


def _fix(job: str, place: str) -> str:
    return f"delete the run's RayJob {job} in place {place}, because it takes the run over if it starts later"


@dataclass(frozen=True)
class Prospects:
    """The information that is needed to choose a run's place."""

    run: Run
    settings: Settings
    offers: Sequence[Offer]
    known: Mapping[str, Experience]
    situation: Situation
    "The situation's place is where the run is alive, or where it can still get nodes."
    goal: Goal

    def choose(self, without: Collection[str] = ()) -> Choice:
        """Choose a place that is not in `without`. Raises `ValueError` if no place remains."""
        offers = [offer for offer in self.offers if offer.place not in without]
        return choose_place(offers, self.known, self.situation, self.goal)


def read_prospects(request: JobRequest, failures: Sequence[Sighting] = ()) -> Prospects:
    """Read how recent runs did in the places of a request's profile, and how far the request's run has trained.

    `failures` are the sightings from failed moves, which storage does not contain. Raises `StorageError` if storage
    cannot be read.
    """
    places = {place.name: place for place in choose_profile(request).places or ()}
    rendered = _render_everywhere(request, places)
    settings = next(iter(rendered.values())).settings
    run = open_run(settings.storage_path, settings.run_name)
    now = time.time()
    status = read_status(run)
    details = _read_details_if_begun(run)
    state_gb = details.checkpoint.bytes / 1e9 if details and details.checkpoint else 0.0
    save_s = (status.save_s if status else None) or 0.0
    move = plan_move(state_gb, state_gb / save_s, 0.0, NODES_WITHIN_S) if state_gb and save_s else Move(NODES_WITHIN_S)
    situation = Situation(now, _find_current(run, status, now), _find_work(status, settings), move)
    step_s = (status.step_time_s if status else None) or 0.0
    every_s = settings.checkpoint_every_s or settings.checkpoint_every_steps * step_s
    saved_gb = state_gb * HOUR_S / max(every_s, save_s) if every_s else 0.0

    def offer(place: Place) -> Offer:
        """Return the result of `_make_offer` for a place, with the cost of traffic added to the price.

        Traffic is caused by saving checkpoints and, after a move, by loading a checkpoint.
        """
        found = _make_offer(rendered[place.name])
        loaded_gb = 0.0 if place.name == situation.place else state_gb
        traffic = (place.traffic_price or 0.0) * (saved_gb + loaded_gb)
        return replace(found, price=traffic + found.price if found.price is not None else None)

    known = learn([*read_sightings(run.storage, now), *failures])
    goal = _make_goal(settings, details.spending.cost if details else None)
    return Prospects(run, settings, [offer(each) for each in places.values()], known, situation, goal)


def _render_everywhere(request: JobRequest, places: dict[str, Place]) -> dict[str, Rendered]:
    """Render the request in each place. The user's code is packed once."""
    first, *others = places
    rendered = {first: render_with_code(replace(request, place=first))}
    archive = rendered[first].archive
    return rendered | {name: render(replace(request, place=name), archive) for name in others}


def _make_offer(rendered: Rendered) -> Offer:
    """Return a place's offer. The price covers the head and the first training group at full size, but no traffic."""
    profile = choose_profile(rendered.request)
    price = None
    if rendered.pods:  # a job in an existing cluster has no pods of its own
        head, first, *_ = rendered.pods
        price = None if first.price is None else (head.price or 0.0) + first.price * first.most
    return Offer(rendered.request.place or "", price, _is_on_demand(profile))


def _is_on_demand(profile: Profile) -> bool:
    return profile.spot is None or profile.groups[0].spot is False


def _make_goal(settings: Settings, spent: float | None) -> Goal:
    """Return the run's deadline and the rest of its budget. `spent` is the cost so far, or None if it is unknown."""
    budget = parse_budget(settings.budget)
    return Goal(parse_deadline(settings.deadline), None if budget is None else budget - (spent or 0.0))


def _read_details_if_begun(run: Run) -> RunDetails | None:
    """Return the run's details, or None if the run has not begun."""
    try:
        return read_details(look(run))
    except NotFoundError:
        return None


def _find_work(status: Status | None, settings: Settings) -> float | None:
    """Return how many more seconds the run would train with its maximum number of workers, or None if unknown."""
    if not status or not status.step_time_s or not status.total_steps:
        return None
    share = min(1.0, status.world_size / settings.num_workers.most) if status.world_size else 1.0
    return max(0, status.total_steps - status.step) * status.step_time_s * share


def _find_current(run: Run, status: Status | None, now: float) -> str:
    """Return the place where the run is alive, or was submitted so recently that it may still be waiting for nodes.

    Returns an empty string if there is no such place.
    """
    if status and is_alive(status, now):
        return Owner.parse(status.owner).place
    submitted = newest_submission(run)
    waits = submitted and now - submitted.time < NODES_WITHIN_S and not (status and status.time > submitted.time)
    return submitted.place if submitted and waits else ""
