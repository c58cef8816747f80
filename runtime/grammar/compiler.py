"""The compiler from a `GrammarSpec` to a grammar over a model's vocabulary. The only module that
imports `llguidance`.

The first request with a grammar imports the library and prepares the vocabulary: 0.3 to 0.9 s of
CPU for 49,000 to 152,000 tokens, during the load and without the GIL. Each compilation then takes
about a millisecond.

A grammar's cost is bounded three times: its text (`spec.py`), the structures that the library
builds from it (`LIMITS`), and each step of a matcher. Beyond a bound it is a `GrammarError`, which
concerns only its own request.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..errors import GrammarError, ModelError, RequestError
from .json_schema import MARK
from .json_schema.unique_items import Position, RepeatedItemError, TokenTexts, UniqueItems
from .number_matcher import NumberMatcher, NumberTokens
from .spec import COMPACT, GrammarKind, GrammarSpec

if TYPE_CHECKING:
    import llguidance

    from .matcher import MaskWords, Matcher

MAX_COMPILED = 32  # compiled grammars cached for later requests
# Fuel is the library's measure of work: about 14,000 units a millisecond. A state of the lexer takes 1 to 2 KiB.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,  # about 8 for each optional property of an object
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
_UNFORCED = '%llguidance {"no_forcing": true}'


def forced_text(spec: GrammarSpec) -> str:
    """The text that begins every answer under any tokenizer.

    Needs no vocabulary, and takes some milliseconds. Raises `GrammarError`.
    """
    import llguidance  # imported late, as below

    data = bytes(_compiled(spec, llguidance.LLTokenizer("byte")).compute_ff_bytes())
    if (unique := _unique_items(spec)) is not None:
        try:
            unique.advance(Position(), data)
        except RepeatedItemError:
            raise _refused(spec, "the items of an array cannot differ") from None
    # Drops an incomplete character at the end.
    return data.decode("utf-8", errors="ignore")


class GrammarCompiler:
    """The compiler for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer_json: Callable[[], bytes], eos_token_ids: Collection[int]) -> None:
        """`tokenizer_json` returns the content of that file; it is called once, when needed."""
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        # Of the tokens, once a grammar needs them
        self._texts: list[bytes] | None = None
        self._unique_texts: TokenTexts | None = None
        self._numbers: NumberTokens | None = None
        self._failure: ModelError | None = None
        self._compiled: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._preparing = threading.Lock()
        self._lock = threading.Lock()  # held while compiling

    @property
    def is_prepared(self) -> bool:
        """True once `prepare` has returned or raised."""
        return self._tokenizer is not None or self._failure is not None

    def prepare(self) -> None:
        """Read the vocabulary, once. Blocks. Raises `RequestError` if the library does not support
        it.
        """
        with self._preparing:
            if self._tokenizer is None and self._failure is None:
                # 8 MB of code that only requests with a grammar need.
                import llguidance

                data = self._tokenizer_json().decode()
                try:
                    self._tokenizer = llguidance.LLTokenizer(data, eos_token=self._eos_token_ids or None)
                except (ValueError, RuntimeError) as error:
                    self._failure = ModelError(f"the tokenizer does not support grammars: {error}")
            if self._failure is not None:
                raise RequestError(
                    "structured output is not available for this model", hint=self._failure.message[:200]
                )

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile the grammar. Raises `GrammarError`, naming `spec.param`, if it is invalid, too
        large or too complex.
        """
        with self._lock:
            if (known := self._compiled.get(spec)) is not None:
                self._compiled.move_to_end(spec)
                return known
        self.prepare()
        assert self._tokenizer is not None
        matcher = _compiled(spec, self._tokenizer)
        unique = _unique_items(spec)
        compiled = CompiledGrammar(
            matcher,
            partial(_compiled, spec, self._tokenizer, forces=False),
            num_mask_words=-(-self._tokenizer.vocab_size // 32),
            param=spec.param,
            numbers=self._number_tokens() if _has_json(spec) else None,
            unique=None if unique is None else (unique, self._token_texts()),
        )
        with self._lock:
            self._compiled[spec] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _token_texts(self) -> TokenTexts:
        with self._preparing:
            if self._unique_texts is None:
                self._unique_texts = TokenTexts(self._all_texts())
            return self._unique_texts

    def _number_tokens(self) -> NumberTokens:
        with self._preparing:
            if self._numbers is None:
                self._numbers = NumberTokens(self._all_texts())
            return self._numbers

    def _all_texts(self) -> list[bytes]:
        """The bytes of each token, none of special ones. The lock is held."""
        if self._texts is None:
            assert self._tokenizer is not None
            tokenizer = self._tokenizer
            self._texts = [
                b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
                for token in range(tokenizer.vocab_size)
            ]
        return self._texts


class CompiledGrammar:
    """A `Grammar`."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        make_unforced: Callable[[], llguidance.LLMatcher],
        *,
        num_mask_words: int,
        param: str = "",
        numbers: NumberTokens | None = None,
        unique: tuple[UniqueItems, TokenTexts] | None = None,
    ) -> None:
        """`make_unforced` compiles the same grammar without forced tokens. `numbers` are the tokens
        of JSON's numbers, whose length is then bounded; `unique` are the arrays whose items must
        differ. The library enforces neither.
        """
        self._matcher = matcher
        self._make_unforced = make_unforced
        self._unforced_matcher: llguidance.LLMatcher | None = None
        self._num_mask_words = num_mask_words
        self._param = param
        self._numbers = numbers
        self._unique = unique
        self._lock = threading.Lock()

    def start(self) -> Matcher:
        with self._lock:
            copy = self._matcher.deep_copy()
        matcher: Matcher = LibraryMatcher(copy, self._num_mask_words, self._param, self._unforced)
        if self._numbers is not None:
            matcher = NumberMatcher(matcher, self._numbers)
        if self._unique is None:
            return matcher
        # Imports numpy, which the tokenizer's process does not need.
        from .unique_matcher import UniqueItemsMatcher

        return UniqueItemsMatcher(matcher, *self._unique)

    def _unforced(self) -> llguidance.LLMatcher:
        with self._lock:
            if self._unforced_matcher is None:
                self._unforced_matcher = self._make_unforced()
            return self._unforced_matcher.deep_copy()


