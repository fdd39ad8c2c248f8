"""Finds what a job needs of the user's own, and pods may not have: the task's module, and files in its arguments."""

import os
from collections.abc import Iterator

from sunspot.code_archive import CODE
from sunspot.search_space import find_dimensions
from sunspot.settings import PREFIX
from sunspot.submitter.manifest.render import Rendered, settings_of


def find_absent(rendered: Rendered) -> Iterator[str]:
    """Yield a warning for each task without code, or whose code lacks it, and for each file on this machine."""
    archive, settings = rendered.archive, rendered.settings
    variables = settings_of(rendered.manifest)
    varied = [dimension.arguments for dimension in find_dimensions(variables) if dimension.name == "TASK"]
    for task in varied[0] if varied else [settings.task]:
        top = str(task).partition(".")[0]
        if top == "sunspot":
            continue
        if archive and not (archive.holds(top) or archive.holds(f"{top}.py")):
            yield f"{PREFIX}TASK={task}: the code has no {top}.py; pods do not have it, unless the image does"
        elif CODE not in variables:
            yield (
                f"{PREFIX}TASK={task}: the job brings no code, so pods have {top}.py only if the image does; "
                "`sunspot submit --code FOLDER` brings it, or `make submit CODE=FOLDER`"
            )
    for name, value in settings.task_args.items():
        here = isinstance(value, str) and value and not value.startswith("/") and os.path.exists(value)
        if here and not (archive and archive.holds(value)):
            given = f"{PREFIX}TASK_ARGS: {name}={value!r}"
            yield f"{given} is here on this machine; pods do not have it, unless the image does"
