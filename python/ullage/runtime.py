"""The contract functions by name, as the command line runs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import Any

from ullage import _library
from ullage._errors import ExecuteError


class Runtime:
    """The door to the contract functions; `functions` lists them."""

    def execute(self, module: str, function: str, args: Sequence[Any] = ()) -> dict[str, Any]:
        """Runs one function on positional arguments: {"module", "function", "result"}.

        A refusal is a result: a code of the status ledger. Raises ExecuteError where the function did not run.
        Floats that JSON cannot hold are given and returned as "nan", "inf" and "-inf".
        """
        out = c_void_p()
        status = _library.shared_library().ullage_execute(
            module.encode(), function.encode(), json.dumps(list(args), default=_plain).encode(), byref(out)
        )
        text = _library.taken(out)
        if not text:
            raise MemoryError("ullage_execute had no memory for its answer")
        answer: dict[str, Any] = json.loads(text)
        if status != 0:
            error = answer["error"]
            raise ExecuteError(error["kind"], error["message"], error.get("expected", ""))
        return answer

    @property
    def functions(self) -> dict[str, Any]:
        """The table of functions and constants: names, argument types, defaults, results, documentation."""
        table: dict[str, Any] = json.loads(_library.shared_library().ullage_functions_json())
        return table

    def status_name(self, code: int) -> str:
        return _library.status_name(code)


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays as JSON's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an argument is a {type(value).__name__}; accepted: numbers, strings, lists of numbers")
