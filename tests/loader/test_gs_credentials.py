"""Cloud Storage's credential files: federations, logins and keys of service accounts, and what is wrong with them."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import google.auth.exceptions
import google.auth.iam
import google.oauth2.credentials
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from tests.support.gs_server import Call, GsServer, Reply, serving_blob

from teneral.loader.errors import AccessDeniedError, UnavailableError
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.gs.store import GsStore

DATA = bytes(range(256))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GsServer]:
    with serving_blob(monkeypatch, DATA) as server:
        yield server


@pytest.fixture
def store(server: GsServer) -> Iterator[GsStore]:
    opened = GsStore("gs://models/a model", SourceOptions(endpoint_url=server.url))
    yield opened
    opened.close()


def give_file(folder: Path, monkeypatch: pytest.MonkeyPatch, settings: object) -> Path:
    path = folder / "credentials.json"
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    return path


RSA_KEY = rsa.generate_private_key(65537, 2048)
EMAIL = "reader@my-project.iam.gserviceaccount.com"
GOOGLES = "https://oauth2.googleapis.com/token"
IMPERSONATION = f"/v1/projects/-/serviceAccounts/{EMAIL}:generateAccessToken"


def pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, password: bytes | None = None) -> str:
    """PKCS 8, as Google Cloud gives keys out."""
    cipher = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, cipher).decode()


def account_key(**more: object) -> dict[str, object]:
    kept = {"client_email": EMAIL, "private_key_id": "key-1", "private_key": pem(RSA_KEY)}
    kept["token_uri"] = GOOGLES
    return {"type": "service_account", "project_id": "my-project", **kept, **more}


def federation(server: GsServer, folder: Path, **more: object) -> dict[str, object]:
    (folder / "subject").write_text("identity")
    return {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{server.url}/v1/token",
        "credential_source": {"file": str(folder / "subject")},
        **more,
    }


class TokenService:
    """The fault hook that answers as Google's token services do."""

    def __init__(self) -> None:
        self.forms: list[dict[str, str]] = []

    def __call__(self, call: Call) -> Reply | None:
        from urllib.parse import parse_qsl

        if call.path == "/v1/token":
            self.forms.append(dict(parse_qsl(call.body.decode())))
            return 200, {}, b'{"access_token": "federated", "expires_in": 3600}'
        if call.path == IMPERSONATION:
            assert call.headers["authorization"] == "Bearer federated"
            settings = {"accessToken": "token-1", "expireTime": "2100-01-01T00:00:00Z"}
            return 200, {}, json.dumps(settings).encode()
        if call.path == "/subject":
            assert call.headers["metadata"] == "True"
            return 200, {}, b'{"token": "from-url"}'
        return None


