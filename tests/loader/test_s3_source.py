"""S3: regions, credentials, refusals, listings and uploads, against our own server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from botocore.credentials import ReadOnlyCredentials
from tests.support.checkpoints import llama_contents, model_objects
from tests.support.load import patience_s
from tests.support.s3_blob import DATA, read, record
from tests.support.store_faults import Fault
from tests.support.store_http import Request
from tests.support.store_server import StoreServer

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ChangedError,
    NoSpaceError,
    NotFoundError,
    SourceClosedError,
    SourceError,
    UnavailableError,
)
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.xml import parse_page
from teneral.loader.sources.s3.store import S3Store
from teneral.loader.sources.s3.uploads import PART_BYTES

URL = "s3://models/m"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Credentials in the environment, and nothing else that could decide anything."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    (tmp_path / "root" / "models" / "m").mkdir(parents=True)
    (tmp_path / "root" / "models" / "m" / "blob").write_bytes(DATA)
    with StoreServer(tmp_path / "root") as started:
        yield started


@pytest.fixture
def opened(server: StoreServer) -> Iterator[Callable[..., S3Store]]:
    """Makes stores on the server that are closed in the end."""
    stores: list[S3Store] = []

    def open_at(url: str = URL, **options: object) -> S3Store:
        stores.append(
            S3Store(
                url,
                SourceOptions(**{"endpoint_url": server.url, "max_attempts": 2, "outage_s": 0.0, **options}),
            )
        )
        return stores[-1]

    yield open_at
    for store in stores:
        store.close()


def region_of(request: Request) -> str:
    return request.headers["authorization"].split("/")[2]


# Regions


@pytest.mark.parametrize(
    ("status", "code"), [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed")]
)
def test_a_bucket_in_another_region_is_asked_there_from_then_on(
    server: StoreServer, opened: Callable[..., S3Store], status: int, code: str
) -> None:
    elsewhere = Fault(status=status, code=code, headers={"x-amz-bucket-region": "eu-west-1"})
    seen = record(server, lambda request: None if region_of(request) == "eu-west-1" else elsewhere)
    store = opened()
    assert read(store) == DATA
    assert read(store) == DATA
    assert [region_of(request) for request in seen] == ["us-east-1", "eu-west-1", "eu-west-1"]


def test_a_store_that_never_agrees_on_its_region_is_given_up(
    server: StoreServer, opened: Callable[..., S3Store]
) -> None:
    def contradict(request: Request) -> Fault:
        other = "eu-west-1" if region_of(request) == "us-east-1" else "us-east-1"
        return Fault(status=301, code="PermanentRedirect", headers={"x-amz-bucket-region": other})

    seen = record(server, contradict)
    with pytest.raises(SourceError, match="again and again"):
        read(opened())
    assert len(seen) < 20


def test_a_wrong_region_without_the_right_one_says_what_to_set(
    server: StoreServer, opened: Callable[..., S3Store]
) -> None:
    record(server, lambda _: Fault(status=301, code="PermanentRedirect"))
    with pytest.raises(SourceError, match="in another region") as caught:
        read(opened())
    assert "AWS_REGION" in caught.value.hint


@pytest.mark.parametrize("region", ["evil.example.com/x", "a b", "-x", "x" * 80])
def test_a_region_that_a_server_made_up_never_becomes_a_host(
    server: StoreServer, opened: Callable[..., S3Store], region: str
) -> None:
    seen = record(server, lambda _: Fault(status=301, headers={"x-amz-bucket-region": region}))
    with pytest.raises(SourceError, match="region"):
        read(opened())
    assert len(seen) == 1


# Credentials


def test_an_expired_token_is_renewed_once(
    server: StoreServer, opened: Callable[..., S3Store], environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("AWS_SESSION_TOKEN", "old")

    def expire(request: Request) -> Fault | None:
        environment.setenv("AWS_SESSION_TOKEN", "new")  # as a sidecar would have done meanwhile
        is_old = request.headers["x-amz-security-token"] == "old"
        return Fault(status=400, code="ExpiredToken") if is_old else None

    seen = record(server, expire)
    assert read(opened()) == DATA
    assert [request.headers["x-amz-security-token"] for request in seen] == ["old", "new"]


def test_a_token_that_expires_while_many_threads_read_is_renewed_once(
    server: StoreServer, opened: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role's credentials: boto3 hands out a token that is only good for the first requests."""
    tokens: list[str] = []

    class Provider:
        def __init__(self) -> None:
            tokens.append(f"token-{len(tokens)}")
            self._token = tokens[-1]

        def get_frozen_credentials(self) -> ReadOnlyCredentials:
            return ReadOnlyCredentials("AKIATEST", "secret", self._token)

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setattr(boto3.session.Session, "get_credentials", lambda _: Provider())
    all_refused = threading.Barrier(8)

    def expire(request: Request) -> Fault | None:
        if request.headers["x-amz-security-token"] != "token-0" or request.serial == 0:
            return None
        all_refused.wait(
            patience_s(10)
        )  # all eight asked with the old token before any of them could renew it
        return Fault(status=400, code="ExpiredToken")

    record(server, expire)
    store = opened(hedge_after_s=0)
    assert read(store) == DATA
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: read(store), range(8))) == [DATA] * 8
    assert tokens == ["token-0", "token-1"]


