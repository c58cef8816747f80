"""The only reader of `pool.toml`: a text becomes a frozen `Pool`, or all that is wrong with it is raised.

Does no I/O but reading the file. Knows no platform; limits of platforms are checked where they are rendered.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...loader.errors import UsageError
from ...loader.sources.open import KINDS, forms, scheme_of, split_pin
from . import keys
from .values import (
    Code,
    InstanceSize,
    KeyLines,
    Model,
    Patch,
    Place,
    Pool,
    PoolFileError,
    PoolNode,
    Shadow,
    Slo,
    Versions,
)

DEFAULT_FILE = "pool.toml"
MAX_FILE_BYTES = 1 << 20
MAX_MODELS = 1000
MAX_ALIASES = 1000
MAX_PATCHES = 1000


def read_pool(path: str | Path = DEFAULT_FILE, *, found: Mapping[str, str] | None = None) -> Pool:
    """The pool that a file describes. `found` are sources of models, by name, that it need not name: then the file is
    optional. Raises `PoolFileError`.
    """
    if found and not Path(path).exists():
        return parse_pool("version = 1\n", str(path), found=found)
    place = Place(str(path), "")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PoolFileError(
            Code.E0, place, f"cannot be read: {reason}", hint="Name the file: teneral pool check FILE"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise PoolFileError(Code.E0, place, f"is larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return parse_pool(data.decode("utf-8-sig"), str(path), found=found)
    except UnicodeDecodeError as error:
        raise PoolFileError(Code.E0, place, f"is not UTF-8: {error.reason}") from error


def parse_pool(text: str, file: str = DEFAULT_FILE, *, found: Mapping[str, str] | None = None) -> Pool:
    """The pool that `text` describes; `file` names it in errors. Models that are `found` and that it does not name are
    added, with its defaults. Raises `PoolFileError`: the first one, with `others`.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Its message ends in "(at line 3, column 5)", or "(at end of document)".
        found_line = re.search(r"at line (\d+)", str(error))
        line = int(found_line[1]) if found_line else text.count("\n") + 1
        raise PoolFileError(Code.E0, Place(file, "", line), f"is not TOML: {error}") from error
    except RecursionError as error:
        raise PoolFileError(Code.E0, Place(file, ""), "is nested too deeply") from error
    models = document.setdefault("models", {}) if found else {}
    if isinstance(models, dict):
        named = {str(name).casefold() for name in models}
        models.update(
            {n: {"source": source} for n, source in (found or {}).items() if n.casefold() not in named}
        )
    return _Reader(document, file, KeyLines(text.replace("\r\n", "\n"))).pool()


