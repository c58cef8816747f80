"""A BPE vocabulary in which a few pieces are looked up without reading the others.

Making an object of each of 150,000 pieces and as many merges takes a third of the library's time to
read them. A text needs some hundreds. So the file stays bytes: quotes mark the beginning and end of
each piece, its first and last bytes and its length are hashed to a number, and only pieces with a
requested number are compared. numpy does all of this, block by block: intermediate results stay in
the processor's cache, and need no fresh memory that the system would have to clear first, which
costs more than the work itself.

Pieces are compared in the file's spelling. This requires files in the form that the `tokenizers`
library writes (indented or not): model and merges come last, spacing is uniform, and JSON escapes
only the necessary characters. That form is checked, but not that each piece is well-formed: the
library notices that when it reads the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int32]  # of bytes in the file

MAX_BYTES = (1 << 31) - 64
MAX_QUOTES = 1 << 23  # their positions take 32 MiB
MAX_ESCAPES = 1 << 16  # checked one by one
MAX_DIGITS = 7  # of a token
# Eight readable bytes before and after the content.
_PAD = bytes(8)
_QUOTE, _BACKSLASH = b'"\\'
_UNICODE_ESCAPE = int.from_bytes(b"\\u", "little")
_NUM_BUCKETS_LOG2 = 18
_BLOCK_BYTES = 1 << 16
_BLOCK_STRINGS = 1 << 13
_MASKS = np.array([(1 << 8 * length) - 1 for length in range(9)], dtype=np.uint64)
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)  # odd, without a pattern
_ALL_BYTES = 0x0101010101010101

_VOCAB_BEGINS = re.compile(rb'"vocab"\s*:\s*\{\s*')
_FIRST_GAP = re.compile(rb'(\s*:\s*)\d+(\s*,\s*)"')
_LAST_GAP = re.compile(rb"(\s*:\s*)(\d+)\s*\}\s*,\s*")
_MERGES_BEGIN = re.compile(rb'"merges"\s*:\s*\[\s*(\[\s*)?"')
_COMMA = re.compile(rb"\s*,\s*")
_NEXT_PAIR = re.compile(rb"\s*\]\s*,\s*\[\s*")
_FILE_ENDS = {False: re.compile(rb"\s*\]\s*\}\s*\}\s*"), True: re.compile(rb"\s*\]\s*\]\s*\}\s*\}\s*")}
_AS_IT_MUST = re.compile(rb'["\\nrtbf]|u00(?:0[0-7be-f]|1[0-9a-f])')  # after a backslash


class UnusualFileError(ValueError):
    """The file is not in the library's form, although it may be valid."""