def test_an_expired_token_that_cannot_be_renewed_is_an_error(
    server: StoreServer, opened: Callable[..., S3Store], environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("AWS_SESSION_TOKEN", "old")
    seen = record(server, lambda _: Fault(status=400, code="ExpiredToken"))
    with pytest.raises(AccessDeniedError, match="has expired") as caught:
        read(opened())
    assert "new credentials" in caught.value.hint
    assert len(seen) == 1


def test_without_credentials_the_error_lists_the_ways_to_give_them(
    server: StoreServer, opened: Callable[..., S3Store], environment: pytest.MonkeyPatch
) -> None:
    environment.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(AccessDeniedError, match="no credentials") as caught:
        read(opened())
    for way in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "role", "--anonymous"):
        assert way in caught.value.hint
    with pytest.raises(AccessDeniedError, match="no credentials"):
        opened().put("new", b"x")
    assert server.log() == []


def test_an_anonymous_reader_signs_nothing(
    server: StoreServer, opened: Callable[..., S3Store], environment: pytest.MonkeyPatch
) -> None:
    environment.delenv("AWS_ACCESS_KEY_ID")
    seen = record(server)
    assert read(opened(anonymous=True)) == DATA
    assert not [name for name in seen[0].headers if name == "authorization" or name.startswith("x-amz")]


def test_a_requester_who_pays_says_so(server: StoreServer, opened: Callable[..., S3Store]) -> None:
    seen = record(server)
    store = opened(requester_pays=True)
    store.put("other", DATA)
    assert store.read("other", max_bytes=len(DATA))[0] == DATA
    assert [request.headers["x-amz-request-payer"] for request in seen] == ["requester"] * 2


def test_a_named_profile_goes_before_the_environment(
    server: StoreServer, opened: Callable[..., S3Store], tmp_path: Path
) -> None:
    (tmp_path / "aws-credentials").write_text(
        "[work]\naws_access_key_id = AKIAWORK\naws_secret_access_key = x\naws_session_token = t\n"
    )
    (tmp_path / "aws-config").write_text("[profile work]\nregion = ap-south-1\n")
    seen = record(server)
    store = opened(profile="work")
    assert read(store) == DATA
    store.put("new", b"x")
    for request in seen:
        assert "Credential=AKIAWORK/" in request.headers["authorization"]
        assert region_of(request) == "ap-south-1"


def test_a_profile_that_does_not_exist_is_named(opened: Callable[..., S3Store], tmp_path: Path) -> None:
    with pytest.raises(AccessDeniedError, match="missing"):
        read(opened(profile="missing"))
    (tmp_path / "aws-config").write_text("[default]\n")
    with pytest.raises(AccessDeniedError, match="missing"):
        opened(profile="missing")