class LibraryMatcher:
    """A `Matcher`.

    The library spells text that must come as the tokenizer does, which takes the text of an added
    token (`<tool_call>`) for that token, although a grammar's text never is one. Where only such a
    token could come, the answer goes on in the same grammar without forced tokens.
    """

    __slots__ = ("_accepted", "_make_unforced", "_matcher", "_param", "num_mask_words")

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        num_mask_words: int,
        param: str,
        make_unforced: Callable[[], llguidance.LLMatcher] | None,
        accepted: Sequence[int] = (),
    ) -> None:
        """`param` is the field that asked for the grammar. `make_unforced` gives the same grammar
        at its beginning, without forced tokens; None: this one is without. `accepted` are the
        tokens so far.
        """
        self._matcher = matcher
        self._param = param
        self._make_unforced = make_unforced
        self._accepted = list(accepted)  # needed as long as tokens are forced
        self.num_mask_words = num_mask_words

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def mask_into(self, words: MaskWords) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        if self._make_unforced is None or self.is_finished:
            return
        if (token := _only_token(words)) is not None and not self._matcher.validate_tokens([token]):
            self._matcher = self._make_unforced()
            self._make_unforced = None
            self._matcher.consume_tokens(self._accepted)
            self._check()
            self.mask_into(words)

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()
            raise GrammarError(f"the grammar does not allow token {token} here")
        if self._make_unforced is not None:
            self._accepted.append(token)

    def forced(self) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else tokens

    def copy(self) -> LibraryMatcher:
        copy = self._matcher.deep_copy()
        return LibraryMatcher(copy, self.num_mask_words, self._param, self._make_unforced, self._accepted)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"{self._param or 'the grammar'} became too complex to match: "
                f"{_first_line(self._matcher.get_error())}",
                param=self._param,
                hint="Simplify the schema, the expression or the grammar.",
            )


def _only_token(words: MaskWords) -> int | None:
    """The token of a mask that allows no other."""
    (indices,) = words.nonzero()
    if len(indices) != 1:
        return None
    index, word = int(indices[0]), int(words[indices[0]])
    return index * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