def test_workload_identity_federation_exchanges_a_files_token(
    server: GsServer, store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_file(tmp_path, monkeypatch, federation(server, tmp_path))
    server.fault = service = TokenService()
    server.tokens = {"federated"}
    store.stat("blob")
    store.stat("blob")
    assert [form["subject_token"] for form in service.forms] == ["identity"]
    assert service.forms[0]["grant_type"].endswith("token-exchange")
    assert server.num_tokens_asked == 0


def test_federation_may_impersonate_an_account_and_ask_an_address(
    server: GsServer, store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {
        "url": f"{server.url}/subject",
        "headers": {"Metadata": "True"},
        "format": {"type": "json", "subject_token_field_name": "token"},
    }
    more = {
        "service_account_impersonation_url": f"{server.url}{IMPERSONATION}",
        "credential_source": source,
    }
    give_file(tmp_path, monkeypatch, federation(server, tmp_path, **more))
    server.fault = service = TokenService()
    store.stat("blob")
    assert service.forms[0]["subject_token"] == "from-url"


def test_federation_takes_the_role_of_a_machine_of_aws(
    server: GsServer, store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, name.lower())
    source = {
        "environment_id": "aws1",
        "regional_cred_verification_url": "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity",
    }
    more = {
        "subject_token_type": "urn:ietf:params:aws:token-type:aws4_request",
        "credential_source": source,
    }
    give_file(tmp_path, monkeypatch, federation(server, tmp_path, **more))
    server.fault = service = TokenService()
    server.tokens = {"federated"}
    store.stat("blob")
    assert "sts.aws_region.amazonaws.com" in service.forms[0]["subject_token"]


def test_the_login_of_gcloud_is_found_and_used(
    server: GsServer, store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"client_id": "id", "client_secret": "s", "refresh_token": "r"}
    monkeypatch.setattr(google.oauth2.credentials, "_GOOGLE_OAUTH2_TOKEN_ENDPOINT", f"{server.url}/v1/token")
    path = give_file(tmp_path, monkeypatch, {"type": "authorized_user", **settings})
    path.rename(tmp_path / "application_default_credentials.json")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    server.fault = service = TokenService()
    server.tokens = {"federated"}
    store.stat("blob")
    assert service.forms == [
        {"grant_type": "refresh_token", "client_id": "id", "client_secret": "s", "refresh_token": "r"}
    ]


def decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def test_a_service_accounts_key_signs_for_its_token(
    server: GsServer, store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_file(tmp_path, monkeypatch, account_key(token_uri=f"{server.url}/v1/token"))
    server.fault = service = TokenService()
    server.tokens = {"federated"}
    store.stat("blob")
    store.stat("blob")
    (form,) = service.forms
    assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
    header, claims, signature = form["assertion"].split(".")
    key = RSA_KEY.public_key()
    key.verify(decoded(signature), f"{header}.{claims}".encode(), padding.PKCS1v15(), hashes.SHA256())
    assert json.loads(decoded(header)) == {"alg": "RS256", "typ": "JWT", "kid": "key-1"}
    content = json.loads(decoded(claims))
    assert content.pop("exp") - content["iat"] == 3600
    assert abs(content.pop("iat") - time.time()) < 60
    scope = "https://www.googleapis.com/auth/devstorage.read_write"
    assert content == {"iss": EMAIL, "scope": scope, "aud": GOOGLES}
    assert server.num_tokens_asked == 0


def test_a_key_that_the_token_service_refuses_says_why(
    server: GsServer, store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_file(tmp_path, monkeypatch, account_key(token_uri=f"{server.url}/v1/token"))
    refusal = {"error": "invalid_grant", "error_description": "Invalid JWT Signature."}
    server.fault = lambda call: (400, {}, json.dumps(refusal).encode()) if call.path == "/v1/token" else None
    with pytest.raises(AccessDeniedError, match=r"invalid_grant: Invalid JWT Signature\."):
        store.stat("blob")


def test_a_credential_file_without_google_auth_names_the_ways_out(
    store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_file(tmp_path, monkeypatch, account_key())
    monkeypatch.delattr(google.auth, "exceptions")
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    with pytest.raises(AccessDeniedError, match="google-auth") as caught:
        store.stat("blob")
    assert "pip install 'teneral[gs]'" in caught.value.hint
    assert "gcloud auth application-default login" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (account_key(private_key="secret"), "PEM"),
        (account_key(private_key=pem(ec.generate_private_key(ec.SECP256R1()))), "ECPrivateKey"),
        (account_key(private_key=pem(RSA_KEY, password=b"secret")), "is encrypted"),
        (account_key(private_key="\ud800"), "can't encode"),
        (account_key(private_key=["secret"]), "private_key is not a text"),
        (account_key(token_uri="http://oauth2.example/token"), "https"),
        ({"type": "service_account", "client_email": "a@b"}, "missing fields token_uri"),
        ({"type": "gdch"}, "'gdch'"),
        ({"type": "authorized_user", "client_id": "id"}, "client_secret"),
        ({"type": "external_account", "audience": "a"}, "valid credential source"),
        ("no JSON", "not a JSON object"),
        ("[]", "not a JSON object"),
        (" " * 70_000, "larger"),
    ],
)
def test_a_credential_file_that_cannot_be_used_says_why(
    store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: object, message: str
) -> None:
    give_file(tmp_path, monkeypatch, settings)
    with pytest.raises(AccessDeniedError, match=message) as caught:
        store.stat("blob")
    assert "secret" not in str(caught.value).replace("client_secret", "")


def test_secrets_go_to_https_addresses_only(
    server: GsServer, store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"token_url": "http://sts.example/v1/token"}
    give_file(tmp_path, monkeypatch, federation(server, tmp_path, **more))
    with pytest.raises(AccessDeniedError, match="https"):
        store.stat("blob")


def test_a_missing_credential_file_is_named(store: GsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nonexistent.json")
    with pytest.raises(AccessDeniedError, match=r"/nonexistent\.json"):
        store.stat("blob")


def test_a_file_of_impersonation_asks_for_the_other_account(
    server: GsServer, store: GsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gcloud auth application-default login --impersonate-service-account` writes such a file."""
    settings = {
        "type": "impersonated_service_account",
        "service_account_impersonation_url": f"{server.url}{IMPERSONATION}",
        "source_credentials": account_key(token_uri=f"{server.url}/v1/token"),
    }
    endpoint = server.url + IMPERSONATION.replace(EMAIL, "{}")
    monkeypatch.setattr(google.auth.iam, "_IAM_ENDPOINT", endpoint)
    give_file(tmp_path, monkeypatch, settings)
    server.fault = TokenService()
    assert store.stat("blob").size_bytes == len(DATA)


def test_a_token_service_that_is_away_is_worth_another_try(
    server: GsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_file(tmp_path, monkeypatch, account_key(token_uri="http://127.0.0.1:9/token"))
    store = GsStore("gs://models/x", SourceOptions(endpoint_url=server.url, max_attempts=1, outage_s=0.0))
    with pytest.raises(UnavailableError, match="does not answer"):
        store.stat("blob")
    store.close()
