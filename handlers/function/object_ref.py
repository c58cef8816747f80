"""A reference to an object of a store, from an event. Pure; it knows no events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...runtime.errors import RequestError

MAX_ADDRESS_CHARS = 1_200
FORMS = {"s3": "s3://bucket/key", "gs": "gs://bucket/key", "az": "az://account/container/key"}


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object's version with this ETag (in Cloud Storage: generation) or id; '' for the current
    one.

    In Azure, `bucket` is the container and `account` the storage account; elsewhere there is no
    account.
    """

    bucket: str
    key: str
    etag: str = ""
    version_id: str = ""
    scheme: str = "s3"
    account: str = ""

    @classmethod
    def parse(cls, address: Any, *, param: str = "", schemes: tuple[str, ...] = ("s3",)) -> ObjectRef:
        """Parse an address in one of these kinds of stores. Raises `RequestError`."""
        scheme, _, rest = address.partition("://") if isinstance(address, str) else ("", "", "")
        place = rest
        account = ""
        if scheme == "az":
            account, _, place = rest.partition("/")
        bucket, _, key = place.partition("/")
        is_whole = bool(bucket and key and (account or scheme != "az"))
        if scheme not in schemes or not is_whole or len(rest) > MAX_ADDRESS_CHARS:
            forms = [FORMS[name] for name in schemes]
            shown = " or ".join([", ".join(forms[:-1]), forms[-1]] if forms[1:] else forms)
            raise RequestError(f"{param or 'the address'} must be {shown}", param=param)
        return cls(bucket, key, scheme=scheme, account=account)

    @property
    def root(self) -> str:
        """The address of the bucket, or of the account's container."""
        return (
            f"{self.scheme}://{self.account}/{self.bucket}"
            if self.account
            else f"{self.scheme}://{self.bucket}"
        )

    @property
    def url(self) -> str:
        return f"{self.root}/{self.key}"