class Vocabulary:
    """The vocabulary of a BPE model. Immutable, so thread-safe."""

    def __init__(self, data: bytes) -> None:
        """`data` is the content of tokenizer.json; up to three times its size is held. Raises
        `UnusualFileError`.
        """
        file = _File(b"".join((_PAD, data, _PAD)))
        model = file.find_model()
        self.rest = _rest(file.data[len(_PAD) : model.begin])  # everything except pieces and merges
        self._entries = slice(model.begin, model.end)
        self._tokens = _tokens_between(file, model.pieces[0::2], model.pieces[1::2])
        self._pieces = _Strings(file, model.pieces[0::2], model.pieces[1::2])
        self._pieces.check_distinct()
        self._merges, self._joiner = _read_merges(file, model.merges, is_paired=model.is_paired)
        self._file = file
        self.longest = self._pieces.longest()  # in characters

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens_of(self, pieces: Collection[str]) -> dict[str, int]:
        """The tokens of those of these pieces that exist."""
        wanted = {_spelt(piece): piece for piece in pieces}
        return {wanted[found]: int(self._tokens[index]) for index, found in self._pieces.find(wanted)}

    def ranks_of(self, merges: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """The ranks of those of these merges that exist."""
        wanted = {_spelt(left) + self._joiner + _spelt(right): (left, right) for left, right in merges}
        return {wanted[found]: index for index, found in self._merges.find(wanted)}

    def single_characters(self) -> dict[str, int]:
        """The pieces of one character."""
        places = self._pieces.single_characters()
        pieces = _read(b'["' + b'","'.join(self._pieces[place] for place in places) + b'"]') if places else []
        return dict(zip(pieces, self._tokens[places].tolist(), strict=True))

    def piece_of(self, token: int) -> str | None:
        place = token
        # In most files, tokens are their own indexes.
        if not 0 <= token < len(self) or self._tokens[token] != token:
            found = np.flatnonzero(self._tokens == token)
            if not len(found):
                return None
            place = int(found[-1])
        piece: str = _read(b'"' + self._pieces[place] + b'"')
        return piece

    def as_dict(self) -> dict[str, int]:
        """The whole vocabulary, read now: holds the GIL for 0.09 s for 150,000 pieces."""
        pieces: dict[str, int] = _read(b"{" + self._file.data[self._entries] + b"}")
        return pieces


class _ModelSpans(NamedTuple):
    """The locations of the model's parts in a file."""

    begin: int  # of the vocabulary's entries
    end: int
    pieces: Places  # opening and closing quotes, alternating
    merges: Places  # likewise
    is_paired: bool  # each merge is a list of two strings


class _File:
    """`data` as bytes and as eight bytes at each position, and the boundaries of strings."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.words: Words = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
        if len(data) > MAX_BYTES:
            raise UnusualFileError("too large")
        quotes = self._places(_QUOTE, MAX_QUOTES)
        escaped = self._escaped(self._places(_BACKSLASH, MAX_ESCAPES))
        self.quotes: Places = np.delete(quotes, np.searchsorted(quotes, escaped)) if escaped else quotes

    def _places(self, character: int, max_places: int) -> Places:
        """The positions of this byte."""
        found: list[Places] = []
        num_places = 0
        characters = np.frombuffer(self.data, np.uint8)
        for block in _blocks(len(characters), _BLOCK_BYTES):
            found.append((np.flatnonzero(characters[block] == character) + block.start).astype(np.int32))
            num_places += len(found[-1])
            if num_places > max_places:
                raise UnusualFileError(f"too many {chr(character)}")
        return np.concatenate(found)

    def _escaped(self, backslashes: Places) -> list[int]:
        """The positions of escaped quotes."""
        quotes = []
        behind = -1
        for place in backslashes.tolist():
            if place == behind:
                continue  # the backslash is escaped itself
            behind = place + 1
            if _AS_IT_MUST.match(self.data, behind) is None:
                raise UnusualFileError("characters are escaped unnecessarily")
            if self.data[behind] == _QUOTE:
                quotes.append(behind)
        return quotes

    def find_model(self) -> _ModelSpans:
        # If there were others, the text before the first or after the second would not match.
        vocab = self._key(b'"vocab', _VOCAB_BEGINS)
        merges = self._key(b'"merges', _MERGES_BEGIN, vocab.end())
        first, key = np.searchsorted(self.quotes, [vocab.end(), merges.start()]).tolist()
        pieces, merged = self.quotes[first:key], self.quotes[key + 2 :]
        if not len(pieces) or len(pieces) % 2 or not len(merged) or len(merged) % 2:
            raise UnusualFileError("the model has no pieces or no merges")
        last = _LAST_GAP.fullmatch(self.data, int(pieces[-1]) + 1, merges.start())
        file_end = _FILE_ENDS[merges[1] is not None]
        end = file_end.fullmatch(self.data, int(merged[-1]) + 1, len(self.data) - len(_PAD))
        if pieces[0] != vocab.end() or last is None or end is None:
            raise UnusualFileError("vocabulary and merges are not the last entries")
        return _ModelSpans(vocab.end(), last.end(2), pieces, merged, merges[1] is not None)

    def _key(self, name: bytes, pattern: re.Pattern[bytes], begin: int = 0) -> re.Match[bytes]:
        """The first position from `begin` on at which it is a key; among the pieces it may be a
        piece.
        """
        place = self.data.find(name, begin)
        while place >= 0:
            if self._begins_string(place) and (match := pattern.match(self.data, place)):
                return match
            place = self.data.find(name, place + 1)
        raise UnusualFileError("the file has no vocabulary and merges")

    def _begins_string(self, place: int) -> bool:
        index = int(np.searchsorted(self.quotes, place))
        return index % 2 == 0 and index < len(self.quotes) and int(self.quotes[index]) == place

    def check_all(self, places: Places, expected: bytes) -> None:
        """Check that these bytes are at all these positions."""
        for begin in range(0, len(expected), 8):
            piece = expected[begin : begin + 8]
            found = self.words[places + begin] & _MASKS[len(piece)]
            if (found != np.uint64(int.from_bytes(piece, "little"))).any():
                raise UnusualFileError("the spacing is not uniform")


class _Strings:
    """Strings of a file, each between two quotes, found by their content."""

    def __init__(self, file: _File, opening: Places, closing: Places) -> None:
        self._file = file
        self._opening = opening
        self._closing = closing
        self._keys: Words = np.empty(len(opening), np.uint64)
        for block in _blocks(len(opening)):
            self._keys[block] = _keys(file.words, opening[block] + 1, closing[block])

    def __len__(self) -> int:
        return len(self._opening)

    def __getitem__(self, index: int) -> bytes:
        return self._file.data[self._opening[index] + 1 : self._closing[index]]

    def find(self, wanted: Mapping[bytes, object]) -> Iterator[tuple[int, bytes]]:
        """The wanted strings that exist, with their indexes, in order."""
        if not wanted:
            return
        marked = np.zeros(1 << _NUM_BUCKETS_LOG2, dtype=np.bool_)
        shift = np.uint64(64 - _NUM_BUCKETS_LOG2)
        marked[_keys_of(wanted) >> shift] = True
        for index in np.flatnonzero(marked[self._keys >> shift]).tolist():
            if (content := self[index]) in wanted:
                yield index, content

    def single_characters(self) -> list[int]:
        """The indexes of strings of one character: by UTF-8's first byte, or escaped."""
        found: list[int] = []
        for block in _blocks(len(self)):
            lengths = self._closing[block] - self._opening[block] - 1
            words = self._file.words[self._opening[block] + 1]
            first = words & _MASKS[1]
            is_single = lengths == 1
            for length, begin in ((2, 0xC2), (3, 0xE0), (4, 0xF0)):
                is_single |= (lengths == length) & (first >= begin)
            is_single |= (first == _BACKSLASH) & (lengths == 2)
            is_single |= (words & _MASKS[2] == _UNICODE_ESCAPE) & (lengths == 6)
            found += (np.flatnonzero(is_single) + block.start).tolist()
        return found

    def longest(self) -> int:
        """The length of the longest string, in characters as the file spells them: at least the
        true number.
        """
        lengths = self._closing - self._opening - 1
        longest = self._num_characters(int(lengths.argmax()))
        others = np.flatnonzero(lengths > longest).tolist()  # long enough in bytes to have more
        return max(longest, *map(self._num_characters, others)) if others else longest

    def _num_characters(self, index: int) -> int:
        return len(self[index].decode("utf-8", "replace"))

    def check_distinct(self) -> None:
        in_order = np.sort(self._keys)
        doubtful = in_order[1:][in_order[1:] == in_order[:-1]]
        if len(doubtful):
            contents = [self[index] for index in np.flatnonzero(np.isin(self._keys, doubtful)).tolist()]
            if len(set(contents)) < len(contents):
                raise UnusualFileError("duplicate piece")


def _rest(data: bytes) -> dict[str, Any]:
    """The JSON before the first piece."""
    try:
        rest: dict[str, Any] = json.loads(data + b'}, "merges": []}}')
        if rest["model"]["vocab"] == {} and rest["model"]["merges"] == []:
            return rest
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnusualFileError("no JSON") from error
    raise UnusualFileError("the model is not at the end of the file")


def _read_merges(file: _File, quotes: Places, *, is_paired: bool) -> tuple[_Strings, bytes]:
    """The merges, and the separator between the two sides of each: a space, if each is one string."""
    opening, closing = quotes[0::2], quotes[1::2]
    if not is_paired:
        _check_gaps(file, closing[:-1], opening[1:], _COMMA)
        return _Strings(file, opening, closing), b" "
    if len(opening) % 2:
        raise UnusualFileError("a merge has only one piece")
    _check_gaps(file, closing[0::2], opening[1::2], _COMMA)
    _check_gaps(file, closing[1:-1:2], opening[2::2], _NEXT_PAIR)
    return _Strings(file, opening[0::2], closing[1::2]), file.data[closing[0] : opening[1] + 1]


def _check_gaps(file: _File, closing: Places, opening: Places, pattern: re.Pattern[bytes]) -> None:
    """Check that the text from closing quotes to the next opening ones is uniform."""
    if not len(opening):
        return
    gap = file.data[closing[0] + 1 : opening[0]]
    if pattern.fullmatch(gap) is None:
        raise UnusualFileError("merges are not a list of strings or of pairs")
    for block in _blocks(len(opening)):
        begins = closing[block] + 1
        if (opening[block] - begins != len(gap)).any():
            raise UnusualFileError("the spacing is not uniform")
        file.check_all(begins, gap)


def _tokens_between(file: _File, opening: Places, closing: Places) -> npt.NDArray[np.int32]:
    """The number after each piece, given the pieces' quotes."""
    first = _FIRST_GAP.match(file.data, int(closing[0]) + 1)
    last = _LAST_GAP.match(file.data, int(closing[-1]) + 1)
    if first is None or last is None or first[1] != last[1] or len(last[2]) > MAX_DIGITS:
        raise UnusualFileError("a single piece, or a piece without a number")
    before, behind = first[1], first[2]
    tokens = np.empty(len(opening), np.int32)
    tokens[-1] = int(last[2])
    for block in _blocks(len(opening) - 1):
        begins, ends = closing[:-1][block] + (1 + len(before)), opening[1:][block] - len(behind)
        lengths = ends - begins
        if (lengths < 1).any() or (lengths > MAX_DIGITS).any():
            raise UnusualFileError("a piece without a number")
        file.check_all(begins - len(before), before)
        file.check_all(ends, behind)
        tokens[block] = _numbers(file.words[begins], lengths)
    return tokens


def _numbers(words: Words, lengths: Places) -> Words:
    """The numbers of decimal digits at the beginning of words. Pairs of neighbours are combined
    three times.
    """
    ascii_zeros = np.uint64(ord("0") * _ALL_BYTES)
    masks = _MASKS[lengths]
    words = (words & masks) | (ascii_zeros & ~masks)
    high, six = np.uint64(0xF0 * _ALL_BYTES), np.uint64(6 * _ALL_BYTES)
    if ((words & high) != ascii_zeros).any() or (((words + six) & high) != ascii_zeros).any():
        raise UnusualFileError("a piece without a number")
    words = (words ^ ascii_zeros) << (8 * (8 - lengths)).astype(np.uint64)  # leading zeros
    for bits, factor, mask in (
        (8, 10, 0x00FF00FF00FF00FF),
        (16, 100, 0x0000FFFF0000FFFF),
        (32, 10_000, 0xFFFFFFFF),
    ):
        low, up = words & np.uint64(mask), (words >> np.uint64(bits)) & np.uint64(mask)
        words = low * np.uint64(factor) + up
    return words


def _keys_of(contents: Collection[bytes]) -> Words:
    data = b"".join([_PAD, *contents, _PAD])
    lengths = np.fromiter(map(len, contents), np.int32, len(contents))
    ends = np.cumsum(lengths, dtype=np.int32) + len(_PAD)
    begins = ends - lengths
    return _keys(np.ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,)), begins, ends)


def _keys(words: Words, begins: Places, ends: Places) -> Words:
    """A number for each string, from its first eight bytes, its last, and its length."""
    lengths = ends - begins
    short = np.minimum(lengths, 8)
    first = words[begins] & _MASKS[short]
    last = (words[ends - 8] >> (8 * np.minimum(8 - short, 7)).astype(np.uint64)) & _MASKS[short]
    keys: Words = (first * _FACTORS[0]) ^ (last * _FACTORS[1])
    keys += lengths.astype(np.uint64)
    keys *= _FACTORS[0]
    return keys


def _blocks(num: int, step: int = _BLOCK_STRINGS) -> Iterator[slice]:
    """Slices of `num` items."""
    for begin in range(0, num, step):
        yield slice(begin, min(begin + step, num))


def _spelt(piece: str) -> bytes:
    """The piece as the library writes it, without quotes."""
    return encode_basestring(piece)[1:-1].encode("utf-8", "surrogatepass")


def _read(spelt: bytes) -> Any:
    """The content of a spelling, as the library would read it."""
    return json.loads(spelt.decode("utf-8", "replace"), strict=False)
