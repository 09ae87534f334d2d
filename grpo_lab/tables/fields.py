"""A file of a definition, read key by key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_lab.config import ConfigError
from grpo_lab.tables.when import When

SCALES = ("paper", "tiny")


class Fields:
    """A mapping read key by key: a wrong or unknown one is an error with its place."""

    def __init__(self, file: str, where: str, raw: Any) -> None:
        if not isinstance(raw, dict):
            raise ConfigError(f"{file}: {where or 'the file'} must hold keys and values")
        self.file, self.where, self.raw = file, where, dict(raw)

    def fail(self, key: str, said: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self.where}{key} {said}")

    def maybe(self, key: str, *kinds: type) -> Any:
        value = self.raw.pop(key, None)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise self.fail(key, f"must be {' or '.join(kind.__name__ for kind in kinds)}, not {value!r}")
        return value

    def maybe_one_of(self, key: str, choices: tuple[str, ...]) -> str | None:
        return self.one_of(key, choices) if self.raw.get(key) is not None else None

    def when(self) -> When:
        try:
            return When.read(self.maybe("when", str) or "end")
        except ValueError as error:
            raise self.fail("when", str(error)) from error

    def take(self, key: str, *kinds: type) -> Any:
        value = self.maybe(key, *kinds)
        if value is None:
            raise self.fail(key, "is missing")
        return value

    def one_of(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.take(key, str)
        if value not in choices:
            raise self.fail(key, f"is {value!r}: choose {', '.join(choices)}")
        return str(value)

    def numbers(self, key: str) -> list[int]:
        values = self.maybe(key, list) or []
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise self.fail(key, f"holds {value!r}: it takes whole numbers")
        return values

    def each_of(self, key: str, choices: tuple[str, ...]) -> list[str]:
        values = self.maybe(key, list) or []
        for value in values:
            if value not in choices:
                raise self.fail(key, f"holds {value!r}: choose from {', '.join(choices)}")
        return values

    def parts(self, key: str) -> Iterator[Fields]:
        for index, each in enumerate(self.maybe(key, list) or []):
            yield Fields(self.file, f"{key}[{index}].", each)

    def scaled(self, key: str, *kinds: type) -> dict[str, Any]:
        values = Fields(self.file, f"{key}.", self.maybe(key, dict) or {})
        found = {scale: values.maybe(scale, *kinds) for scale in SCALES}
        values.end()
        return {scale: value for scale, value in found.items() if value is not None}

    def end(self) -> None:
        for key in self.raw:
            raise self.fail(str(key), "is not known")
