"""The contract functions from Python."""

import json
import os
import pathlib
import pickle
import subprocess
import sys

import numpy
import pytest

import ullage


def test_execute_returns_module_function_result():
    assert ullage.Runtime().execute("residentk.contract", "residentk_dispatch_budget", [28]) == {
        "module": "residentk.contract",
        "function": "residentk_dispatch_budget",
        "result": 171,
    }


def test_a_refusal_is_a_result():
    assert ullage.Runtime().execute("lossk.contract", "loss_chunk_check", [2048, 151936])["result"] == 587
    assert ullage.Runtime().status_name(587) == "chunk_exceeds_logit_budget"


@pytest.mark.parametrize(
    "module, function, args, kind",
    [
        ("lossk", "x", [], "unknown_module"),
        ("lossk.contract", "loss_chunk", [], "unknown_function"),
        ("lossk.contract", "loss_chunk_check", [1], "arity"),
        ("lossk.contract", "loss_chunk_check", ["a", 1], "type"),
    ],
)
def test_what_did_not_run_raises(module, function, args, kind):
    with pytest.raises(ullage.ExecuteError) as caught:
        ullage.Runtime().execute(module, function, args)
    assert caught.value.kind == kind
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_every_function_of_the_table_is_reachable():
    runtime = ullage.Runtime()
    assert {module["module"] for module in runtime.functions["modules"]} >= {"lossk.contract", "residentk.contract"}


def test_numpy_arguments():
    result = ullage.Runtime().execute("lossk.contract", "loss_chunk_check", numpy.array([2048, 151936]))
    assert result["result"] == 587


def test_without_torch():
    code = "import sys, ullage; assert 'torch' not in sys.modules; print(ullage.__version__)"
    here = pathlib.Path(ullage.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(here)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ullage.version()


def test_errors_survive_pickling():
    error = ullage.UllageError(586, "target_id_out_of_range", "labels[0] is 3")
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, again.name, str(again)) == (586, "target_id_out_of_range", str(error))
    assert json.dumps(again.code) == "586"
