"""The page in a real browser: ``pytest -m browser`` (Debian: ``apt-get install chromium``)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_spmd.planning.facts import facts_of
from lightning_spmd.planning.page import page_of

from .common import Deep, outlook

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1366, 768
_MEASURE = """<script>
const box = id => { const b = document.getElementById(id).getBoundingClientRect(); return [b.top, b.bottom, b.right]; };
document.querySelector('[data-zoom="4"]').click();
const stretched = document.getElementById('timeline').getBoundingClientRect().width;
document.querySelector('[data-zoom="1"]').click();
document.body.setAttribute('data-seen', JSON.stringify({
  timeline: box('timeline'), memory: box('memory-curve'), width: document.documentElement.scrollWidth,
  bars: [...document.querySelectorAll('#timeline rect')].filter(r => r.getBoundingClientRect().width > 0).length,
  stretched: stretched / document.getElementById('timeline').getBoundingClientRect().width,
}));
</script>"""


@pytest.mark.browser
def test_chromium_shows_timeline_and_memory_on_the_first_screen(tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    assert browser is not None, f"none of {', '.join(BROWSERS)} is installed"
    found = outlook({"overlap_iterations": True, "bucket_size_mb": 0.004}, 2, 2, device="cpu", make=Deep)
    page = tmp_path / "plan.html"
    page.write_text(page_of(facts_of(found)).replace("</body>", _MEASURE + "</body>"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    size = f"--window-size={WIDTH},{HEIGHT}"
    done = subprocess.run(
        [browser, *flags, size, "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "Uncaught" not in done.stderr
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen is not None, "the script did not run to its end"
    facts = json.loads(seen[1].replace("&quot;", '"'))
    assert facts["width"] <= WIDTH, "nothing sticks out at the right"
    assert 0 < facts["timeline"][0] < facts["timeline"][1] < facts["memory"][0] < facts["memory"][1] <= HEIGHT
    assert facts["bars"] > 20
    assert facts["stretched"] == pytest.approx(4, rel=0.01)
