"""`python -m scripts.demo_recording`: run `sunspot demo` and draw what it prints as docs/images/demo.svg.

The picture begins with all lines, as it stays where nothing moves. After WHOLE_S, each line appears at its time, SPEED
times as fast.
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

COLUMN, ROW, MARGIN = 7.8, 20, 24
"""Pixels of a character of 13 px, of a line, and around the text."""

COLOURS = {"kill -9": "#ff7b72", "again": "#e3b341", "audit": "#7ee787", "rows missing": "#e6edf3"}
"""Of lines with such a text; the others are FADED where they say when, and plain in what they say."""

PLAIN, FADED, BEHIND = "#c9d1d9", "#8b949e", "#0d1117"


def main() -> None:
    """Record a demonstration, and write the drawing."""
    parser = argparse.ArgumentParser("python -m scripts.demo_recording", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", metavar="FILE", help="draw what an earlier demonstration has printed")
    given = parser.parse_args()
    text = Path(given.text).read_text() if given.text else record()
    FILE.write_text(draw(text.splitlines()))
    print(f"wrote {FILE}")


def record() -> str:
    """What a demonstration prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", "sunspot", "demo"], cwd=folder, stdout=subprocess.PIPE, text=True)
        done.check_returncode()
        return done.stdout.replace(str(Path(folder).resolve()), "...")


def draw(printed: list[str]) -> str:
    """The lines as a terminal shows them, after the command that printed them."""
    lines = ["$ make demo", *printed]
    width = 2 * MARGIN + COLUMN * max(map(len, lines))
    height = 2 * MARGIN + ROW * len(lines)
    rows, after_s = [], 0.0
    for number, line in enumerate(lines):
        time = re.match(r" *([0-9.]+) s  ", line)
        after_s = float(time[1]) / SPEED if time else after_s + 0.3 * (number > 1)
        when, what = (time[0], line[time.end() :]) if time else ("", line)
        colour = next((colour for text, colour in COLOURS.items() if text in line), PLAIN)
        rows.append(
            f'<text x="{MARGIN}" y="{MARGIN + ROW * (number + 0.7):.0f}" style="animation-duration:{after_s:.1f}s">'
            f'<tspan fill="{FADED}">{when}</tspan><tspan fill="{colour}">{html.escape(what)}</tspan></text>'
        )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">
<title>What make demo prints</title>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }}
text {{ animation-name: hide; animation-delay: {WHOLE_S}s; }}
@keyframes hide {{ from, to {{ opacity: 0; }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="{BEHIND}"/>
{chr(10).join(rows)}
</svg>
"""


if __name__ == "__main__":
    main()
