"""Open every page of the built site in Chromium, and report problems.

No page may log an error, load anything from another address, or be wider than a
telephone. Formulas must be laid out, and the search must find the words of `WORDS`.
"""

import functools
import http.server
import pathlib
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

WORDS = ("adjacency", "clipped_grad", "truncation", "momentum", "BatchNorm")
WIDTHS = (1280, 390)
NAMES = ("chromium", "chromium-browser", "google-chrome")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A request handler that prints nothing."""

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@contextmanager
def served(site: pathlib.Path) -> Iterator[str]:
    """Serve the site on this machine, and yield its address."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def problems(site: pathlib.Path, pictures: pathlib.Path | None = None) -> list[str]:
    """Return the problems of all pages; write pictures of the pages into `pictures`."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        print("no Chromium: the pages were not looked at")
        return []
    from playwright.sync_api import sync_playwright

    pages = [
        page.parent.relative_to(site).as_posix()
        for page in sorted(site.rglob("index.html"))
    ]
    with served(site) as address, sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=executable, args=["--no-sandbox"]
        )
        found = []
        for name in pages:
            found += _look(chromium.new_page(), address, name, pictures)
        found += _search(chromium.new_page(), address)
        chromium.close()
    return found


def _look(page, address, name, pictures) -> list[str]:
    """Return the problems of one page, at each width."""
    found = []
    page.on("console", lambda m: found.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: found.append(str(e)))
    page.on(
        "request",
        lambda r: None if r.url.startswith((address, "data:")) else found.append(r.url),
    )
    page.goto(f"{address}{name}/" if name != "." else address)
    page.wait_for_load_state("networkidle")
    formulas = page.eval_on_selector_all(
        "math", "all => all.map(x => x.getBoundingClientRect()).map(x => x.height)"
    )
    found += ["a formula without height"] * sum(height < 5 for height in formulas)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            found.append(f"{wide} pixels wide at {width}")
        if pictures:
            stem = "index" if name == "." else name.replace("/", "-")
            page.screenshot(path=pictures / f"{stem}-{width}.png")
    page.close()
    return [f"{name}: {x}" for x in found]


def _search(page, address) -> list[str]:
    """Return a line for each word that the search does not find."""
    found = []
    for word in WORDS:
        page.goto(address)
        page.keyboard.press("/")
        page.keyboard.type(word)
        try:
            page.wait_for_selector(".md-search-result__link", timeout=10_000)
        except Exception as error:
            found.append(f"search does not find {word}: {type(error).__name__}")
    return found
