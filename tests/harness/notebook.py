"""Executes a notebook's cells in this process, without a kernel, as far as the pages of docs/ require.

`python -m tests.harness.notebook PAGE COPY` executes a page in another process, and writes it with its outputs.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any


def execute(path: Path) -> dict[str, Any]:
    """Run a notebook's code cells in order, and return the notebook with their outputs. Raises the cells' errors."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}  # as in a kernel, so that Ray sends functions by value
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"], cell["outputs"] = count, _run("".join(cell["source"]), names, count)
    return notebook


def kinds(cell: dict[str, Any]) -> list[str]:
    """Return the kinds of a cell's outputs, such as `stream` and `execute_result`."""
    return [output["output_type"] for output in cell.get("outputs", ())]


def _run(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell, and return its printed output and the value of its last line if that is an expression."""
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        body.append(last)
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    # On a busy machine, Ray adds its own warnings to a cell's output.
    text = [line for line in _lines(printed.getvalue()) if "(raylet)" not in line]
    if text:
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": _lines(re.sub(r" at 0x\w+", "", repr(value)))}
        for method, kind in (("_repr_html_", "text/html"), ("_repr_svg_", "image/svg+xml")):
            if hasattr(value, method):
                data[kind] = _lines(getattr(value, method)())
        if hasattr(value, "_repr_png_"):
            data["image/png"] = [base64.b64encode(value._repr_png_()).decode()]
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(execute(Path(sys.argv[1])), indent=1, ensure_ascii=False) + "\n")
