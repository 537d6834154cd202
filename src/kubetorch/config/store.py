"""The settings in a file: `~/.kt/config.yaml`, a plain YAML map."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kubetorch.errors import ConfigError

#: Seconds that a program waits for another that writes.
_PATIENCE = 10.0


def read_yaml(path: Path) -> object:
    """What a YAML file says; `None` when there is none, or nothing in it.

    Raises:
        ConfigError: It cannot be read, or is no YAML.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    import yaml  # noqa: PLC0415  # 13 ms, only where there is a file

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found: object = yaml.load(content, Loader=loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid YAML: {error}") from error
    return found


class SettingsFile:
    """The file; read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._values: dict[str, object] = {}

    def values(self) -> Mapping[str, object]:
        """What the file says; values of YAML's `null` are left out.

        Raises:
            ConfigError: It cannot be read, or is no map.
        """
        try:
            facts = self.path.stat()
        except OSError:  # what is wrong, other than that there is no file, is said on reading
            stamp = None
        else:
            stamp = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        if stamp is None or stamp != self._stamp:
            self._values = self._read()
            self._stamp = stamp
        return self._values

    def merge(self, values: Mapping[str, object]) -> None:
        """Write these values into the file; `None` removes one.

        Raises:
            ConfigError: It cannot be read or written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._alone():
                merged = {**self._read(), **values}
                self._write({key: value for key, value in merged.items() if value is not None})
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error
        self._stamp = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other program changes the file meanwhile: what it writes would be lost."""
        from kubetorch.lib.locking import FileLock  # noqa: PLC0415  # reading needs none

        lock = FileLock(self.path.parent)
        try:
            if not lock.get(_PATIENCE):
                raise ConfigError(
                    f"{self.path} is being written by another program for {_PATIENCE:g} s"
                )
            yield
        finally:
            lock.close()

    def _write(self, values: Mapping[str, object]) -> None:
        import yaml  # noqa: PLC0415  # 13 ms, only where there is a file

        content = yaml.safe_dump(values, sort_keys=True, allow_unicode=True) if values else ""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(self.path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _read(self) -> dict[str, object]:
        found = read_yaml(self.path)
        if found is None:
            return {}
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise ConfigError(
                f"{self.path} must be a map of settings", hint="one line for each: `name: value`"
            )
        return {key: value for key, value in found.items() if value is not None}
