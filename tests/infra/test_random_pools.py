"""300 random valid pools on every platform pass its validators; random invalid ones are refused with the right code.

How many: `TENERAL_TEST_POOLS`, for `scripts/conformance-infra`. cfn-lint takes a second a template, so templates are
linted for a share of the pools here, and checked by AWS's own request shapes for all.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.infra_validators import (
    check_cloudformation,
    check_kubernetes,
    check_policies,
    check_requests,
    read_documents,
)
from tests.support.pool_files import IMAGE, models, pool_files, render_text, toml

from teneral.handlers.pool.values import PoolFileError
from teneral.infra.render.limits import LIMITS
from teneral.infra.render.render import RENDERERS

POOLS = int(os.environ.get("TENERAL_TEST_POOLS", "20"))
LINTED = int(os.environ.get("TENERAL_TEST_LINTED", "0")) or max(1, POOLS // 30)
CHECKS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("platform", RENDERERS)
def test_random_pools_pass_their_platforms_validators(platform):
    linted = []

    @settings(max_examples=POOLS, **CHECKS)
    @given(pool_files(platform))
    def check(text):
        rendered = render_text(text, platform)
        assert rendered.texts() == render_text(text, platform).texts()
        bodies = [body for text in rendered.texts().values() for body in read_documents(text)]
        assert bodies == [document.body for document in rendered.documents]
        if bodies[0].get("apiVersion"):
            check_kubernetes(bodies)
            return
        if platform in ("helm", "ray"):
            return  # test_helm.py compares the chart's documents, test_ray_serve.py asks Ray's own schema
        for template in bodies:
            check_policies(template)
            check_requests(template)
        if len(linted) < LINTED:
            linted.append(text)
            check_cloudformation(next(iter(rendered.texts().values())))

    check()


@pytest.mark.parametrize("platform", [name for name in RENDERERS if LIMITS[name]])
def test_random_pools_with_one_value_beyond_a_limit_are_e6(platform):
    limits = [limit for limit in LIMITS[platform] if not limit.key.startswith("instance.")]

    @settings(max_examples=POOLS, **CHECKS)
    @given(models(platform), st.sampled_from(limits), st.floats(1.01, 3))
    def check(model, limit, factor):
        top = {
            "idle_timeout_s": 86_400,
            "request_timeout_s": 3600,
            "drain_s": 3600,
            "max_concurrency": 65_536,
        }
        value = min(top[limit.key], limit.high * factor)
        value = int(value) + 1 if limit.key == "max_concurrency" else value
        if value <= limit.high:
            return  # the file's own range ends where the platform's does
        model[limit.key] = value
        if limit.key == "request_timeout_s":
            model.pop("drain_s", None)
        text = toml(
            {"version": 1, "instance": {"image": IMAGE, "cpu": 2, "memory": "4GiB"}, "models": {"m": model}}
        )
        with pytest.raises(PoolFileError) as caught:
            render_text(text, platform)
        assert caught.value.code == "E6"
        assert caught.value.place.key == f"models.m.{limit.key}"

    check()
