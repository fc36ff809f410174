"""Every Python block of the README and of docs/ runs, those of a page one after the other; so do the examples."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page(page):
    text = page.read_text()
    scope = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), scope)


@pytest.mark.parametrize(
    "example, says",
    [
        (["train_tiny.py", "--steps=8", "--vocab=512", "--png=curves.png"], "the curves are"),
        (["distil.py", "--steps=3"], "nats a token"),
        (["grpo_step.py", "--steps=2"], "reward"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_examples(example, says, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example[0]), *example[1:]],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    if example[0] == "train_tiny.py":
        assert float(re.search(r"curves are (\S+) apart", done.stdout)[1]) < 1e-4
        png = (tmp_path / "curves.png").read_bytes()
        assert png.startswith(b"\x89PNG\r\n") and len(png) > 4096, "the curves, and the memory beside them"

