"""The choice of a model and a version for a request: names, aliases, weights and sticky keys.

Pure but for the counters of requests that have no key. It knows no HTTP and no instances.

The parts of a request's body that the front reads: the model, the sticky key, and the prompt's
prefix.

Other values stay bytes, and a body whose model is renamed keeps them unchanged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from ..http.errors import ApiError
from .keys import VERSION_NAME
from .values import Pool

T = TypeVar("T", bound=Hashable)


class Target(NamedTuple):
    """A model, and the version that the request names; None: by the model's weights."""

    model: str
    version: int | None = None


def rendezvous(weights: Mapping[T, int], key: str) -> T:
    """The choice that `key` always gets, by weighted rendezvous hashing: a change of weights moves only the share of
    keys that it must. At least one weight is positive.
    """

    def score(choice: T) -> float:
        digest = hashlib.blake2b(f"{choice}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        draw = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
        return -math.log(draw) / weights[choice]

    return min((choice for choice, weight in weights.items() if weight > 0), key=score)


class RoundRobin(Generic[T]):
    """Choices in turn by weight, as evenly mixed as whole requests allow (smooth weighted round robin)."""

    def __init__(self) -> None:
        self._credit: dict[T, int] = {}

    def next(self, weights: Mapping[T, int]) -> T:
        """At least one weight is positive. Weights may change from call to call."""
        if self._credit.keys() != weights.keys():
            self._credit = {choice: self._credit.get(choice, 0) for choice in weights}
        for choice, weight in weights.items():
            self._credit[choice] += weight
        chosen = max(
            (choice for choice, weight in weights.items() if weight > 0), key=self._credit.__getitem__
        )
        self._credit[chosen] -= sum(weights.values())
        return chosen


class Chooser:
    """Targets by served name. One per pool; used on one thread."""

    def __init__(self) -> None:
        self._turns: dict[str, RoundRobin[str]] = {}
        self._version_turns: dict[str, RoundRobin[int]] = {}

    def target(self, pool: Pool, name: str, key: str | None) -> Target | None:
        """The target of a served name: `name`, `name@8` or an alias, whatever its case. None where there is none."""
        base, _, version = name.partition("@")
        found = _find(pool.models, base)
        if found is not None:
            if not version:
                return Target(found)
            return Target(found, int(version)) if VERSION_NAME.fullmatch(version) else None
        alias = _find(pool.aliases, name)
        if alias is None:
            return None
        weights = pool.aliases[alias]
        turns = self._turns.setdefault(alias, RoundRobin())
        chosen = rendezvous(weights, key) if key is not None else turns.next(weights)
        base, _, version = chosen.partition("@")
        return Target(base, int(version) if version else None)

    def version(self, model: str, weights: Mapping[int, int], key: str | None) -> int:
        """By these weights, of which one is positive; the same for the same key."""
        if len(weights) == 1:
            return next(iter(weights))
        if key is not None:
            return rendezvous(weights, key)
        return self._version_turns.setdefault(model, RoundRobin()).next(weights)


def _find(names: Mapping[str, object], name: str) -> str | None:
    """The name as the file has it."""
    if name in names:
        return name
    folded = name.casefold()
    return next((each for each in names if each.casefold() == folded), None)


MAX_KEY_CHARS = 512
PREFIX_BYTES = (
    256,
    1024,
    4096,
)  # of a prompt as it stands in the body: the lengths at which beginnings are compared


class _Fields(msgspec.Struct):
    """The fields that the front reads, as bytes; b'' for those that are not there."""

    model: msgspec.Raw = msgspec.Raw()
    teneral: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_READ_DECODER = msgspec.json.Decoder(_Fields)
_WHOLE_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Teneral(msgspec.Struct):
    session: str | None = None


@dataclass(slots=True)
class Body:
    """A request's JSON object, of which only `fields` are taken apart: a million others cost nothing."""

    data: bytes
    fields: _Fields
    model: str | None  # without the adapter
    session: str | None  # the sticky key that the body gives
    adapter: str = ""  # of `model: "base:name"`, with its colon: the instance knows it, and the pool does not

    @classmethod
    def parse(cls, data: bytes) -> Body:
        """Parse a body. Raises `ApiError` with 400 if it is not a JSON object, or its model is not
        a text.
        """
        try:
            fields = _READ_DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not a JSON object: {str(error)[:200]}") from None
        model = _text(fields.model, "model")
        session = None
        if fields.teneral:
            try:
                session = msgspec.json.decode(fields.teneral, type=_Teneral).session
            except (msgspec.DecodeError, RecursionError):
                session = None  # the instance says what is wrong with it
        if session is None:
            try:
                session = _text(fields.user, "user")
            except ApiError:
                session = None
        name, colon, adapter = (model or "").partition(":")
        return cls(data, fields, name or model, session[:MAX_KEY_CHARS] if session else None, colon + adapter)

    def named(self, model: str) -> bytes:
        """The body with this model in place of the one that it names; the adapter stays."""
        if self.model is None or self.model == model:
            return self.data
        fields: dict[str, Any] = {**_WHOLE_DECODER.decode(self.data), "model": model + self.adapter}
        return msgspec.json.encode(fields)

    def prefixes(self) -> list[bytes]:
        """Digests of the prompt's beginning, longest first."""
        prompt = bytes(self.fields.messages or self.fields.prompt)
        lengths = [length for length in PREFIX_BYTES if length <= len(prompt)]
        return [hashlib.blake2b(prompt[:length], digest_size=8).digest() for length in reversed(lengths)]


def _text(value: msgspec.Raw, name: str) -> str | None:
    if not value:
        return None
    try:
        return msgspec.json.decode(value, type=str | None)
    except msgspec.DecodeError:
        raise ApiError(400, f"{name} must be a text", param=name) from None
