"""The wheel: made of the library that is built, installed where nothing else of ours is, imported, one loss run."""

import os
import pathlib
import re
import subprocess
import sys
import venv
import zipfile

import numpy
import pytest

pytest.importorskip("scikit_build_core")
ROOT = pathlib.Path(__file__).resolve().parents[2]
ONE_LOSS = """
import numpy, ullage
plan = ullage.plan_head([{"kind": "cross_entropy"}], n_tok=2, vocab=3, gradients=["d_logits"])
found = plan.run(logits=numpy.zeros((2, 3), numpy.float32), labels=numpy.array([0, 2]))
print(ullage.__file__, round(found.total, 6), ullage.version())
"""


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_installs_and_runs_one_loss(tmp_path):
    from ullage import _library

    built = pathlib.Path(_library.shared_library()._name).resolve()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run(
        *pip, "wheel", ROOT, "--no-deps", "--no-build-isolation", "-w", tmp_path,
        "-C", f"cmake.define.ULLAGE_WHEEL_LIBRARY={built}", "-C", f"build-dir={tmp_path / 'build'}",
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"ullage-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ullage/lib/libullage.so", "ullage/py.typed", "ullage/torch/__init__.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "bench", "src"))]

    fresh = tmp_path / "venv"
    venv.create(fresh, symlinks=True)
    run(*pip, "--python", fresh / "bin/python", "install", "--no-deps", "--no-index", wheel)
    # NumPy, which a network would bring.
    (site,) = fresh.glob("lib/python3*/site-packages")
    (site / "numpy.pth").write_text(str(pathlib.Path(numpy.__file__).parents[1]))
    environment = {name: value for name, value in os.environ.items() if name != "ULLAGE_LIBRARY"}
    place, total, version = run(fresh / "bin/python", "-I", "-c", ONE_LOSS, cwd=tmp_path, env=environment).split()
    assert pathlib.Path(place).is_relative_to(fresh)
    assert (total, version) == ("1.098612", _library.version())  # ln 3
