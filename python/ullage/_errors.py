"""Refusals as exceptions."""

from __future__ import annotations

from typing import Any


class UllageError(ValueError):
    """A refusal of the library: `code` and `name` are those of the status ledger."""

    def __init__(self, code: int, name: str, message: str) -> None:
        super().__init__(f"{code} {name}: {message}" if message else f"{code} {name}")
        self.code = code
        self.name = name
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:  # BaseException pickles its message alone
        return type(self), (self.code, self.name, self.message)


class ExecuteError(ValueError):
    """A contract function that did not run: `kind` is unknown_module, unknown_function, arity, type or json."""

    def __init__(self, kind: str, message: str, expected: str) -> None:
        super().__init__(f"{message}; expected: {expected}" if expected else message)
        self.kind = kind
        self.message = message
        self.expected = expected

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.message, self.expected)
