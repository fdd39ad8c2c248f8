"""Parses a search space (settings with an expression instead of a value), and draws each trial's values.

    LEARNING_RATE=loguniform(1e-4,1e-2)     a number in this range; all orders of magnitude are equally likely
    LEARNING_RATE=uniform(0.01,0.1)         a number in this range
    EPOCHS=randint(2,5)                     2, 3 or 4 (the end is excluded, as in Ray Tune and `range`)
    PRECISION=choice(fp32,bf16)             one of these values
    TASK_ARGS={"width": "choice(8,16)"}     the same for the task's own hyperparameters

The values of trial n depend only on SEED, n and the expression. Adding trials or varying more settings does not change
other trials' values, and a restarted search has the same trials.
"""

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sunspot.errors import SettingsError
from sunspot.settings import (
    FIELDS,
    HEAD,
    IDENTITY,
    PREFIX,
    RUN_NAME_LENGTH,
    Settings,
    cut,
    load_settings,
    parse_json,
    refuse,
    takes,
)

VARIED = (
    "task",
    "init_from",
    "epochs",
    "max_steps",
    "global_batch_size",
    "micro_batch_size",
    "learning_rate",
    "seed",
    "precision",
)
"""Settings that a search can vary, in addition to the arguments in TASK_ARGS. The other settings affect only where and
how a run operates, so a metric cannot compare their values."""

TEXTS = ("task", "init_from")
"""Varied settings whose values can contain brackets, so that an unknown function is not a misspelling."""

FUNCTIONS = {
    "uniform": ("uniform(0.01,0.1)", "two numbers, the first smaller than the second"),
    "loguniform": ("loguniform(1e-4,1e-2)", "two positive numbers, the first smaller than the second"),
    "randint": ("randint(2,5)", "two integers, the first smaller than the second"),
    "choice": ("choice(8,16,32)", "values separated by commas"),
}
"""Functions of expressions, each with an example and a description of its arguments. They are not parsed as Python,
because the values of `choice` can be URLs."""

WHERE = "in the search space"

SEARCH_LABEL = "search"
"""Name of a label that a search and its trials have. Its value is the search's name."""

CALL = re.compile(r"([A-Za-z_]\w*)\s*\((.*)", re.DOTALL)

MAX_INTEGER = 2**53
"""Maximum bound of `randint`. Floats cannot represent all integers above it."""

DIGITS = 4
"""Number of significant digits of a drawn number. More digits are meaningless and make tables unreadable."""


@dataclass(frozen=True)
class Dimension:
    """A setting or task argument that a search varies, and the expression that describes its values."""

    name: str
    "Setting's name without its prefix, or the path of a task's argument, such as `TASK_ARGS.width`."
    text: str
    "The expression as the user wrote it."
    function: str
    arguments: tuple[Any, ...]
    "Values of `choice`, or the two bounds of another function."

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values to check. If they are valid, all other values are valid, too."""
        if self.function == "randint":
            return self.arguments[0], self.arguments[1] - 1
        return self.arguments

    def draw(self, seed: int, trial: int) -> Any:
        """Return a trial's value. Trials are numbered from 1."""
        text = f"{seed} {trial} {self.name} {self.text}".encode(errors="surrogatepass")
        share = random.Random(text).random()  # `Random` hashes bytes with SHA-512
        if self.function == "choice":
            return self.arguments[int(share * len(self.arguments))]
        low, high = self.arguments
        if self.function == "randint":
            return low + int(share * (high - low))
        value = low * (high / low) ** share if self.function == "loguniform" else low + share * (high - low)
        return min(high, max(low, float(f"{value:.{DIGITS}g}")))


@dataclass(frozen=True)
class Search:
    """A search with all its trials, planned before any trial starts."""

    settings: Settings
    "Settings of the search itself, with defaults for the varied settings."
    dimensions: tuple[Dimension, ...]
    "Expressions of the search, empty if there is nothing to search."
    given: dict[str, str]
    "Variables with an expression, in canonical form."
    samples: tuple[dict[str, Any], ...]
    "Each trial's values, keyed by dimension."
    trials: tuple[Settings, ...]

    @property
    def identity(self) -> tuple[str, ...]:
        """Names of the settings that must stay the same when the search is started again."""
        varied = [variable.removeprefix(PREFIX).lower() for variable in self.given]
        return tuple(dict.fromkeys((*IDENTITY, *varied)))