# Refusals


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "AccessDenied", AccessDeniedError, "access is denied"),
        (403, "InvalidAccessKeyId", AccessDeniedError, "access key is not known"),
        (403, "SignatureDoesNotMatch", AccessDeniedError, "signature is wrong"),
        (400, "InvalidToken", AccessDeniedError, "token is not valid"),
        (403, "RequestTimeTooSkewed", AccessDeniedError, "clock differs"),
        (403, "SomethingNew", AccessDeniedError, "SomethingNew"),
        (404, "NoSuchBucket", NotFoundError, "bucket of s3://models/m does not exist"),
        (404, "NoSuchKey", NotFoundError, "there is no blob in s3://models/m"),
        (403, "InvalidObjectState", SourceError, "archived"),
        (503, "SlowDown", UnavailableError, r"SlowDown.*after 2 attempts"),
        (400, "RequestTimeout", UnavailableError, r"RequestTimeout.*after 2 attempts"),
        (500, "InternalError", UnavailableError, "InternalError"),
        (412, "PreconditionFailed", ChangedError, "another version"),
        (400, "SomethingElse", SourceError, "400 SomethingElse"),
    ],
)
def test_a_refusal_says_what_is_wrong(
    server: StoreServer,
    opened: Callable[..., S3Store],
    status: int,
    code: str,
    kind: type[SourceError],
    words: str,
) -> None:
    record(server, lambda _: Fault(status=status, code=code))
    with pytest.raises(kind, match=words) as caught:
        read(opened())
    assert caught.value.source == URL


@pytest.mark.parametrize(
    "code", ["ExpiredToken", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "AccessDenied"]
)
def test_plain_weights_do_not_stand_in_for_a_manifest_that_is_refused(
    server: StoreServer, opened: Callable[..., S3Store], code: str
) -> None:
    store = opened()
    for name, data in model_objects(llama_contents()).items():
        store.put(name, data)
    store.put("manifest.json", b"{}")
    is_refused = Fault(status=403, code=code)
    record(server, lambda request: is_refused if request.key.endswith("manifest.json") else None)
    with pytest.raises(AccessDeniedError, match=r"manifest\.json"):
        open_artifact(store)


def test_without_a_right_to_list_the_plain_weights_are_found(
    server: StoreServer, opened: Callable[..., S3Store]
) -> None:
    store = opened()
    objects = model_objects(llama_contents())
    for name, data in objects.items():
        store.put(name, data)
    denied = Fault(status=403, code="AccessDenied")
    record(server, lambda request: None if request.key.removeprefix("m/") in objects else denied)
    assert set(open_artifact(store).by_name) == set(llama_contents())


def test_a_missing_bucket_differs_from_a_missing_object(opened: Callable[..., S3Store]) -> None:
    with pytest.raises(NotFoundError, match="bucket of s3://nowhere/m does not exist") as caught:
        opened("s3://nowhere/m").stat("blob")
    assert caught.value.name == ""
    with pytest.raises(NotFoundError, match=r"there is no other in s3://models/m"):
        opened().stat("other")
    with pytest.raises(NotFoundError, match="bucket of s3://nowhere does not exist"):
        list(opened("s3://nowhere").list())


def test_a_refusal_while_writing_says_the_same(server: StoreServer, opened: Callable[..., S3Store]) -> None:
    store = opened()
    for code, status, kind in (
        ("AccessDenied", 403, AccessDeniedError),
        ("NoSuchBucket", 404, NotFoundError),
        ("QuotaExceeded", 403, NoSpaceError),
    ):
        record(server, lambda _, code=code, status=status: Fault(status=status, code=code))
        with pytest.raises(kind) as caught:
            store.put("new", b"x")
        assert caught.value.source == URL


def test_a_store_that_is_not_there_is_unavailable_for_writing(
    opened: Callable[..., S3Store], tmp_path: Path
) -> None:
    with StoreServer(tmp_path / "other") as gone:
        endpoint_url = gone.url
    with pytest.raises(UnavailableError, match="new could not be written"):
        opened(endpoint_url=endpoint_url, max_attempts=1).put("new", b"x")


# Listing


def test_a_long_list_comes_in_pages(
    server: StoreServer, opened: Callable[..., S3Store], tmp_path: Path
) -> None:
    folder = tmp_path / "root" / "models" / "m" / "many"
    folder.mkdir()
    names = sorted(f"many/{number:04d} &+ü" for number in range(1_100))
    for name in names:
        (folder / name.partition("/")[2]).touch()
    seen = record(server)
    assert [info.name for info in opened(hedge_after_s=0).list("many/")] == names
    assert len(seen) == 2


