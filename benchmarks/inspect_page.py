"""How long the trajectory page takes to load and to filter, in headless Chromium.

    pip install -e '.[dev]'   # and Chromium; Debian: apt-get install chromium
    python -m benchmarks.inspect_page --trajectories 10000

Keeps that many generated trajectories as a run does, credited by CalibAdv, serves their page, and prints a
line of JSON: seconds until the index is built, milliseconds from the request of the page until its list
stands, of the slowest filter, and from the choice of a group until its transcript stands.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from benchmarks.generated_run import make_run
from calibadv_jax.contrib.pages.page_server import make_server
from calibadv_jax.contrib.pages.site import Site

TIME_FILTER = """([name, value]) => {
  const begun = performance.now();
  const field = document.getElementById(name);
  field.value = value;
  field.dispatchEvent(new Event("input"));
  document.body.getBoundingClientRect();  // lays the page out
  return performance.now() - begun;
}"""


def measure(page: Page, address: str) -> dict[str, float]:
    """Return the milliseconds that a person waits."""
    started = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("#list[data-ready]")
    load = time.perf_counter() - started
    filters = [("text", word) for word in ("amber", "who keeps", "no such text", "")]
    filters += [("show", name) for name in ("wrong-good", "softened", "invalid", "failed", "")]
    filters += [("source", "two_hop"), ("from", "3"), ("to", "40")]
    slowest = max(page.evaluate(TIME_FILTER, list(options)) for options in filters)
    started = time.perf_counter()
    page.keyboard.press("j")
    page.wait_for_selector("#detail[data-ready*='/']")
    return {"load_ms": 1000 * load, "filter_ms": slowest, "open_ms": 1000 * (time.perf_counter() - started)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trajectories", type=int, default=10_000)
    arguments = parser.parse_args()
    browser_program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name) / "run"
        make_run(folder, arguments.trajectories)
        begun = time.perf_counter()
        site = Site(folder)
        site.steps()
        figures = {"trajectories": arguments.trajectories, "index_s": time.perf_counter() - begun}
        server = make_server(site, 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=browser_program, args=["--no-sandbox"])
        figures |= measure(browser.new_page(), f"http://localhost:{server.server_port}/")
        browser.close()
        server.shutdown()
        server.server_close()
    sys.stdout.write(json.dumps({name: round(value, 2) for name, value in figures.items()}) + "\n")


if __name__ == "__main__":
    main()
