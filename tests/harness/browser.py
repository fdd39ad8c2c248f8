"""Shows pages in headless Chromium over the WebDriver protocol. Its tests are skipped if no browser is installed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BINARIES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]

CONTRAST = """
const parse = color => color.match(/[\\d.]+/g).map(Number);
const over = (top, below) => { const a = top[3] ?? 1; return [0, 1, 2].map(i => a * top[i] + (1 - a) * below[i]); };
const linear = c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
const light = color => { const [r, g, b] = color.map(linear);
  return .2126 * r + .7152 * g + .0722 * b; };
const background = element => { if (!element) return [255, 255, 255];
  return over(parse(getComputedStyle(element).backgroundColor), background(element.parentElement)); };
const poor = [];
for (const element of document.body.querySelectorAll('*')) {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.getClientRects().length) continue;
  const style = getComputedStyle(element), behind = background(element.closest('svg')?.parentElement ?? element);
  const color = over(parse(element.closest('svg') ? style.fill : style.color), behind);
  const [high, low] = [light(color), light(behind)].sort((a, b) => b - a);
  const ratio = (high + .05) / (low + .05);
  if (ratio < 4.5) poor.push([element.tagName, element.textContent.slice(0, 30), ratio]);
}
return poor;
"""
"""JavaScript that returns each text with a contrast below 4.5:1 to its background."""


class Browser:
    """A browser window."""

    def __init__(self, server: str, binary: str) -> None:
        options = {"binary": binary, "args": ARGUMENTS}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._url = server
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self._url = f"{server}/session/{session}"

    def show(self, page: Path | str, width: int, scheme: str) -> None:
        """Open a file or an address in a window of this width, with the color scheme `light` or `dark`."""
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", **metrics)
        self._devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("POST", "/url", {"url": page if isinstance(page, str) else page.as_uri()})

    def run(self, script: str) -> Any:
        """Return the result of a JavaScript function with this body."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def messages(self) -> list[str]:
        """Return the console messages since the last call: errors, and violations of the page's policy."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def picture(self) -> bytes:
        """Return the full page as a PNG."""
        shot = self._devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        """End the browser."""
        self._call("DELETE", "")

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a browser for the tests of a module."""
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    server = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        ports = (re.search(r"started successfully on port (\d+)", line) for line in server.stdout)
        port = next(found[1] for found in ports if found)
        window = Browser(f"http://127.0.0.1:{port}", binary)
        try:
            yield window
        finally:
            window.close()
    finally:
        server.terminate()
        server.wait(timeout=30)
