"""A real headless Chromium for tests of pages, and what sticks out of a page sideways."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed on this machine")

_STICKING_OUT = """() => {
  const wide = document.documentElement.clientWidth;
  const scrolls = node => {
    for (let one = node.parentElement; one && one !== document.body; one = one.parentElement)
      if (['auto', 'scroll'].includes(getComputedStyle(one).overflowX)) return true;
    return false;
  };
  const out = [...document.body.querySelectorAll('*')].filter(node => {
    const box = node.getBoundingClientRect();
    return box.width > 0 && (box.right > wide + 1 || box.left < -1) && !scrolls(node);
  }).map(node => `${node.tagName.toLowerCase()}.${node.className}#${node.id}`);
  const more = document.documentElement.scrollWidth - wide;
  return more > 0 ? [`the page scrolls ${more} px sideways`, ...out] : out;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


def sticking_out(tab: Any) -> list[str]:
    """Elements that reach beyond the window, but for those in a box that scrolls by itself."""
    return list(tab.evaluate(_STICKING_OUT))
