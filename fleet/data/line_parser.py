"""Parses lines of MultiSlot text in a compiled loop, which leaves errors and a few floats to Python.

A number becomes the nearest float32 of what is written. The loop computes in float64, with an error of less than two
units in the last place, and rounds; where another result were possible within four, and for subnormal numbers, it
remembers the word, and ``nearest_float32`` decides. That is one number in a hundred million of random digits.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from fleet.data.batches import Rows
from fleet.data.columns import FLOATS, IGNORED, Layout
from fleet.numeric.jit import compiled

# What is in the state of the loop, which it is given and leaves behind.
AT, LINE, ROW, WORD, DOUBTFUL, SLOT, BEGIN, END, NUMBER, WANTED = range(10)

# Why the loop stopped.
DONE, NO_COUNT, BAD_COUNT, OTHER_WIDTH, TOO_FEW, NO_ID, ID_RANGE, NO_FLOAT, FLOAT_RANGE, MORE, FULL = range(11)

# What a word was.
_GOOD, _MALFORMED, _OUT_OF_RANGE, _DOUBTFUL = range(4)

#: So many doubtful floats are remembered, at first.
_ROOM = 4096

_NEWLINE, _PLUS, _MINUS, _POINT, _ZERO = (ord(each) for each in "\n+-.0")
_POWERS = np.array([float(f"1e{exponent}") for exponent in range(301)])
_WIDER, _NARROWER = 1 + 2.0**-50, 1 - 2.0**-50
#: From here on, and halfway to what would be the next one, everything is infinite for a float32.
_TOO_LARGE = float(2**128 - 2**103)
_SMALLEST_NORMAL, _NOTHING = 2.0**-126, 2.0**-151
_TEN = np.uint64(10)
_MOST = np.uint64(2**64 - 1)
_MOST_NEGATIVE = np.uint64(2**63)
_MANTISSA = np.uint64(10**18)
_EXACT = np.uint64(2**53)


@compiled
def _blank(character: int) -> bool:
    return character == 32 or character == 9 or character == 13


@compiled
def _after_blanks(text: Any, at: int) -> int:
    while _blank(text[at]):
        at += 1
    return at


@compiled
def _after_word(text: Any, at: int) -> int:
    while text[at] != _NEWLINE and not _blank(text[at]):
        at += 1
    return at


@compiled
def _whole(text: Any, at: int) -> tuple[int, Any, int]:
    """Return where a whole number ends, its 64 bits, and what the word was. A number that does not fit an int64 wraps,
    as a uint64."""
    negative = text[at] == _MINUS
    if negative or text[at] == _PLUS:
        at += 1
    value, begin, status = np.uint64(0), at, _GOOD
    while _ZERO <= text[at] <= _ZERO + 9:
        digit = np.uint64(text[at] - _ZERO)
        if at - begin >= 19 and value > (_MOST - digit) // _TEN:
            status = _OUT_OF_RANGE
        value = value * _TEN + digit
        at += 1
    if at == begin or not (text[at] == _NEWLINE or _blank(text[at])):
        return at, np.int64(0), _MALFORMED
    if negative:
        if value > _MOST_NEGATIVE:
            status = _OUT_OF_RANGE
        value = np.uint64(0) - value
    return at, np.int64(value), status


@compiled
def _letters(text: Any, at: int, word: Any) -> bool:
    """Say whether these letters, large or small, are the whole word."""
    for letter in word:
        if text[at] | 32 != letter:
            return False
        at += 1
    return text[at] == _NEWLINE or _blank(text[at])


_NAN, _INF, _INFINITY = (np.frombuffer(name, np.uint8) for name in (b"nan", b"inf", b"infinity"))


@compiled
def _real(text: Any, at: int) -> tuple[int, Any, int]:
    """Return where a number ends, its value, and what the word was."""
    sign = 1.0
    if text[at] == _MINUS or text[at] == _PLUS:
        if text[at] == _MINUS:
            sign = -1.0
        at += 1
    mantissa, exponent, digits, whole = np.uint64(0), 0, 0, True
    while _ZERO <= text[at] <= _ZERO + 9:
        if mantissa < _MANTISSA:
            mantissa = mantissa * _TEN + np.uint64(text[at] - _ZERO)
        else:
            exponent += 1
            whole = False
        digits += 1
        at += 1
    if text[at] == _POINT:
        at += 1
        while _ZERO <= text[at] <= _ZERO + 9:
            if mantissa < _MANTISSA:
                mantissa = mantissa * _TEN + np.uint64(text[at] - _ZERO)
                exponent -= 1
            else:
                whole = False
            digits += 1
            at += 1
    if digits == 0:
        if _letters(text, at, _NAN):
            return at + 3, np.nan, _GOOD
        if _letters(text, at, _INF):
            return at + 3, sign * np.inf, _GOOD
        if _letters(text, at, _INFINITY):
            return at + 8, sign * np.inf, _GOOD
        return at, 0.0, _MALFORMED
    if text[at] | 32 == 101:  # e or E
        at += 1
        negative = text[at] == _MINUS
        if negative or text[at] == _PLUS:
            at += 1
        begin, scale = at, 0
        while _ZERO <= text[at] <= _ZERO + 9:
            scale = min(scale * 10 + (text[at] - _ZERO), 1 << 40)
            at += 1
        if at == begin:
            return at, 0.0, _MALFORMED
        exponent += -scale if negative else scale
    if not (text[at] == _NEWLINE or _blank(text[at])):
        return at, 0.0, _MALFORMED
    if mantissa == 0 or exponent < -300:
        return at, sign * 0.0, _GOOD
    if exponent > 300:
        return at, 0.0, _OUT_OF_RANGE
    value = np.float64(mantissa)
    if exponent < 0:
        value /= _POWERS[-exponent]
    elif exponent > 0:
        value *= _POWERS[exponent]
    if value >= _TOO_LARGE:
        return at, 0.0, _OUT_OF_RANGE
    if value < _NOTHING:
        return at, sign * 0.0, _GOOD
    status = _GOOD
    if value < _SMALLEST_NORMAL:
        status = _DOUBTFUL
    elif np.float32(value * _WIDER) != np.float32(value * _NARROWER):
        while whole and exponent < 0 and mantissa % _TEN == 0:
            mantissa //= _TEN
            exponent += 1
        # A whole number that a float64 holds is exact, and the processor rounds it right even halfway.
        if not whole or exponent != 0 or mantissa > _EXACT:
            status = _DOUBTFUL
    return at, sign * value, status


@compiled
def _parse(text: Any, kinds: Any, widths: Any, words: Any, reals: Any, bounds: Any, doubtful: Any, state: Any) -> int:
    """Parse whole lines into rows, from where ``state`` says on, until a line is malformed, all is done, or there is no
    room for doubtful floats. A line that was not finished leaves nothing behind but the state."""
    at, line, row, to, doubts = state[AT], state[LINE], state[ROW], state[WORD], state[DOUBTFUL]
    while at < len(text):
        at = _after_blanks(text, at)
        if text[at] == _NEWLINE:  # an empty line is no sample
            at += 1
            line += 1
            continue
        line_begin, doubts_before = at, doubts
        fault, slot, begin, number, wanted = DONE, 0, at, 0, 0
        while slot < len(kinds):
            at = begin = _after_blanks(text, at)
            wanted = number = 0
            if text[at] == _NEWLINE:
                fault = NO_COUNT
                break
            at, wanted, status = _whole(text, at)
            if status != _GOOD or wanted < 1:
                fault = BAD_COUNT
                break
            width = widths[slot]
            if width == 0:
                if kinds[slot] != IGNORED:
                    words[to] = wanted
                    to += 1
            elif wanted != width:
                fault = OTHER_WIDTH
                break
            while number < wanted:
                at = begin = _after_blanks(text, at)
                if text[at] == _NEWLINE:
                    fault = TOO_FEW
                    break
                if kinds[slot] == IGNORED:
                    at = _after_word(text, at)
                elif kinds[slot] == FLOATS:
                    at, real, status = _real(text, at)
                    if status == _MALFORMED:
                        fault = NO_FLOAT
                        break
                    if status == _OUT_OF_RANGE:
                        fault = FLOAT_RANGE
                        break
                    if status == _DOUBTFUL:
                        if doubts == len(doubtful):
                            fault = FULL
                            break
                        doubtful[doubts, 0], doubtful[doubts, 1], doubtful[doubts, 2] = to, begin, at
                        doubts += 1
                    words[to] = 0
                    reals[2 * to] = np.float32(real)
                    to += 1
                else:
                    at, value, status = _whole(text, at)
                    if status != _GOOD:
                        fault = NO_ID if status == _MALFORMED else ID_RANGE
                        break
                    words[to] = value
                    to += 1
                number += 1
            if fault != DONE:
                break
            slot += 1
        if fault == DONE:
            at = begin = _after_blanks(text, at)
            if text[at] != _NEWLINE:
                fault = MORE
        if fault != DONE:
            state[ROW], state[WORD], state[DOUBTFUL] = row, bounds[row], doubts_before
            state[SLOT], state[BEGIN], state[END] = slot, begin, _after_word(text, begin)
            state[NUMBER], state[WANTED] = number, wanted
            state[AT], state[LINE] = line_begin, line
            if fault != FULL:
                while text[at] != _NEWLINE:
                    at += 1
                state[AT], state[LINE] = at + 1, line + 1
            return fault
        at += 1
        line += 1
        row += 1
        bounds[row] = to
    state[AT], state[LINE], state[ROW], state[WORD], state[DOUBTFUL] = at, line, row, to, doubts
    return DONE


def nearest_float32(text: str) -> np.float32:
    """Return the float32 next to a decimal number; of two that are equally near, the one whose last bit is 0."""
    exact = Fraction(text)
    with np.errstate(over="ignore"):
        near = np.float32(float(exact))  # to float64 and on to float32: wrong at most by one, and only near halfway
        beyond = np.nextafter(near, np.float32(np.inf if exact > Fraction(float(near)) else -np.inf))
    if np.isfinite(beyond) and abs(exact - Fraction(float(beyond))) < abs(exact - Fraction(float(near))):
        near = beyond
    return np.float32(-0.0) if near == 0 and text.startswith("-") else near


class Parser:
    """Turns chunks of lines into rows, one after the other, in memory of its own that it uses again."""

    def __init__(self, slots: Layout) -> None:
        self._slots = slots
        self._words = np.empty(0, np.int64)
        self._doubtful = np.empty((_ROOM, 3), np.int64)
        self.take(b"")

    def take(self, text: bytes) -> None:
        """Begin with a chunk of whole lines."""
        self._bytes, self._text = text, np.frombuffer(text, np.uint8)
        # Every word has a blank or an end of line behind it, and a row at most as many words as its line.
        if len(self._words) <= len(text) // 2:
            self._words = np.empty(len(text) // 2 + 1, np.int64)
        self._bounds = np.zeros(text.count(b"\n") + 1, np.int64)
        self._state = np.zeros(10, np.int64)

    def fault(self) -> int:
        """Go on to the next malformed line and say what is wrong with it; ``DONE`` if there is no further one."""
        slots, state, reals = self._slots, self._state, self._words.view(np.float32)
        while True:
            fault = _parse(
                *(self._text, slots.kinds, slots.widths),
                *(self._words, reals, self._bounds, self._doubtful, state),
            )
            if fault != FULL:
                break
            self._doubtful = np.concatenate([self._doubtful, np.empty_like(self._doubtful)])
        if fault == DONE:
            for word, begin, end in self._doubtful[: state[DOUBTFUL]].tolist():
                reals[2 * word] = nearest_float32(self._bytes[begin:end].decode())
        return fault

    def rows(self) -> Rows:
        """Return all rows that were not malformed, in memory that the next chunk takes again."""
        return Rows(self._words, self._bounds[: self._state[ROW] + 1])

    @property
    def line(self) -> int:
        """Return the malformed line, counted from 0 where the chunk begins."""
        return int(self._state[LINE]) - 1

    @property
    def slot(self) -> str:
        """Return which slot is malformed; the last one, where the line is too long."""
        return self._slots.names[min(int(self._state[SLOT]), len(self._slots.names) - 1)]

    @property
    def word(self) -> bytes:
        """Return the word at which the line goes wrong."""
        return self._bytes[self._state[BEGIN] : self._state[END]]

    @property
    def number(self) -> int:
        """Return how many values of the slot were read."""
        return int(self._state[NUMBER])

    @property
    def wanted(self) -> int:
        """Return how many values the slot said it has."""
        return int(self._state[WANTED])
