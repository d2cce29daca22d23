"""The bench's page in a real browser: it is laid out, on a desktop and on a phone."""

from __future__ import annotations

import json
import shutil
import subprocess
from html import escape, unescape
from typing import TYPE_CHECKING, Any, Final

import pytest

from gateway.bench.report.page import page
from tests.bench_made import measured_run

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER_S: Final = 100.0
# The page in a frame of the wanted width; what the browser made of it is written where `--dump-dom` shows it.
FRAME: Final = """<!doctype html><iframe srcdoc="{page}" style="width:{width}px;height:800px;border:0"></iframe>
<pre id="told"></pre><script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument;
  const figures = [...page.querySelectorAll("figure")].map(figure => figure.getBoundingClientRect());
  told.textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth,
    figures: figures.map(box => [box.left, box.right, box.height]),
    bars: page.querySelectorAll("rect.bar").length,
    ground: getComputedStyle(page.body).backgroundColor,
  }});
}});
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]


def seen_by_a_browser(html: str, width: int, directory: Path) -> dict[str, Any]:
    assert CHROMIUM is not None
    frame = directory / "frame.html"
    frame.write_text(FRAME.format(page=escape(html), width=width), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, *options, "--window-size=1400,900", "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=BROWSER_S,
        check=True,
    )
    told: dict[str, Any] = json.loads(unescape(done.stdout.partition('<pre id="told">')[2].partition("</pre>")[0]))
    return told


@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1280, 3)])
def test_plots_fit_beside_each_other_and_nothing_sticks_out(width: int, columns: int, tmp_path: Path) -> None:
    told = seen_by_a_browser(page([measured_run(512), measured_run(128)]), width, tmp_path)
    assert told["width"] <= width
    assert len(told["figures"]) == 2 + 2 * 6
    assert len({left for left, _, _ in told["figures"]}) == columns
    assert all(0 <= left < right <= width and height > 150 for left, right, height in told["figures"])
    assert told["bars"] > 0
    assert told["ground"] != "rgba(0, 0, 0, 0)"
