"""A setting, and the parsers of the values that users write: each returns the value, or raises
ValueError with what is allowed.

Knows no setting by name; `config.py` has the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, TypeVar

from ..loader.sources.open import KINDS, forms, scheme_of

T = TypeVar("T")
_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("b", 1000), ("ib", 1024))
}


def text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be a text")
    return value


def store_address(value: Any) -> str:
    """The address of a folder in a store that can be written to."""
    kind = KINDS.get(scheme_of(text(value)))
    if kind is None or not kind.is_store:
        raise ValueError(f"must be {forms(stores=True)}")
    return text(value)


def boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    table = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if not isinstance(value, str) or value.lower() not in table:
        raise ValueError("must be true or false")
    return table[value.lower()]


def integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return parse


def automatic(low: int, high: int) -> Callable[[Any], int | str]:
    """Of `auto`, `off`, which is 0, or a whole number."""
    number = integer(low, high)

    def parse(value: Any) -> int | str:
        if value == "auto":
            return "auto"
        if value in ("off", False):
            return 0
        try:
            return number(value)
        except ValueError:
            raise ValueError(f"must be auto, off or a whole number from {low} to {high}") from None

    return parse


def seconds(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"must be a number of seconds from {low:g} to {high:g}")
        return float(value)

    return parse


def parse_bytes(value: Any) -> int:
    """Bytes from a whole number or a text like '512MiB' or '2 GB'. Raises ValueError saying what is
    allowed.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 50:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,15})(\.\d{1,6})?\s*([A-Za-z]{0,3})\s*", value)
        if match and re.fullmatch("[KMGT]i?b", match[3]):  # as networks write bits
            size, unit = f"{match[1]}{match[2] or ''}", match[3][:-1]
            raise ValueError(f"must be in bytes: {size}{unit}b may be bits; write {size}{unit}B for bytes")
        if match and match[3].lower() in _SIZE_UNITS:
            size_bytes = int(float(match[1] + (match[2] or "")) * _SIZE_UNITS[match[3].lower()])
            if 0 < size_bytes < 1 << 50:
                return size_bytes
    raise ValueError("must be a size such as 512MiB, 2GB or a number of bytes")


def json_object(value: Any) -> str:
    """The JSON of an object, or of its JSON; the same text for the same fields."""
    import json  # few configurations have such a setting

    try:
        found = json.loads(value) if isinstance(value, str) else value
        if isinstance(found, dict):
            return json.dumps(found, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        pass
    raise ValueError('must be an object of JSON, such as {"language": "en"}')


def choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return str(value)

    return parse


def names(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        given = [name.strip().lower() for name in value.split(",")] if isinstance(value, str) else []
        if not given or len(set(given)) != len(given) or not set(given) <= set(allowed):
            raise ValueError(f"must be some of {', '.join(allowed)}, with commas between them")
        return ",".join(given)

    return parse


def template(*allowed: str, required: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        # Few configurations have such a setting.
        from .address_template import AddressTemplate

        return AddressTemplate.parse(value, allowed=allowed, required=required).text

    return parse


class Setting(NamedTuple):
    """A setting. `parse` makes its value from the user's text, or raises ValueError with the
    allowed values.
    """

    default: Any
    parse: Callable[[Any], Any]
    help: str
    metavar: str
    secret: bool  # masked in output
    is_common: bool  # people use it: `serve --help` shows it, and not `--help-all` alone
    group: str


_group = ""  # of the settings that are being made


def group(title: str) -> None:
    """The settings that follow in the table are of this group."""
    global _group  # noqa: PLW0603 - while one module is imported
    _group = title


def setting(
    default: Any,
    parse: Callable[[Any], Any],
    help: str,
    *,
    metavar: str = "",
    secret: bool = False,
    is_common: bool = False,
) -> Any:
    return Setting(default, parse, help, metavar, secret, is_common, _group)


class Settings:
    """A frozen value with a field for each `Setting` of its class, like a dataclass: importing dataclasses, and having
    one made, takes a tenth of the time until the first range is requested.
    """

    table: ClassVar[dict[str, Setting]]  # by name, in the class's order

    def __init_subclass__(cls) -> None:
        cls.table = {name: value for name, value in vars(cls).items() if isinstance(value, Setting)}

    def __init__(self, **values: Any) -> None:
        """Make a configuration of these values and defaults; they are valid, or come from `resolve`."""
        if unknown := values.keys() - self.table.keys():
            raise TypeError(f"there are no settings {', '.join(sorted(unknown))}")
        for name, known in self.table.items():
            object.__setattr__(self, name, values.get(name, known.default))

    def replace(self, **changes: Any) -> Self:
        """A copy with these changes."""
        return type(self)(**self.as_dict() | changes)

    def as_dict(self) -> dict[str, Any]:
        """The arguments that make an equal configuration."""
        return dict(vars(self))

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError(f"a configuration is immutable: {name}")

    __delattr__ = __setattr__

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in vars(self).items() if not self.table[name].secret)
        return f"{type(self).__name__}({', '.join(shown)})"

    def options(self, kind: Callable[..., T], **more: Any) -> T:
        """A room's options, a NamedTuple or a Struct: each field that a setting has the name of, and `more`."""
        names: tuple[str, ...] = getattr(kind, "_fields", ()) or getattr(kind, "__struct_fields__", ())
        own = {name: value for name, value in vars(self).items() if name in names}
        return kind(**{**own, **more})