def test_a_folders_own_marker_is_not_an_object(server: StoreServer, opened: Callable[..., S3Store]) -> None:
    page = b"<ListBucketResult><Contents><Key>m/</Key><Size>0</Size></Contents></ListBucketResult>"
    assert [found.key for found in parse_page(page, where="here").objects] == ["m/"]
    server.objects.make_bucket("empty")
    assert list(opened("s3://empty/m").list()) == []


# Uploads


def test_a_large_object_goes_up_in_parts(server: StoreServer, opened: Callable[..., S3Store]) -> None:
    seen = record(server)
    store = opened()
    content = bytes(bytearray(range(256)) * 4) * (2 * PART_BYTES // 1024 + 100)
    with store.create("large") as writer:
        for start in range(0, len(content), 3_000_000):
            writer.write(content[start : start + 3_000_000])
    assert store.read("large", max_bytes=len(content))[0] == content
    sizes = sorted(
        int(request.headers["content-length"]) for request in seen if "partNumber" in request.query
    )
    assert sizes == [len(content) - 2 * PART_BYTES, PART_BYTES, PART_BYTES]
    assert server.objects.pending_uploads() == []


def test_an_aborted_upload_leaves_no_parts(server: StoreServer, opened: Callable[..., S3Store]) -> None:
    writer = opened().create("large")
    writer.write(bytes(2 * PART_BYTES))
    assert len(server.objects.pending_uploads()) == 1
    writer.abort()
    assert server.objects.pending_uploads() == []
    with pytest.raises(NotFoundError):
        opened().stat("large")


@pytest.mark.parametrize("failing", ["part", "completion"])
def test_an_upload_that_fails_leaves_no_parts(
    server: StoreServer, opened: Callable[..., S3Store], failing: str
) -> None:
    def fail(request: Request) -> Fault | None:
        is_part = request.query.get("partNumber") == "2"
        is_completion = request.method == "POST" and "uploadId" in request.query
        return (
            Fault(status=403, code="AccessDenied")
            if (is_part if failing == "part" else is_completion)
            else None
        )

    record(server, fail)
    with pytest.raises(AccessDeniedError, match="large"), opened().create("large") as writer:
        writer.write(bytes(2 * PART_BYTES + 1))
    assert server.objects.pending_uploads() == []


def conflicts(number: int, code: str, method: str) -> Callable[[Request], Fault | None]:
    """The first `number` requests of the method meet another writer."""
    left = iter(range(number))
    fault = Fault(status=409, code=code)
    return lambda request: fault if request.method == method and next(left, None) is not None else None


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_put_that_conflicts_with_another_is_tried_again(
    server: StoreServer, opened: Callable[..., S3Store], code: str
) -> None:
    store = opened()
    server.set_fault(conflicts(3, code, "PUT"))
    store.put("new", b"ours", if_absent=True)
    assert store.read("new", max_bytes=10)[0] == b"ours"
    server.set_fault(conflicts(2, code, "PUT"))
    with pytest.raises(AlreadyExistsError):
        store.put("new", b"late", if_absent=True)


def test_a_conflict_while_parts_are_put_together_is_worth_another_try(
    server: StoreServer, opened: Callable[..., S3Store]
) -> None:
    store = opened()
    seen = record(
        server,
        lambda request: (
            Fault(status=409, code="ConditionalRequestConflict")
            if request.method == "POST" and "uploadId" in request.query
            else None
        ),
    )
    with pytest.raises(UnavailableError), store.create("large", if_absent=True) as writer:
        writer.write(bytes(PART_BYTES + 1))
    assert seen[-1].method == "DELETE", "the parts are removed"


def test_closing_a_store_ends_its_writing(opened: Callable[..., S3Store]) -> None:
    store = opened()
    store.put("new", b"x")
    store.close()
    with pytest.raises(SourceClosedError):
        store.put("newer", b"x")


def test_reading_with_credentials_from_the_environment_never_imports_boto(server: StoreServer) -> None:
    code = (
        "import sys\n"
        "from teneral.loader.sources.open import open_source\n"
        "from teneral.loader.sources.base import SourceOptions\n"
        f"source = open_source({URL!r}, SourceOptions(endpoint_url={server.url!r}))\n"
        "print(len(source.read('blob', max_bytes=1_000_000)[0]), len(list(source.list())))\n"
        "source.close()\n"
        "print([name for name in ('boto3', 'botocore', 'ssl', 'xml', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [f"{len(DATA)} 1", "[]"]
