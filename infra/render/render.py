"""From a pool and a platform's name to documents and their texts: the table of renderers. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from ...handlers.pool.codes import PoolWarning
from ...handlers.pool.keys import PLATFORMS
from ...handlers.pool.values import Model, Pool
from ...loader.errors import UsageError
from . import aws_lambda, cloud_run, fargate, knative, kserve, kubernetes, sagemaker
from .documents import Document, Options, Rendering
from .patch import apply_patches
from .yaml_text import yaml_text

RENDERERS: dict[str, Callable[[Rendering, Model], list[Document]]] = {
    "knative": knative.render_model,
    "kserve": kserve.render_model,
    "kubernetes": kubernetes.render_model,
    "cloud-run": cloud_run.render_model,
    "lambda": aws_lambda.render_model,
    "sagemaker": sagemaker.render_model,
    "fargate": fargate.render_model,
}
HEADER = "# Rendered by `teneral pool render {platform}` from {file}: change that file, not this one.\n"


class Rendered(NamedTuple):
    """The documents of one pool on one platform, in the order in which they are applied."""

    platform: str
    file: str
    documents: tuple[Document, ...]
    warnings: tuple[PoolWarning, ...]

    def texts(self) -> dict[str, str]:
        """File name → text of each document."""
        header = HEADER.format(platform=self.platform, file=PurePath(self.file).name)
        return {document.file: header + yaml_text([document.body]) for document in self.documents}

    def stream(self) -> str:
        """All of them in one text."""
        header = HEADER.format(platform=self.platform, file=PurePath(self.file).name)
        return header + yaml_text([document.body for document in self.documents])


def render(
    pool: Pool,
    platform: str,
    *,
    options: Options | None = None,
    weight_bytes: Mapping[str, int] | None = None,
    model: str | None = None,
) -> Rendered:
    """Raises `PoolFileError` for what the platform cannot do, `UsageError` for a name that is unknown."""
    if platform not in RENDERERS:
        raise UsageError(
            f"unknown platform {platform!r}", key="platform", hint=f"Name one of {', '.join(RENDERERS)}."
        )
    rendering = Rendering(pool, platform, options or Options(), weight_bytes or {})
    documents = [
        document for each in chosen_models(pool, model) for document in RENDERERS[platform](rendering, each)
    ]
    patched = apply_patches(rendering, documents, every=model is None)
    return Rendered(platform, pool.file, tuple(patched), tuple(rendering.warnings))


def chosen_models(pool: Pool, name: str | None) -> Sequence[Model]:
    if name is None:
        return tuple(pool)
    if name not in pool.models:
        raise UsageError(
            f"unknown model {name!r}", key="--model", hint=f"{pool.file} has {', '.join(pool.models)}."
        )
    return (pool.models[name],)


def known_platforms() -> tuple[str, ...]:
    return tuple(name for name in PLATFORMS if name in RENDERERS)
