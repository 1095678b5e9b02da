"""What can go wrong that is the user's to know, in one line each."""

from __future__ import annotations

from pathlib import Path


class RecipeError(Exception):
    """Shown as it is, without a traceback: what was expected, what came, what to do."""


class ConfigError(RecipeError):
    """A key or value of the configuration."""


class DataError(RecipeError):
    """One file, or one record of it, that cannot be used."""

    def __init__(self, path: str | Path, reason: str, record: object = None) -> None:
        self.path, self.reason, self.record = str(path), reason, record
        where = self.path if record is None else f"{self.path} [{record}]"
        super().__init__(f"{where}: {reason}")

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str, object]]:
        """Workers of a loader send it to the main process."""
        return type(self), (self.path, self.reason, self.record)


class NonFiniteError(RecipeError):
    """The loss is no number any more."""


class Stopped(RecipeError):
    """A run that was asked to stop, and can go on later."""


class MissingExtra(RecipeError):
    """A library that only some recipes need."""

    def __init__(self, library: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}: pip install 'ndpp[recipes]'")
