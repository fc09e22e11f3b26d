"""The errors a user may see, each with its exit code.

Every message is one sentence that says what is wrong, where, and what to do. Anything else that
escapes is a defect of ours and exits with 1.
"""

from __future__ import annotations


class TwinscopeError(Exception):
    """Base of every error that carries a sentence for the user and an exit code."""

    exit_code = 1


class ConfigError(TwinscopeError):
    """Wrong usage, or a configuration that cannot be run as written (exit code 2)."""

    exit_code = 2


class DataError(TwinscopeError):
    """A text, token, model, checkpoint or record file that cannot be trusted (exit code 65)."""

    exit_code = 65


class RunFailed(TwinscopeError):
    """A run that cannot go on under its own configuration, such as a loss that diverged (exit code 2)."""

    exit_code = 2


class Stopped(TwinscopeError):
    """The run was stopped from outside before it ended and can be resumed (exit code 75)."""

    exit_code = 75


class BudgetExceeded(Stopped):
    """A budget ran out: which one, how much was used, and how much was allowed.

    ``kind`` is ``"process_memory" | "available_memory" | "time" | "swap"``; ``value`` and ``limit``
    are in MiB, in seconds for time, and in MiB per second for swap.
    """

    def __init__(self, kind: str, value: float, limit: float, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.value = value
        self.limit = limit


class RankLost(Stopped):
    """Another process of the same job ended or does not answer; the run can be resumed (exit code 75)."""
