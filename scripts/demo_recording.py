"""`python -m scripts.demo_recording`: run `sunspot demo` and draw its output as docs/images/demo.svg.

The drawing first shows all lines, which remain in viewers without animation. After WHOLE_S, the lines appear one by one
at SPEED times the original speed.
"""

from __future__ import annotations

import argparse
import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"

WHOLE_S, SPEED = 3, 8

COLUMN = 7.8
"""Width of a character of 13 px, in pixels."""

ROW = 20
"""Height of a line, in pixels."""

MARGIN = 24
"""Margin around the text, in pixels."""

COLORS = {"kill -9": "#ff7b72", "again": "#e3b341", "audit": "#7ee787", "rows missing": "#e6edf3"}
"""Colors of lines that contain these texts. In other lines, the time is FADED and the rest is PLAIN."""

PLAIN = "#c9d1d9"
FADED = "#8b949e"
BACKGROUND = "#0d1117"


def main() -> None:
    """Record a demonstration and write the drawing."""
    parser = argparse.ArgumentParser("python -m scripts.demo_recording", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", metavar="FILE", help="draw the output of an earlier demonstration")
    given = parser.parse_args()
    text = Path(given.text).read_text() if given.text else record()
    FILE.write_text(draw(text.splitlines()))
    print(f"wrote {FILE}")


def record() -> str:
    """Run a demonstration and return its output."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", "sunspot", "demo"], cwd=folder, stdout=subprocess.PIPE, text=True)
        done.check_returncode()
        return done.stdout.replace(str(Path(folder).resolve()), "...")


def draw(printed: list[str]) -> str:
    """Return an SVG of the output in a terminal, after the command that printed it."""
    lines = ["$ make demo", *printed]
    width = 2 * MARGIN + COLUMN * max(map(len, lines))
    height = 2 * MARGIN + ROW * len(lines)
    rows, after_s = [], 0.0
    for number, line in enumerate(lines):
        time = re.match(r" *([0-9.]+) s  ", line)
        after_s = float(time[1]) / SPEED if time else after_s + 0.3 * (number > 1)
        when, what = (time[0], line[time.end() :]) if time else ("", line)
        color = next((color for text, color in COLORS.items() if text in line), PLAIN)
        rows.append(
            f'<text x="{MARGIN}" y="{MARGIN + ROW * (number + 0.7):.0f}" style="animation-duration:{after_s:.1f}s">'
            f'<tspan fill="{FADED}">{when}</tspan><tspan fill="{color}">{html.escape(what)}</tspan></text>'
        )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">
<title>Output of make demo</title>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }}
text {{ animation-name: hide; animation-delay: {WHOLE_S}s; }}
@keyframes hide {{ from, to {{ opacity: 0; }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>
{chr(10).join(rows)}
</svg>
"""


if __name__ == "__main__":
    main()