def load_search(variables: Mapping[str, str]) -> Search:
    """Return the search described by the variables of the environment or of a job.

    A search without an expression has no trials. Raises `SettingsError` if a setting, an expression or a trial is
    invalid. After the settings and the expressions, all values in `Dimension.extremes` are checked, and their problems
    are reported together. Then the trials are checked one by one, up to the first invalid trial.
    """
    given = _ours(variables)
    settings, dimensions, expressions = load_common(given)
    if not dimensions:
        return Search(settings, (), {}, (), ())
    settings = settings.model_copy(update={"labels": {**settings.labels, SEARCH_LABEL: settings.run_name}})

    problems = []
    if settings.num_workers.elastic:
        elastic = f"{PREFIX}NUM_WORKERS={settings.num_workers}"
        problems.append(f"{elastic}: trials would take workers from each other; set it to a single number")
    longest = trial_name(settings.run_name, settings.trials)
    if len(longest) > RUN_NAME_LENGTH:
        most = RUN_NAME_LENGTH - len(longest) + len(settings.run_name)
        problems.append(
            f"{PREFIX}RUN_NAME={settings.run_name}: trial names such as {longest} would have more than "
            f"{RUN_NAME_LENGTH} characters; set it to a name of at most {most} characters"
        )
        refuse(problems, WHERE)
    samples = [{d.name: d.draw(settings.seed, n) for d in dimensions} for n in range(1, settings.trials + 1)]
    extremes = [{**samples[0], d.name: value} for d in dimensions for value in d.extremes]
    trials = []
    for number, sample in enumerate([*extremes, *samples], start=1 - len(extremes)):
        if number > 0:
            refuse(problems, WHERE)  # first the problems of all extremes, then those of each trial
        name = trial_name(settings.run_name, max(1, number))
        try:
            own = {**_shared(settings), **_substitute(expressions, sample), PREFIX + "RUN_NAME": name}
            trials.append(load_settings({**given, **own}))
        except SettingsError as error:
            problems += map(str.strip, str(error).splitlines()[1:])  # the first line is only the number of problems
    refuse(problems, WHERE)
    return Search(settings, dimensions, expressions, tuple(samples), tuple(trials[len(extremes) :]))


def load_common(variables: Mapping[str, str]) -> tuple[Settings, tuple[Dimension, ...], dict[str, str]]:
    """Return the settings that all trials share, the search's dimensions, and its expressions, keyed by variable name.

    In the returned settings, each setting that the search varies has its default value. TASK_ARGS is returned as
    canonical JSON. Raises `SettingsError` if a setting or an expression is invalid.
    """
    given = _ours(variables)
    dimensions = find_dimensions(given)
    expressions = {name: given[name] for name in {PREFIX + d.name.partition(".")[0]: None for d in dimensions}}
    arguments = PREFIX + "TASK_ARGS"
    if arguments in expressions:
        expressions[arguments] = json.dumps(json.loads(expressions[arguments]), sort_keys=True)
    defaults = Settings.model_construct().environment()
    return load_settings({**given, **{name: defaults[name] for name in expressions}}), dimensions, expressions