class _Reader:
    """Turns a parsed document into values. Notes the errors, and goes on with what is right; `pool` raises them."""

    def __init__(self, document: dict[str, Any], file: str, lines: KeyLines) -> None:
        self._document = document
        self._file = file
        self._lines = lines
        self._places = Pool(file, {}, lines=lines)  # finds the lines of keys
        self._errors: dict[str, PoolFileError] = {}  # by their words: a default's is found for each model

    def pool(self) -> Pool:
        """Raises the first error, with the others."""
        self._check_version()
        pool: Pool | None = None
        with self._noting():
            pool = self._pool()
        if self._errors:
            first, *others = self._errors.values()
            first.others = tuple(others)
            if others:
                first.add_note(f"and {len(others)} more: teneral pool check names them all")
            raise first
        assert pool is not None
        return pool

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note an error, and go on behind this context."""
        try:
            yield
        except PoolFileError as error:
            self._errors.setdefault(str(error), error)

    def _pool(self) -> Pool:
        self._check_names(self._document, keys.TOP_KEYS)
        defaults = self._table(("defaults",))
        known = {**keys.MODEL_KEYS, **keys.INSTANCE_KEYS, "serve": keys.Key(keys.table, None, "", "")}
        checked = self._values(defaults, known, "defaults")  # those that no model inherits, too
        size = {
            **{name: value for name, value in checked.items() if name in keys.INSTANCE_KEYS},
            **self._values(self._table(("instance",)), keys.INSTANCE_KEYS, "instance"),
        }
        tables = self._table(("models",))
        if not 1 <= len(tables) <= MAX_MODELS:
            raise self._error(
                Code.E2, f"must hold 1 to {MAX_MODELS:,} models", "models", hint="Add [models.my-model]."
            )
        models: dict[str, Model] = {}
        for name in tables:
            with self._noting():
                models[name] = self._model(name, defaults, size)
        for message, hint, place in keys.check_devices({name: model.serve for name, model in models.items()}):
            with self._noting():
                raise self._error(Code.E2, message, *place, hint=hint)
        self._check_served_names((*tables, *self._table(("aliases",))))
        return Pool(
            file=self._file,
            models=MappingProxyType(models),
            aliases=MappingProxyType(self._aliases(models, tables)),
            instance=InstanceSize.of(size),
            node=self._node(defaults),
            slo=Slo(**self._values(self._table(("slo",)), keys.SLO_KEYS, "slo")),
            patches=tuple(self._patches()),
            lines=self._lines,
        )

    # the parts of the file

    def _check_version(self) -> None:
        version = self._document.get("version")
        if isinstance(version, int) and not isinstance(version, bool) and version > keys.FILE_VERSION:
            raise self._error(
                Code.E11,
                f"is {version}; this program reads {keys.FILE_VERSION}",
                "version",
                hint="Use a newer teneral.",
            )
        if version != keys.FILE_VERSION or isinstance(version, bool):
            raise self._error(
                Code.E2, f"must be {keys.FILE_VERSION}", "version", hint="Begin the file with: version = 1"
            )

    def _model(self, name: str, defaults: dict[str, Any], size: dict[str, Any]) -> Model:
        path = ("models", name)
        if not keys.SERVED_NAME.fullmatch(name):
            raise self._error(
                Code.E2, "must be a name of letters, digits and . _ / -, up to 128 characters", *path
            )
        table = self._table(path)
        self._check_names(table, (*keys.MODEL_KEYS, *keys.MODEL_TABLES), *path)
        inherited = {
            key: value for key, value in defaults.items() if key in keys.MODEL_KEYS and key not in table
        }
        own = {key: value for key, value in table.items() if key in keys.MODEL_KEYS}
        values = {
            **{key: spec.default for key, spec in keys.MODEL_KEYS.items()},
            **self._values(inherited, keys.MODEL_KEYS, "defaults"),
            **self._values(own, keys.MODEL_KEYS, *path),
        }
        if values["source"] is keys.REQUIRED:
            if "source" in table:  # its error is noted
                raise next(reversed(self._errors.values()))
            raise self._error(Code.E2, "needs a source", *path, hint='Add source = "s3://bucket/models/…".')
        if values["max_concurrency"] is None:
            values["max_concurrency"] = 4 * values["target_concurrency"]
        settings, secrets = self._serve(name, defaults)
        own_size = self._values(self._table((*path, "instance")), keys.INSTANCE_KEYS, *path, "instance")
        values["versions"] = Versions.of(values["versions"])
        values["shadow"] = Shadow(**values["shadow"]) if values["shadow"] else None
        values["traffic"] = MappingProxyType(values["traffic"]) if values["traffic"] else None
        model = Model(
            name=name,
            pins=MappingProxyType(self._pins(path)),
            serve=MappingProxyType(settings),
            secrets=MappingProxyType(secrets),
            instance=InstanceSize.of({**size, **own_size}),
            given=frozenset(inherited) | frozenset(own),
            **values,
        )
        self._check_model(model)
        return model

    def _pins(self, path: tuple[str, ...]) -> dict[int, str]:
        pins: dict[int, str] = {}
        for written, digits in self._table((*path, "pins")).items():
            place = (*path, "pins", written)
            version = self._parse(keys.version_number, written, *place)
            digest = digits.removeprefix("b3:").lower() if isinstance(digits, str) else ""
            if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
                raise self._error(
                    Code.E2, "must be the 64 hexadecimal digits that `teneral inspect` shows", *place
                )
            pins[version] = digest
        return pins

    def _serve(self, name: str, defaults: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Settings, and the environment variables of those that are secret."""
        settings: dict[str, Any] = {}
        secrets: dict[str, str] = {}
        for path in (("defaults", "serve"), ("models", name, "serve")):
            for written, value in self._table(path).items():
                with self._noting():
                    self._one_setting((*path, written), value, settings, secrets)
        return settings, secrets

    def _one_setting(
        self, path: tuple[str, ...], value: Any, settings: dict[str, Any], secrets: dict[str, str]
    ) -> None:
        from ...runtime.config import SETTINGS

        written = path[-1]
        base = written.removesuffix("_env")
        if written not in SETTINGS and base in SETTINGS and SETTINGS[base].secret:
            if not isinstance(value, str) or not keys.ENVIRONMENT_NAME.fullmatch(value):
                raise self._error(Code.E2, "must be the name of an environment variable", *path)
            secrets[base] = value
            return
        if written in keys.POOL_SETTINGS:
            raise self._error(
                Code.E1,
                "is not set here: it follows from the pool file's own keys",
                *path,
                hint=keys.POOL_HINTS.get(written, ""),
            )
        if written not in SETTINGS:
            raise self._unknown(written, set(SETTINGS) - keys.POOL_SETTINGS, *path)
        if SETTINGS[written].secret:
            raise self._error(
                Code.E2,
                "is a secret and must not be written into the file",
                *path,
                hint=f'Name an environment variable: {written}_env = "{written.upper()}"',
            )
        settings[written] = self._parse(SETTINGS[written].parse, value, *path)
        self._parse(partial(keys.check_page_setting, written), settings[written], *path)

    def _node(self, defaults: dict[str, Any]) -> PoolNode:
        values = self._values(self._table(("node",)), keys.NODE_KEYS, "node")
        base, store = values.get("standby_base"), {}
        if base is not None:
            place = ("node", "standby_base")
            if not values.get("standby"):
                raise self._error(
                    Code.E2, "needs standby processes", *place, hint="Write standby = 2 as well."
                )
            self._check_address(base, *place)
            from ...runtime.config import STORE_SETTINGS

            settings, _ = self._serve("", defaults)  # those of [defaults.serve]
            store = {name: settings[name] for name in STORE_SETTINGS if name in settings}
        return PoolNode(
            memory_bytes=values.get("memory"),
            standby=values.get("standby", 0),
            standby_memory_bytes=values.get("standby_memory", 0),
            standby_base=base,
            standby_store=MappingProxyType(store),
        )

    def _patches(self) -> Iterable[Patch]:
        written = self._document.get("patch", [])
        if not isinstance(written, list) or len(written) > MAX_PATCHES:
            raise self._error(Code.E2, f"must be at most {MAX_PATCHES:,} tables: [[patch]]", "patch")
        for index, table in enumerate(written):
            path = ("patch", str(index))
            values = self._values(self._parse(keys.table, table, *path), keys.PATCH_KEYS, *path)
            missing = [
                n for n, key in keys.PATCH_KEYS.items() if key.default is keys.REQUIRED and n not in values
            ]
            for name in missing:
                with self._noting():
                    if name not in table:
                        raise self._error(Code.E2, f"needs the key {name}", *path)
            if missing:
                continue
            yield Patch(index, values["platform"], values["kind"], values.get("name"), values["merge"])

    def _aliases(
        self, models: Mapping[str, Model], tables: Mapping[str, Any]
    ) -> dict[str, Mapping[str, int]]:
        """`tables` has models with errors as well."""
        table = self._table(("aliases",))
        if len(table) > MAX_ALIASES:
            raise self._error(Code.E2, f"must hold at most {MAX_ALIASES:,} aliases", "aliases")
        aliases: dict[str, Mapping[str, int]] = {}
        for name, written in table.items():
            with self._noting():
                aliases[name] = self._alias(("aliases", name), written, models, tables)
        return aliases

    def _alias(
        self, path: tuple[str, str], written: Any, models: Mapping[str, Model], tables: Mapping[str, Any]
    ) -> Mapping[str, int]:
        if not keys.SERVED_NAME.fullmatch(path[1]):
            raise self._error(Code.E2, "must be a name of letters, digits and . _ / -", *path)
        targets = {written: 100} if isinstance(written, str) else written
        if not isinstance(targets, dict) or not 1 <= len(targets) <= keys.MAX_VERSIONS:
            raise self._error(Code.E2, "must be a model's name, or a table of weights by model", *path)
        for target, weight in targets.items():
            self._parse(keys.integer(0, 100), weight, *path)
            base = target.partition("@")[0]
            if base in models or base not in tables:  # else its model's error is noted
                self._check_target(target, models, path)
        if sum(targets.values()) != 100:
            raise self._error(Code.E5, f"has weights that sum to {sum(targets.values())}, not 100", *path)
        return MappingProxyType(dict(targets))

    # conditions

    def _check_model(self, model: Model) -> None:
        with self._noting():
            self._check_source(model)
        with self._noting():
            self._check_numbers(model)
        self._check_versions(model)

    def _check_numbers(self, model: Model) -> None:
        path = ("models", model.name)
        if model.min_warm > model.max_instances:
            raise self._error(
                Code.E3,
                f"is {model.min_warm}, more than max_instances, which is {model.max_instances}",
                *path,
                "min_warm",
            )
        if model.max_concurrency < model.target_concurrency:
            raise self._error(
                Code.E4,
                f"is {model.max_concurrency}, less than target_concurrency, which is {model.target_concurrency}",
                *path,
                "max_concurrency",
            )
        if model.min_warm + model.buffer > model.max_instances:
            raise self._error(
                Code.E8,
                f"is {model.buffer}: with min_warm, which is {model.min_warm}, that is more than max_instances, "
                f"which is {model.max_instances}",
                *path,
                "buffer",
            )

    def _check_source(self, model: Model) -> None:
        path = ("models", model.name, "source")
        digest = self._check_address(model.source, *path)
        if digest is not None and model.is_versioned:
            raise self._error(
                Code.E2,
                "cannot pin {version}: each version has a digest of its own",
                *path,
                hint=f"Pin them in [models.{model.name}.pins].",
            )
        if model.base is not None:
            self._check_address(model.base, "models", model.name, "base")

    def _check_address(self, address: str, *path: str) -> bytes | None:
        """The digest that the address is pinned to."""
        scheme = scheme_of(address)
        if scheme not in KINDS:
            raise self._error(
                Code.E2,
                f"has an unknown kind of address, {scheme}://",
                *path,
                hint=f"Give {forms()}.",
            )
        try:
            return split_pin(address)[1]
        except UsageError as error:
            raise self._error(Code.E2, "does not end in a whole pin", *path, hint=error.hint) from error

    def _check_versions(self, model: Model) -> None:
        path = ("models", model.name)
        if not model.is_versioned:
            named: list[str] = [key for key in ("versions", "traffic", "shadow") if key in model.given]
            if named or model.pins:
                key: str = named[0] if named else "pins"
                raise self._error(Code.E5, "names versions, but source has no {version}", *path, key)
            return
        weights = model.weights
        if weights and sum(weights.values()) != 100:
            raise self._error(
                Code.E5, f"has weights that sum to {sum(weights.values())}, not 100", *path, "traffic"
            )
        mentioned: dict[str, set[int]] = {
            "traffic": set(weights),
            "shadow": {model.shadow.version} if model.shadow else set(),
        }
        if model.versions.numbers is not None:
            mentioned["pins"] = set(model.pins)
            for name, numbers in mentioned.items():
                if stray := sorted(numbers - set(model.versions.numbers)):
                    raise self._error(
                        Code.E5, f"names version {stray[0]}, which versions does not serve", *path, name
                    )
        elif model.versions.latest is not None:
            served = mentioned["traffic"] | mentioned["shadow"]
            if len(served) > model.versions.latest:
                raise self._error(
                    Code.E5,
                    f"names {len(served)} versions with the shadow's, but versions serves the latest "
                    f"{model.versions.latest}",
                    *path,
                    "traffic" if weights else "shadow",
                )

    def _check_target(self, target: str, models: Mapping[str, Model], path: tuple[str, ...]) -> None:
        name, at, version = target.partition("@")
        if name not in models:
            near = difflib.get_close_matches(name, models, n=1)
            raise self._error(
                Code.E5,
                f"names {name!r}, which is not a model",
                *path,
                hint=f"Did you mean {near[0]}?" if near else "",
            )
        if at:
            number = self._parse(keys.version_number, version, *path)
            numbers = models[name].versions.numbers
            if not models[name].is_versioned or (numbers is not None and number not in numbers):
                raise self._error(Code.E5, f"names version {number} of {name}, which is not served", *path)

    def _check_served_names(self, names: Iterable[str]) -> None:
        """Names of models and aliases, which clients write in any case."""
        seen: dict[str, str] = {}
        for name in names:
            other = seen.setdefault(name.casefold(), name)
            if other is not name:
                table = "aliases" if name in self._table(("aliases",)) else "models"
                raise self._error(Code.E9, f"is served already, as {other}", table, name)

    # reading

    def _table(self, path: tuple[str, ...]) -> dict[str, Any]:
        """The table at `path`; empty when it is not there."""
        value: Any = self._document
        for name in path:
            if name not in value:
                return {}
            value = value[name]
        table: dict[str, Any] = self._parse(keys.table, value, *path)
        return table

    def _values(self, table: dict[str, Any], known: Mapping[str, keys.Key], *path: str) -> dict[str, Any]:
        self._check_names(table, known, *path)
        values: dict[str, Any] = {}
        for name, value in table.items():
            if name in known:
                with self._noting():
                    values[name] = self._parse(known[name].parse, value, *path, name)
        return values

    def _parse(self, parse: Any, value: Any, *path: str) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise self._error(Code.E2, f"{error}; it is {shown}", *path) from None

    def _check_names(self, table: Mapping[str, Any], known: Iterable[str], *path: str) -> None:
        known = list(known)
        for name in table:
            if name not in known:
                with self._noting():
                    raise self._unknown(name, known, *path, name)

    def _unknown(self, written: str, known: Iterable[str], *path: str) -> PoolFileError:
        near = difflib.get_close_matches(written, sorted(known), n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(sorted(known)[:20])}."
        return self._error(Code.E1, "is not a known key", *path, hint=hint)

    def _error(self, code: Code, message: str, *path: str, hint: str = "") -> PoolFileError:
        return self._places.error(code, message, *path, hint=hint)
