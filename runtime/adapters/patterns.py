"""Regular expressions of an adapter's configuration, matched against names of modules.

An adapter comes from outside, and Python's `re` may take exponential time. Here an expression maps a
set of positions in a name to the set of positions where it may end, which takes polynomial time, and
a budget bounds that for all names together. What PEFT's users write is supported: literals, classes,
groups, alternatives, repetitions and anchors. Look-around, back references and flags are refused.
"""

from __future__ import annotations

import string
from collections.abc import Callable

from ..errors import AdapterError

MAX_PATTERN_CHARS = 4096
MAX_REPEATS = 1000
MAX_DEPTH = 32
# About a second: a hundred times what the patterns of a model with a hundred layers take.
MAX_STEPS = 2_000_000

_WORD = frozenset(string.ascii_letters + string.digits + "_")
_CLASSES = {"d": frozenset(string.digits), "w": _WORD, "s": frozenset(string.whitespace)}
_SPECIAL = frozenset("*+?{")  # where an atom is expected

# The positions where an expression may end, for those where it may begin.
_Ends = Callable[[str, frozenset[int]], frozenset[int]]
_Test = Callable[[str], bool]  # of one character


class StepBudget:
    """The steps of all matches of one adapter. Raises `AdapterError` when they are used up."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise AdapterError(
                "the adapter's regular expressions take too long to match",
                hint="List the names of the modules instead.",
            )


class Pattern:
    """A regular expression, matched against whole names."""

    def __init__(self, text: str, budget: StepBudget, *, option: str) -> None:
        """Raises `AdapterError`, with the option's name, for an expression that is too long, damaged or
        not supported.
        """
        self._ends = _Parser(text, budget, option).parse()

    def matches(self, name: str) -> bool:
        """Raises `AdapterError` when the budget is used up."""
        return len(name) in self._ends(name, frozenset((0,)))


class _Parser:
    """From an expression's text to functions."""

    def __init__(self, text: str, budget: StepBudget, option: str) -> None:
        self._text = text
        self._option = option
        self._at = 0
        self._depth = 0
        self._budget = budget

    def parse(self) -> _Ends:
        if len(self._text) > MAX_PATTERN_CHARS:
            raise self._wrong(f"it has more than {MAX_PATTERN_CHARS} characters")
        ends = self._alternatives()
        if self._at < len(self._text):
            raise self._wrong("a ) closes no group")
        return ends

    def _alternatives(self) -> _Ends:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"groups are nested more than {MAX_DEPTH} deep")
        branches = [self._sequence()]
        while self._skip("|"):
            branches.append(self._sequence())
        self._depth -= 1
        if len(branches) == 1:
            return branches[0]
        return lambda name, begins: frozenset().union(*(branch(name, begins) for branch in branches))

    def _sequence(self) -> _Ends:
        items: list[_Ends] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            items.append(self._repeated(self._atom()))

        def ends(name: str, begins: frozenset[int]) -> frozenset[int]:
            self._budget.take()
            for item in items:
                if not begins:
                    break
                self._budget.take()
                begins = item(name, begins)
            return begins

        return ends

    def _repeated(self, item: _Ends) -> _Ends:
        """The item with its repetition, if one follows; lazy ones match the same names."""
        if self._skip("*"):
            low, high = 0, None
        elif self._skip("+"):
            low, high = 1, None
        elif self._skip("?"):
            low, high = 0, 1
        elif self._skip("{"):
            low, high = self._counts()
        else:
            return item
        if not self._skip("?") and self._peek() in _SPECIAL:
            raise self._wrong("a repetition follows another")

        def ends(name: str, begins: frozenset[int]) -> frozenset[int]:
            for _ in range(low):
                begins = item(name, begins)
            found = frontier = begins
            rounds = 0
            while frontier and (high is None or rounds < high - low):
                frontier = item(name, frontier) - found
                found |= frontier
                rounds += 1
            return found

        return ends

    def _counts(self) -> tuple[int, int | None]:
        """Of "{low,high}", behind the brace."""
        inside, closing, _ = self._text[self._at :].partition("}")
        first, comma, last = inside.partition(",")
        if not closing or not (first or comma) or not all(part.isdecimal() for part in (first, last) if part):
            raise self._wrong("a { begins no repetition")
        self._at += len(inside) + 1
        low = int(first or 0)
        high = low if not comma else int(last) if last else None
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise self._wrong(f"the repetition {{{inside}}} is not from 0 to {MAX_REPEATS}")
        return low, high

    def _atom(self) -> _Ends:
        letter = self._next()
        if letter == "(":
            return self._group()
        if letter == "[":
            return self._one(self._class())
        if letter == ".":
            return self._one(lambda each: each != "\n")
        if letter == "^":
            return self._where(lambda name, at: at == 0)
        if letter == "$":
            return self._where(lambda name, at: at == len(name))
        if letter == "\\":
            return self._escape()
        if letter in _SPECIAL:
            raise self._wrong(f"nothing precedes the {letter}")
        return self._one(lambda each: each == letter)

    def _group(self) -> _Ends:
        if self._skip("?"):
            if self._skip("P<"):
                name, closing, _ = self._text[self._at :].partition(">")
                if not closing or not name.isidentifier():
                    raise self._wrong("a group's name is invalid")
                self._at += len(name) + 1
            elif not self._skip(":"):
                raise self._wrong("look-around, conditions and flags are not supported")
        ends = self._alternatives()
        if not self._skip(")"):
            raise self._wrong("a group is not closed")
        return ends

    def _escape(self) -> _Ends:
        letter = self._next()
        if letter in "bB":
            return self._where(lambda name, at: _is_boundary(name, at) == (letter == "b"))
        if letter in "AZ":
            return self._where(lambda name, at: at == (0 if letter == "A" else len(name)))
        return self._one(self._escaped(letter))

    def _escaped(self, letter: str) -> _Test:
        """The characters of an escape, in a class or outside."""
        known = _CLASSES.get(letter.lower())
        if known is not None:
            return lambda each: (each in known) == letter.islower()
        if letter.isalnum():
            raise self._wrong(f"the escape \\{letter} is not supported")
        return lambda each: each == letter

    def _class(self) -> _Test:
        """Of "[…]", behind the bracket."""
        is_negated = self._skip("^")
        tests: list[_Test] = []
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            letter = self._next()
            if letter == "\\":
                letter = self._next()
                tests.append(self._escaped(letter))
                if letter.lower() in _CLASSES:
                    continue
            else:
                tests.append(_same(letter))
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._next()
                if last < letter or last == "\\":
                    raise self._wrong(f"the range {letter}-{last} is invalid")
                tests.append(_between(letter, last))
        self._at += 1
        return lambda each: any(test(each) for test in tests) != is_negated

    def _one(self, test: _Test) -> _Ends:
        """One character."""

        return lambda name, begins: frozenset(at + 1 for at in begins if at < len(name) and test(name[at]))

    def _where(self, test: Callable[[str, int], bool]) -> _Ends:
        """A place between characters."""
        return lambda name, begins: frozenset(at for at in begins if test(name, at))

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        letter = self._peek()
        if not letter:
            raise self._wrong("it ends too soon")
        self._at += 1
        return letter

    def _skip(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _wrong(self, reason: str) -> AdapterError:
        return AdapterError(
            f"{self._option}: the regular expression {self._text[:100]!r} cannot be matched: {reason}",
            hint="List the names of the modules instead.",
        )


def _same(letter: str) -> _Test:
    return lambda each: each == letter


def _between(first: str, last: str) -> _Test:
    return lambda each: first <= each <= last


def _is_boundary(name: str, at: int) -> bool:
    is_behind_word = at > 0 and name[at - 1] in _WORD
    return is_behind_word != (at < len(name) and name[at] in _WORD)