def _has_json(spec: GrammarSpec) -> bool:
    """True if the grammar has values of JSON schemas."""
    return (
        spec.kind is GrammarKind.JSON_SCHEMA
        or "%json" in spec.text
        or (spec.answer is not None and _has_json(spec.answer))
    )


def _unique_items(spec: GrammarSpec) -> UniqueItems | None:
    """The arrays of a schema whose items must differ; None: there are none."""
    if spec.kind is not GrammarKind.JSON_SCHEMA or MARK not in spec.text:
        return None
    return UniqueItems(json.loads(spec.text))


def _compiled(
    spec: GrammarSpec, tokenizer: llguidance.LLTokenizer, *, forces: bool = True
) -> llguidance.LLMatcher:
    """The grammar at its beginning; with `forces` false no tokens are forced. Raises `GrammarError`."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        is_composed = spec.markers or spec.answer
        if spec.answer is not None and _unique_items(spec.answer) is not None:
            raise ValueError(
                "uniqueItems of any items needs an answer that begins with its JSON, without reasoning or tools"
            )
        if forces:
            source = _composed(spec, tokenizer) if is_composed else _source(spec)
        else:
            whole = spec if is_composed else GrammarSpec.composed("start: @answer", answer=spec)
            source = _composed(replace(whole, text=f"{_UNFORCED}\n{whole.text}"), tokenizer)
    except (ValueError, RecursionError) as error:
        raise _refused(spec, str(error)) from None
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise _refused(spec, matcher.get_error())
    matcher.compute_ff_bytes()  # raises an error for an unsatisfiable grammar
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise _refused(spec, matcher.get_error() or "no text matches it")
    return matcher


def _source(spec: GrammarSpec) -> str:
    """The grammar in the library's notation. Raises `ValueError`."""
    from llguidance import LLMatcher

    if spec.kind is GrammarKind.JSON_SCHEMA:
        return str(LLMatcher.grammar_from_json_schema(spec.text, overrides=_whitespace(spec.whitespace)))
    if spec.kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(spec.text))
    if spec.kind is GrammarKind.CHOICE:
        texts = json.loads(spec.text)
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts))))
    if spec.kind is GrammarKind.GBNF:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            lark = any_to_lark(spec.text)
        except IndexError:
            raise ValueError("it ends too early") from None
        except Exception as error:  # noqa: BLE001 - the converter raises plain ones for rules that are not there
            raise ValueError(str(error)) from None
        return str(LLMatcher.grammar_from_lark(lark))
    return str(LLMatcher.grammar_from_lark(spec.text))


def _composed(spec: GrammarSpec, tokenizer: llguidance.LLTokenizer) -> str:
    """A grammar with markers and an embedded grammar, in the library's notation. Raises
    `ValueError`.
    """
    rules = [spec.text]
    for number, marker in enumerate(spec.markers):
        tokens = tokenizer.tokenize_str(marker, parse_special=True)
        if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]):
            rules += [f"marker_{number}: <[{tokens[0]}]>", f"until_{number}: TEXT_{number}? <[{tokens[0]}]>"]
        else:
            literal = json.dumps(marker)
            rules += [f"marker_{number}: {literal}", f"until_{number}[lazy]: TEXT_{number}? {literal}"]
        rules.append(f"TEXT_{number}: /(?s:.+)/")
    grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join(rules)}]
    if spec.answer is not None:
        source = _source(spec.answer)
        answer = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
        grammars.append({**answer, "name": "answer"})
    return json.dumps({"grammars": grammars})


def _whitespace(pattern: str) -> Any:
    return {"whitespace_flexible": False} if pattern == COMPACT else {"whitespace_pattern": pattern}


def _refused(spec: GrammarSpec, why: str) -> GrammarError:
    return GrammarError(
        f"{spec.param or 'the grammar'} is invalid: {_reason(why)}",
        param=spec.param,
        hint="docs/structured.md lists the supported schemas, expressions and grammars.",
    )


def _reason(text: str) -> str:
    """The first line; of a regular expression that cannot be parsed also the reason, which is in the last ones."""
    first = _first_line(text)
    _, found, reason = text.partition("\nerror: ")
    return f"{first} {_first_line(reason)}" if found else first


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:200]
