"""Documents and their texts, from a pool and a platform's name: the table of renderers, and
`[[patch]]`.

A patch is a JSON merge patch (RFC 7386) on a rendered document; patches are applied last. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple

from ...handlers.pool.keys import PATH_SETTINGS
from ...handlers.pool.values import Code, Model, Pool, PoolWarning
from ...loader.errors import UsageError
from ...loader.sources.open import scheme_of
from . import aws_lambda, cloud_run, deploy, fargate, knative, kserve, kubernetes, ray, sagemaker
from .documents import ModelSize, Options, RenderedDocument, Rendering
from .limits import FOLDERS
from .yaml_text import yaml_text

Renderer = Callable[[Rendering, Sequence[Model]], list[RenderedDocument]]


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386's result: mappings are merged, null removes, everything else replaces. Changes
    neither argument.
    """
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def apply_patches(
    rendering: Rendering, documents: Iterable[RenderedDocument], *, every: bool = True
) -> list[RenderedDocument]:
    """The documents with the file's patches for this platform. A patch that changes a rendered
    value, instead of adding one, is W4; one that fits no document is E2 where these are `every`
    document of the pool.
    """
    patched = list(documents)
    for patch in rendering.pool.patches:
        if patch.platform != rendering.platform:
            continue
        fits = [
            number
            for number, document in enumerate(patched)
            if document.kind == patch.kind and patch.name in (None, document.name)
        ]
        if not fits and every:
            named = sorted({f"{document.kind} {document.name}" for document in patched})
            raise rendering.pool.error(
                Code.E2,
                f"fits none of {rendering.platform}'s documents",
                "patch",
                str(patch.index),
                hint=f"There are {', '.join(named)}.",
            )
        for number in fits:
            document = patched[number]
            for path in changed_values(document.body, patch.merge):
                warning = rendering.pool.warning(
                    Code.W4,
                    f"changes {'.'.join(path)} of {document.kind} {document.name}",
                    "patch",
                    str(patch.index),
                )
                if warning not in rendering.warnings:
                    rendering.warnings.append(warning)
            patched[number] = replace(document, body=merge_patch(document.body, patch.merge))
    return patched


def changed_values(
    target: Any, patch: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Paths of existing values that the patch changes or removes."""
    for key, value in patch.items():
        if not isinstance(target, Mapping) or key not in target:
            continue
        here, before = (*path, key), target[key]
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from changed_values(before, value, here)
        elif before != value:
            yield here


def _each(render_model: Callable[[Rendering, Model], list[RenderedDocument]]) -> Renderer:
    """The renderer of a platform that deploys models one by one."""
    return lambda rendering, models: [
        document for model in models for document in render_model(rendering, model)
    ]


RENDERERS: dict[str, Renderer] = {
    "knative": _each(knative.render_model),
    "kserve": _each(kserve.render_model),
    "kubernetes": _each(kubernetes.render_model),
    "helm": kubernetes.render_pool,
    "cloud-run": _each(cloud_run.render_model),
    "lambda": _each(aws_lambda.render_model),
    "sagemaker": _each(sagemaker.render_model),
    "fargate": _each(fargate.render_model),
    "ray": ray.render_serve,
    "kuberay": ray.render_kuberay,
}
HEADER = "# Rendered by `teneral pool render {platform}` from {file}: change that file, not this one.\n"


class Rendered(NamedTuple):
    """The documents of one pool on one platform, in the order in which they are applied."""

    platform: str
    file: str
    documents: tuple[RenderedDocument, ...]
    warnings: tuple[PoolWarning, ...]
    deployment: deploy.DeployPlan

    def texts(self) -> dict[str, str]:
        """File name → text of each document."""
        header = HEADER.format(platform=self.platform, file=PurePath(self.file).name)
        return {document.file: header + yaml_text([document.body]) for document in self.documents}

    def stream(self) -> str:
        """All documents in one text."""
        header = HEADER.format(platform=self.platform, file=PurePath(self.file).name)
        return header + yaml_text([document.body for document in self.documents])


def render(
    pool: Pool,
    platform: str,
    *,
    options: Options | None = None,
    sizes: Mapping[str, ModelSize] | None = None,
    model: str | None = None,
) -> Rendered:
    """Raises `PoolFileError` for what the platform cannot do, `UsageError` for a name that is
    unknown.
    """
    if platform not in RENDERERS:
        raise UsageError(
            f"unknown platform {platform!r}", key="platform", hint=f"Name one of {', '.join(RENDERERS)}."
        )
    rendering = Rendering(pool, platform, options or Options(), sizes or {})
    models = chosen_models(pool, model)
    for each in models:
        _check_paths(rendering, each)
    documents = RENDERERS[platform](rendering, models)
    for alias in pool.aliases:
        message = "is left out: a deployed model answers to its own name only"
        rendering.warnings.append(pool.warning(Code.W1, message, "aliases", alias))
    patched = apply_patches(rendering, documents, every=model is None)
    deployment = deploy.plan(rendering, models, patched)
    return Rendered(platform, pool.file, tuple(patched), tuple(rendering.warnings), deployment)


def _check_paths(rendering: Rendering, model: Model) -> None:
    """Raises E6 for a path relative to the pool file; warns (W5) of an absolute one that an
    instance reads from, which an image or a volume may have.
    """
    settings = {f"serve.{name}": model.serve.get(name) for name in sorted(PATH_SETTINGS)}
    for key, address in {"source": model.source, "base": model.base, **settings}.items():
        if not address or scheme_of(address) not in ("", "file"):
            continue
        if not address.lower().startswith(("/", "file:")):
            raise rendering.error(
                Code.E6,
                model,
                key,
                f"is {address}, relative to this file; an instance on {rendering.platform} has other files",
                hint="Name an address in a store (hf://org/name for a model of the Hub), or the absolute path that the "
                "image or a volume has.",
            )
        if key.removeprefix("serve.") not in FOLDERS:
            message = f"is {address}, on each instance's own disk: the image or a volume must have it"
            rendering.warn(Code.W5, model, key, message, always=True)


def chosen_models(pool: Pool, name: str | None) -> Sequence[Model]:
    if name is None:
        return tuple(pool)
    if name not in pool.models:
        raise UsageError(
            f"unknown model {name!r}", key="--model", hint=f"{pool.file} has {', '.join(pool.models)}."
        )
    return (pool.models[name],)
