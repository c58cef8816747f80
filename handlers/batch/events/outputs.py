"""Where the answers go when an event does not say it, and that they start no job in their turn.

A store tells of every new object, of those that a job writes as well. So answers have a place of their own: another
bucket, or a folder of which all that is in it counts as answers. A job whose answers could not be told from inputs is
refused. All of it is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ....loader.sources.base import MAX_NAME_BYTES
from ....runtime.address_template import AddressTemplate
from ...function.object_ref import ObjectRef
from .errors import EventError, JobFailedError
from .parse import Ignored, Job

OUTPUT_FIELDS = ("account", "bucket", "key", "etag")
ANSWER_FIELDS = ("queue", "id")
LONGEST_NAME = ".parts/partial/000000.jsonl"  # that a job writes behind its output's name


@dataclass(frozen=True, slots=True)
class Outputs:
    """The two settings; None where one is not set."""

    output: AddressTemplate | None
    answers: AddressTemplate | None

    @classmethod
    def of(cls, output: str | None, answers: str | None) -> Self:
        """Raises `EventError` for what `ServeConfig` would not take."""
        try:
            return cls(
                AddressTemplate.parse(output, allowed=OUTPUT_FIELDS, required="key") if output else None,
                AddressTemplate.parse(answers, allowed=ANSWER_FIELDS, required="id") if answers else None,
            )
        except ValueError as error:
            raise EventError(f"batch_output or batch_answers {error}") from error

    def of_job(self, job: Job) -> str | Ignored:
        """The job's output; `Ignored` for an upload that is an answer itself. Raises `JobFailedError`."""
        if job.output is not None:
            return job.output
        template = self.output
        if template is None:
            raise JobFailedError(
                f"nothing says where the answers to {job.input.url} go",
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
        """Of the answer to a message that is one request. Raises `JobFailedError`."""
        template = self._for_answers()
        if not queue or "/" in queue + message_id:
            raise EventError("the message has no queue and id that an address can be made of")
        return template.key(queue=queue, id=message_id)

    def _for_answers(self) -> AddressTemplate:
        if self.answers is None:
            raise JobFailedError(
                "nothing says where the answer to a single request goes", hint="Set TENERAL_BATCH_ANSWERS."
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
    """The store takes az://container/key too, where the account is set: that must not hide where answers go."""
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
            f"the output has {{etag}} in it, but the event does not say the version of {given.url}",
            param="version",
            hint='Give it: "version": the ETag of the object.',
        )
    if "account" in template.fields and not given.account:
        raise EventError(f"the output has {{account}} in it, but {given.root} has no account", param="input")
    values = {"account": given.account, "bucket": given.bucket, "key": given.key, "etag": given.etag}
    key = template.key(**values)
    if len((key + LONGEST_NAME).encode()) > MAX_NAME_BYTES:
        raise EventError(f"the key of {given.url[:200]} is too long for its output's", param="key")
    return template.fill(**values)
