"""A pytest plugin: which of a peer's tests called our loss, and how they ended; on JSON lines in ULLAGE_PEER_REPORT."""

from __future__ import annotations

import json
import os

import pytest

from ullage import UllageError

calls = 0  # of our losses, by the adapters
_REFUSALS = ("head_unknown_kind", "head_bad_dtype", "head_shape_mismatch")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    before = calls
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    expected = item.get_closest_marker("xfail")
    if isinstance(error, pytest.skip.Exception):
        ending, reason = "skipped", str(error)
    elif isinstance(error, UllageError) and error.name in _REFUSALS:
        ending, reason = "refused", str(error)
    elif error is not None and expected is not None:
        ending, reason = "expected to fail", expected.kwargs["reason"]
    elif error is not None:
        ending, reason = "failed", f"{item.name}: {type(error).__name__}: {error}"[:400]
    else:
        ending, reason = "passed" if calls > before else "not ours", ""
    with open(os.environ["ULLAGE_PEER_REPORT"], "a") as report:
        print(json.dumps({"test": item.nodeid, "ending": ending, "reason": reason}), file=report)
