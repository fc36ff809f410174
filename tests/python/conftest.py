"""Where PyTorch is not there, its tests are skipped and say so."""

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
if importlib.util.find_spec("ullage") is None:
    sys.path.insert(0, str(ROOT / "python"))

needs_torch = [
    "test_complaints.py",
    "test_cross_entropy.py",
    "test_cuda.py",
    "test_distillation.py",
    "test_docs.py",
    "test_group.py",
    "test_operations.py",
    "test_policy.py",
]
collect_ignore = []
if importlib.util.find_spec("torch") is None:
    print("SKIPPED: the tests of ullage.torch: PyTorch is not installed")
    collect_ignore += [*needs_torch, "test_huggingface.py"]
elif importlib.util.find_spec("transformers") is None:
    print("SKIPPED: the tests of ullage.torch.patch: transformers is not installed")
    collect_ignore += ["test_huggingface.py"]


@pytest.fixture(autouse=True)
def _fresh_torch():
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.compiler.reset()  # what one test compiled is no other's recompilation
