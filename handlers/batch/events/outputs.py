"""The outputs of events that name none, chosen so that answers start no jobs.

A store sends events for every new object, including those of a job. So answers have a place of
their own: another bucket, or a folder whose whole content counts as answers. A job whose answers
would be indistinguishable from inputs is refused. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ....loader.sources.base import MAX_NAME_BYTES
from ....runtime.address_template import AddressTemplate
from ...function.object_events import ObjectRef
from .parse import EventError, Ignored, Job, JobFailedError

OUTPUT_FIELDS = ("account", "bucket", "key", "etag")
ANSWER_FIELDS = ("queue", "id")
# The longest suffix of a job's objects after its output's name.
LONGEST_NAME = ".parts/partial/000000.jsonl"


@dataclass(frozen=True, slots=True)
class Outputs:
    """The two settings; None if not set."""

    output: AddressTemplate | None
    answers: AddressTemplate | None

    @classmethod
    def of(cls, output: str | None, answers: str | None) -> Self:
        """Raises `EventError` for values that `ServeConfig` would reject."""
        try:
            return cls(
                AddressTemplate.parse(output, allowed=OUTPUT_FIELDS, required="key") if output else None,
                AddressTemplate.parse(answers, allowed=ANSWER_FIELDS, required="id") if answers else None,
            )
        except ValueError as error:
            raise EventError(f"batch_output or batch_answers {error}") from error

    def of_job(self, job: Job) -> str | Ignored:
        """The job's output; `Ignored` for an upload that is an answer itself. Raises
        `JobFailedError`.
        """
        if job.output is not None:
            return job.output
        template = self.output
        if template is None:
            raise JobFailedError(
                f"no output is set for the answers to {job.input.url}",
                hint="Set TENERAL_BATCH_OUTPUT, or name an output in the event.",
            )
        if job.is_upload:
            _refuse_unclear_account(template, job.input)
        if job.is_upload and template.may_hold(job.input.root):
            _refuse_without_folder(template, job.input)
            if job.input.key.startswith(template.folder):
                return Ignored(f"{job.input.url} is in the folder of the answers")
        return _filled(template, job.input)

    def bucket_of_answers(self) -> str:
        """Raises `JobFailedError`."""
        return self._for_answers().root

    def key_of_answer(self, queue: str, message_id: str) -> str:
        """The key of the answer to a message with one request. Raises `JobFailedError`."""
        template = self._for_answers()
        if not queue or "/" in queue + message_id:
            raise EventError("the message has no valid queue and id for an address")
        return template.key(queue=queue, id=message_id)

    def _for_answers(self) -> AddressTemplate:
        if self.answers is None:
            raise JobFailedError(
                "no output is set for the answer to a single request", hint="Set TENERAL_BATCH_ANSWERS."
            )
        return self.answers


def _refuse_without_folder(template: AddressTemplate, given: ObjectRef) -> None:
    if template.folder:
        return
    raise JobFailedError(
        f"the answers to {given.url} would start jobs themselves: they go into its bucket, to any key",
        hint=f"Set TENERAL_BATCH_OUTPUT to another bucket, or to a folder: {given.root}/answers/{{key}}.jsonl.",
    )


def _refuse_unclear_account(template: AddressTemplate, given: ObjectRef) -> None:
    """Refuse an output without an account. The store accepts az://container/key if the account is
    set, which must not hide where answers go.
    """
    if (
        template.scheme == given.scheme == "az"
        and template.root.split("/")[2] == given.bucket != given.account
    ):
        raise JobFailedError(
            f"TENERAL_BATCH_OUTPUT does not name the account of {given.root}",
            hint=f"Write az://{given.account}/container/{{key}}.jsonl.",
        )


def _filled(template: AddressTemplate, given: ObjectRef) -> str:
    if "etag" in template.fields and not given.etag:
        raise EventError(
            f"the output contains {{etag}}, but the event does not name the version of {given.url}",
            param="version",
            hint='Add "version": the ETag of the object.',
        )
    if "account" in template.fields and not given.account:
        raise EventError(f"the output contains {{account}}, but {given.root} has no account", param="input")
    values = {"account": given.account, "bucket": given.bucket, "key": given.key, "etag": given.etag}
    key = template.key(**values)
    if len((key + LONGEST_NAME).encode()) > MAX_NAME_BYTES:
        raise EventError(f"the key of {given.url[:200]} is too long for its output's", param="key")
    return template.fill(**values)
