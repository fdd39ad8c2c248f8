"""Finds task modules, and files named in TASK_ARGS, that a job's pods might not have."""

import os
from collections.abc import Iterator

from sunspot.code_archive import CODE
from sunspot.settings import PREFIX
from sunspot.settings.search_space import find_dimensions
from sunspot.submitter.manifest.render import Rendered, settings_of


def find_absent(rendered: Rendered) -> Iterator[str]:
    """Yield a warning for each task module and each local file that the pods might not have."""
    archive, settings = rendered.archive, rendered.settings
    variables = settings_of(rendered.manifest)
    varied = [dimension.arguments for dimension in find_dimensions(variables) if dimension.name == "TASK"]
    for task in varied[0] if varied else [settings.task]:
        top = str(task).partition(".")[0]
        if top == "sunspot":
            continue
        if archive and not (archive.holds(top) or archive.holds(f"{top}.py")):
            yield f"{PREFIX}TASK={task}: the code does not contain {top}.py, so pods have it only if the image does"
        elif CODE not in variables:
            yield (
                f"{PREFIX}TASK={task}: the job includes no code, so pods have {top}.py only if the image does; "
                "include the code with `sunspot submit --code FOLDER` or `make submit CODE=FOLDER`"
            )
    for name, value in settings.task_args.items():
        is_local_file = isinstance(value, str) and value and not value.startswith("/") and os.path.exists(value)
        if is_local_file and not (archive and archive.holds(value)):
            yield (
                f"{PREFIX}TASK_ARGS: {name}={value!r} is a file on this machine; pods have it only if the image does"
            )