def find_dimensions(variables: Mapping[str, str]) -> tuple[Dimension, ...]:
    """Return the expressions in the variables, in the order of the settings.

    Raises `SettingsError` with a list of all mistakes if any expression is invalid or is in a setting that a search
    cannot vary.
    """
    dimensions, problems = [], []
    for field in FIELDS:
        name = field.upper()
        text = variables.get(PREFIX + name, "")
        for path, value in _walk_task_args(text) if field == "task_args" else [(name, text)]:
            try:
                dimension = parse(path, value, strict=field in VARIED and field not in TEXTS)
            except ValueError as error:
                problems.append(f"{PREFIX}{cut(path)}={cut(value)}: {error}")
                continue
            if dimension and field not in (*VARIED, "task_args"):
                varied = ", ".join(varied.upper() for varied in (*VARIED, "task_args"))
                problems.append(
                    f"{PREFIX}{cut(path)}={cut(value)}: a search can only vary {varied}; set it to {takes(field)}"
                )
            elif dimension:
                dimensions.append(dimension)
    refuse(problems, WHERE)
    return tuple(dimensions)


def parse(name: str, text: str, strict: bool = False) -> Dimension | None:
    """Return the expression in a text, or None if the text is a plain value.

    With `strict`, an unknown function is an error. Raises `ValueError` with the fix if the expression is invalid.
    """
    match = CALL.fullmatch(text.strip())
    if not match or (match[1] not in FUNCTIONS and not strict):
        return None
    function, rest = match.groups()
    inside = rest.removesuffix(")")
    closed = rest.endswith(")")
    if function not in FUNCTIONS:
        raise ValueError(
            f"{function} is not a search function; use {', '.join(example for example, _ in FUNCTIONS.values())}"
        )
    words = [word.strip() for word in inside.split(",")]
    try:
        if not closed or not all(words):
            raise ValueError
        arguments = tuple(map(_parse_value if name.startswith("TASK_ARGS") else str, words))
        if function != "choice":
            whole = function == "randint"
            low, high = arguments = tuple(map(int if whole else float, words))
            bound = MAX_INTEGER if whole else sys.float_info.max
            if not -bound <= low < high <= bound or (function == "loguniform" and low <= 0):
                raise ValueError
    except ValueError:
        example, arguments_taken = FUNCTIONS[function]
        raise ValueError(f"{function} takes {arguments_taken}, as in {example}") from None
    return Dimension(name, text.strip(), function, arguments)


def trial_name(run_name: str, trial: int) -> str:
    """Return the name of a trial's run. Trials are numbered from 1."""
    return f"{run_name}-{trial:02d}"


def in_words(sample: Mapping[str, Any]) -> str:
    """Return a readable description of a trial's values."""
    return ", ".join(f"{name}={value}" for name, value in sample.items())


def _ours(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in variables.items() if name.startswith(PREFIX)}


def _shared(settings: Settings) -> dict[str, str]:
    """Return the labels and prices that trials inherit from their search.

    The head's price is omitted, because the search pays for the head, and its trials do not.
    """
    prices = {name: price for name, price in settings.job.prices.items() if name != HEAD}
    job = settings.job.model_copy(update={"prices": prices})
    shared = settings.model_copy(update={"job": job}).environment()
    return {name: shared[name] for name in (PREFIX + "LABELS", PREFIX + "PRICES")}


def _substitute(expressions: Mapping[str, str], sample: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables with a trial's values in place of the expressions."""
    arguments = PREFIX + "TASK_ARGS"
    filled = {name: str(sample[name.removeprefix(PREFIX)]) for name in expressions if name != arguments}
    if arguments in expressions:
        filled[arguments] = json.dumps(_replace(json.loads(expressions[arguments]), "TASK_ARGS", sample))
    return filled


def _replace(value: Any, path: str, sample: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _replace(inner, f"{path}.{name}", sample) for name, inner in value.items()}
    return sample.get(path, value)


def _walk_task_args(text: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in TASK_ARGS with their paths.

    Yields nothing if TASK_ARGS is not a JSON object, because `load_settings` rejects it.
    """

    def walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(f"{path}.{name}", inner)
        elif isinstance(value, str):
            yield path, value

    try:
        parsed = parse_json(text or "{}")
    except ValueError:
        return
    if isinstance(parsed, dict):
        yield from walk("TASK_ARGS", parsed)


def _parse_value(word: str) -> Any:
    """Return a value of TASK_ARGS, parsed as JSON if possible, or the word itself."""
    try:
        return parse_json(word)
    except ValueError:
        return word
