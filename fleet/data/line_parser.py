"""Parses lines of text in compiled loops, MultiSlot and CSV, which leave errors and a few floats to Python.

Digits are looked at eight at a time: a word of eight bytes says by a few operations how many of them are digits, and
which number these are. Likewise for the ends of cells. So a chunk has some bytes behind its end, of no line.

A number becomes the nearest float32 of what is written. The loops compute in float64, with an error of less than two
units in the last place, and round; where another result were possible within four, and for subnormal numbers, they
remember the word, and ``nearest_float32`` decides. That is one number in a hundred million of random digits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fleet.data.batches import Rows
from fleet.data.columns import FLOATS, IGNORED, Floats, Ids, Layout
from fleet.numeric.ids import fnv1a
from fleet.numeric.jit import byte, compiled, eight_bytes, ones, trailing_zeros

# What is in the state of a loop, which it is given and leaves behind.
AT, LINE, ROW, WORD, DOUBTFUL, COLUMN, BEGIN, END, NUMBER, WANTED, UNQUOTED = range(11)

# Why a loop stopped.
DONE, NO_COUNT, BAD_COUNT, OTHER_WIDTH, TOO_FEW, NO_ID, ID_RANGE, NO_FLOAT, FLOAT_RANGE, MORE, FULL = range(11)
NO_VALUE, OTHER_CELLS, OPEN_QUOTE = range(11, 14)

# What a word was.
_GOOD, _MALFORMED, _OUT_OF_RANGE, _DOUBTFUL = range(4)

#: What is in a column, beside IDS and FLOATS: strings that become ids.
_HASHED = IGNORED + 1

#: So many doubtful floats are remembered, at first.
_ROOM = 4096
#: So many ends of lines stand behind a chunk.
_BEHIND = 72

_NEWLINE, _RETURN, _PLUS, _MINUS, _POINT, _ZERO, _QUOTE, _EXPONENT = (ord(each) for each in '\n\r+-.0"e')
_POWERS = np.array([float(f"1e{exponent}") for exponent in range(301)])
_WHOLE_POWERS = np.array([10**exponent for exponent in range(9)], np.uint64)
_WIDER, _NARROWER = 1 + 2.0**-50, 1 - 2.0**-50
#: From here on, and halfway to what would be the next one, everything is infinite for a float32.
_TOO_LARGE = float(2**128 - 2**103)
_LIMIT = np.array([int(digit) for digit in str(2**128 - 2**103)])
_LARGEST = float(2**128 - 2**104)
_SMALLEST_NORMAL, _NOTHING = 2.0**-126, 2.0**-151
_ONE, _TEN = np.uint64(1), np.uint64(10)
_MOST = np.uint64(2**64 - 1)
_MOST_NEGATIVE = np.uint64(2**63)
#: A mantissa below the first may take eight digits more, and one below the second one more.
_MANY, _MANTISSA = np.uint64(10**10), np.uint64(10**18)
_EXACT = np.uint64(2**53)

#: Eight equal bytes.
_EACH = np.uint64(0x0101010101010101)
_ZEROS, _NEWLINES, _QUOTES = (_EACH * np.uint64(ord(each)) for each in '0\n"')
_LOW_BITS, _HIGH_BITS = _EACH * np.uint64(0x7F), _EACH * np.uint64(0x80)
#: Added to a byte's lower bits it sets the highest one where they are more than 9.
_NO_DIGIT = _EACH * np.uint64(0x76)
#: What pairs of digits, two of four, are multiplied by.
_PAIRS, _UPPER, _LOWER = np.uint64(0x000000FF000000FF), np.uint64(1000000 << 32 | 100), np.uint64(10000 << 32 | 1)
_7_BITS, _8_BITS, _16_BITS, _32_BITS, _56_BITS = (np.uint64(each) for each in (7, 8, 16, 32, 56))
#: Multiplied by this, the lowest bits of eight bytes come together in the highest byte.
_GATHER = np.uint64(0x0102040810204080)


# ---------------------------------------------------------------------------------------------- words


@compiled
def _blank(character: int) -> bool:
    return character == 32 or character == 9 or character == 13


@compiled
def _ends(character: int) -> bool:
    return character == _NEWLINE or _blank(character)


@compiled
def _after_blanks(text: Any, at: int) -> int:
    while _blank(byte(text, at)):
        at += 1
    return at


@compiled
def _after_word(text: Any, at: int) -> int:
    while not _ends(byte(text, at)):
        at += 1
    return at


@compiled
def _digits(text: Any, at: int) -> tuple[int, Any]:
    """Return how many digits stand there, up to eight, and which number they are."""
    word = eight_bytes(text, at) ^ _ZEROS
    count = trailing_zeros((((word & _LOW_BITS) + _NO_DIGIT) | word) & _HIGH_BITS) >> 3
    if count == 0:
        return 0, np.uint64(0)
    word <<= np.uint64(64 - 8 * count)  # the bytes that come in are leading zeros
    word = word * _TEN + (word >> _8_BITS)
    return count, ((word & _PAIRS) * _UPPER + ((word >> _16_BITS) & _PAIRS) * _LOWER) >> _32_BITS


@compiled
def _whole(text: Any, at: int) -> tuple[int, Any, int]:
    """Return where a whole number ends, its 64 bits, and what it was. A number that does not fit an int64 wraps, as a
    uint64."""
    negative = byte(text, at) == _MINUS
    if negative or byte(text, at) == _PLUS:
        at += 1
    begin, status = at, _GOOD
    count, value = _digits(text, at)
    at += count
    while count == 8:
        count, part = _digits(text, at)
        at += count
        if at - begin > 19 and value > (_MOST - part) // _WHOLE_POWERS[count]:
            status = _OUT_OF_RANGE
        value = value * _WHOLE_POWERS[count] + part
    if at == begin:
        return at, np.int64(0), _MALFORMED
    if negative:
        if value > _MOST_NEGATIVE:
            status = _OUT_OF_RANGE
        value = np.uint64(0) - value
    return at, np.int64(value), status


@compiled
def _letters(text: Any, at: int, word: Any) -> bool:
    """Say whether these letters, large or small, stand there."""
    for letter in word:
        if byte(text, at) | 32 != letter:
            return False
        at += 1
    return True


_NAN, _INF, _INFINITY = (np.frombuffer(name, np.uint8) for name in (b"nan", b"inf", b"infinity"))


@compiled
def _mantissa(text: Any, at: int, mantissa: Any) -> tuple[int, Any, int, bool]:
    """Return where digits end, the mantissa with those that it can take, how many it could not, and whether these are
    more than zeros."""
    while mantissa < _MANY:
        count, part = _digits(text, at)
        mantissa = mantissa * _WHOLE_POWERS[count] + part
        at += count
        if count < 8:
            return at, mantissa, 0, True
    left, whole = 0, True
    while _ZERO <= byte(text, at) <= _ZERO + 9:
        if mantissa < _MANTISSA:
            mantissa = mantissa * _TEN + np.uint64(byte(text, at) - _ZERO)
        else:
            left += 1
            whole = False
        at += 1
    return at, mantissa, left, whole


@compiled
def _is_too_large(text: Any, at: int) -> bool:
    """Say whether a number that is all but the least one that is too large is that, or more: by all its digits."""
    place = 0
    while place < len(_LIMIT):
        digit = byte(text, at) - _ZERO
        at += 1
        if digit == _POINT - _ZERO or (digit == 0 and place == 0):
            continue
        if digit < 0 or digit > 9:
            digit = 0  # and so are all that follow
            at -= 1
        if digit != _LIMIT[place]:
            return bool(digit > _LIMIT[place])
        place += 1
    return True


@compiled
def _real(text: Any, at: int) -> tuple[int, Any, int]:
    """Return where a number ends, its value, and what it was."""
    sign = 1.0
    if byte(text, at) == _MINUS or byte(text, at) == _PLUS:
        if byte(text, at) == _MINUS:
            sign = -1.0
        at += 1
    first = begin = at
    at, mantissa, exponent, whole = _mantissa(text, at, np.uint64(0))
    digits, after = at - begin, byte(text, at)
    if after != _POINT and after | 32 != _EXPONENT and digits > 0 and whole and mantissa <= _EXACT:
        return at, sign * np.float64(mantissa), _GOOD
    if after == _POINT:
        begin = at + 1
        at, mantissa, left, all_of_it = _mantissa(text, begin, mantissa)
        whole = whole and all_of_it
        digits += at - begin
        exponent -= at - begin - left
    if digits == 0 and after == _POINT:
        return at, 0.0, _MALFORMED
    if digits == 0:
        if _letters(text, at, _NAN):
            return at + 3, np.nan, _GOOD
        if _letters(text, at, _INFINITY):
            return at + 8, sign * np.inf, _GOOD
        if _letters(text, at, _INF):
            return at + 3, sign * np.inf, _GOOD
        return at, 0.0, _MALFORMED
    if byte(text, at) | 32 == _EXPONENT:
        at += 1
        negative = byte(text, at) == _MINUS
        if negative or byte(text, at) == _PLUS:
            at += 1
        begin, scale = at, 0
        while _ZERO <= byte(text, at) <= _ZERO + 9:
            scale = min(scale * 10 + (byte(text, at) - _ZERO), 1 << 40)
            at += 1
        if at == begin:
            return at, 0.0, _MALFORMED
        exponent += -scale if negative else scale
    if mantissa == 0 or exponent < -300:
        return at, sign * 0.0, _GOOD
    if exponent > 300:
        return at, 0.0, _OUT_OF_RANGE
    value = np.float64(mantissa)
    if exponent < 0:
        value /= _POWERS[-exponent]
    elif exponent > 0:
        value *= _POWERS[exponent]
    if value * _WIDER >= _TOO_LARGE:
        if value * _NARROWER >= _TOO_LARGE or _is_too_large(text, first):
            return at, 0.0, _OUT_OF_RANGE
        return at, sign * _LARGEST, _GOOD
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


# ---------------------------------------------------------------------------------------------- MultiSlot


@compiled
def _parse_slots(
    text: Any, size: int, kinds: Any, widths: Any, words: Any, reals: Any, bounds: Any, doubtful: Any, state: Any
) -> int:
    """Parse whole lines into rows, from where ``state`` says on, until a line is malformed, all is done, or there is no
    room for doubtful floats. A line that was not finished leaves nothing behind but the state."""
    at, line, row, to, doubts = state[AT], state[LINE], state[ROW], state[WORD], state[DOUBTFUL]
    while at < size:
        at = _after_blanks(text, at)
        if byte(text, at) == _NEWLINE:  # an empty line is no sample
            at += 1
            line += 1
            continue
        line_begin, doubts_before = at, doubts
        fault, slot, begin, number, wanted = DONE, 0, at, 0, 0
        while slot < len(kinds):
            at = begin = _after_blanks(text, at)
            number = 0
            wanted = byte(text, at) - _ZERO
            if 1 <= wanted <= 9 and byte(text, at + 1) == 32:  # as it mostly is
                at += 1
            else:
                if byte(text, at) == _NEWLINE:
                    wanted, fault = 0, NO_COUNT
                    break
                at, wanted, status = _whole(text, at)
                if status != _GOOD or wanted < 1 or not _ends(byte(text, at)):
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
                if byte(text, at) == _NEWLINE:
                    fault = TOO_FEW
                    break
                if kinds[slot] == IGNORED:
                    at = _after_word(text, at)
                    number += 1
                    continue
                digits, small = _digits(text, at)
                if 0 < digits < 8 and _ends(byte(text, at + digits)):  # as it mostly is
                    words[to] = np.int64(small)
                    if kinds[slot] == FLOATS:
                        words[to] = 0
                        reals[2 * to] = np.float32(small)
                    at += digits
                elif kinds[slot] == FLOATS:
                    at, real, status = _real(text, at)
                    if status == _MALFORMED or not _ends(byte(text, at)):
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
                else:
                    at, value, status = _whole(text, at)
                    if status != _GOOD or not _ends(byte(text, at)):
                        fault = ID_RANGE if status == _OUT_OF_RANGE and _ends(byte(text, at)) else NO_ID
                        break
                    words[to] = value
                to += 1
                number += 1
            if fault != DONE:
                break
            slot += 1
        if fault == DONE:
            at = begin = _after_blanks(text, at)
            if byte(text, at) != _NEWLINE:
                fault = MORE
        if fault != DONE:
            state[ROW], state[WORD], state[DOUBTFUL] = row, bounds[row], doubts_before
            state[COLUMN], state[BEGIN], state[END] = slot, begin, _after_word(text, begin)
            state[NUMBER], state[WANTED] = number, wanted
            state[AT], state[LINE] = line_begin, line
            if fault != FULL:
                while byte(text, at) != _NEWLINE:
                    at += 1
                state[AT], state[LINE] = at + 1, line + 1
            return fault
        at += 1
        line += 1
        row += 1
        bounds[row] = to
    state[AT], state[LINE], state[ROW], state[WORD], state[DOUBTFUL] = at, line, row, to, doubts
    return DONE


# ---------------------------------------------------------------------------------------------- CSV


@compiled
def _equal(word: Any, pattern: Any) -> Any:
    """Return the highest bit of each byte in which the two are equal."""
    word ^= pattern
    return ~((((word & _LOW_BITS) + _LOW_BITS) | word) | _LOW_BITS)


@compiled
def _together(marks: Any) -> Any:
    """Return the highest bits of eight bytes as one byte."""
    return ((marks >> _7_BITS) * _GATHER) >> _56_BITS


@compiled
def _find_cells(text: Any, size: int, delimiter: int, may_quote: bool, places: Any, lines: Any) -> None:
    """Write into ``places`` where all delimiters and ends of lines are, behind what stands for one before the text, and
    into ``lines`` which of these the end of each line is, and whether the line has a quote. Sixty-four bytes are looked
    at together: which of a few have a mark is what no processor foresees."""
    delimiters, found, line, has_quotes = _EACH * np.uint64(delimiter), 1, 0, 0
    places[0] = -1
    for at in range(0, size, 64):
        marks, special = np.uint64(0), np.uint64(0)
        for part in range(8):
            word = eight_bytes(text, at + 8 * part)
            end = _equal(word, _NEWLINES)
            special |= end
            if may_quote:
                special |= _equal(word, _QUOTES)
            marks |= _together(end | _equal(word, delimiters)) << np.uint64(8 * part)
        if at + 64 > size:  # what is behind the chunk
            marks &= (_ONE << np.uint64(size - at)) - _ONE
        if special != 0:
            ends, quotes = np.uint64(0), np.uint64(0)
            for part in range(8):
                word, shift = eight_bytes(text, at + 8 * part), np.uint64(8 * part)
                ends |= _together(_equal(word, _NEWLINES)) << shift
                quotes |= _together(_equal(word, _QUOTES)) << shift
            ends &= marks
            while ends != 0:
                up_to = ends ^ (ends - _ONE)
                lines[line, 0] = found + ones(marks & up_to) - 1
                lines[line, 1] = has_quotes | (quotes & up_to != 0)
                quotes &= ~up_to
                has_quotes = 0
                line += 1
                ends &= ends - _ONE
            has_quotes |= quotes != 0
        stop = found + ones(marks)
        while found < stop:
            for each in range(8):  # more than there are, which the next ones are written over
                places[found + each] = at + trailing_zeros(marks)
                marks &= marks - _ONE
            found += 8
        found = stop


@compiled
def _unquoted_cells(text: Any, at: int, delimiter: int, unquoted: Any, begins: Any, ends: Any) -> int:
    """Write the cells of a line without its quotes to the same places of ``unquoted``, each with an end of line behind
    it, and return how many there are; less than none if a quote is left open."""
    cells, to = 0, at
    while True:
        begin, is_open = to, False
        if byte(text, at) == _QUOTE:
            is_open = True
            at += 1
        while True:
            character = byte(text, at)
            if is_open:
                if character == _NEWLINE:
                    return -1
                if character == _QUOTE:
                    if byte(text, at + 1) != _QUOTE:
                        is_open = False
                        at += 1
                        continue
                    at += 1
            elif character in (delimiter, _NEWLINE):
                break
            elif character == _RETURN and byte(text, at + 1) == _NEWLINE:
                at += 1
                continue
            unquoted[to] = character
            to += 1
            at += 1
        if cells < len(begins):
            begins[cells], ends[cells] = begin, to
        cells += 1
        if byte(text, at) == _NEWLINE:
            unquoted[to : to + 8] = _NEWLINE
            return cells
        unquoted[to] = _NEWLINE
        to += 1
        at += 1


class _Columns(NamedTuple):
    """Says of each column in which cell it is, what is in it, how many values it has (0: any number), whether these are
    strings, whether something stands in for an empty cell, and what; and in ``plain`` what is in it, if all have one
    value."""

    sources: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    widths: npt.NDArray[np.int64]
    hashed: npt.NDArray[np.bool_]
    filled: npt.NDArray[np.bool_]
    fillings: npt.NDArray[np.int64]
    plain: npt.NDArray[np.int64]


@compiled
def _row(
    text: Any,
    inner: int,
    begins: Any,
    ends: Any,
    columns: Any,
    words: Any,
    reals: Any,
    to: int,
    doubtful: Any,
    doubts: int,
) -> tuple[int, int, int, int, int, int, int]:
    """Parse the cells of a line into a row, and return why that went wrong if it did, where the row ends, how many
    doubtful floats there are, and the column, the place and the number of what was wrong."""
    kinds, widths, filled = columns.kinds, columns.widths, columns.filled
    fault, column, begin, end, number = DONE, 0, 0, 0, 0
    for column in range(len(kinds)):
        begin, stop = begins[columns.sources[column]], ends[columns.sources[column]]
        width, count_at, number = widths[column], to, 0
        if width == 0:
            to += 1
        if begin == stop:
            if width > 0 and not filled[column]:
                return NO_VALUE, to, doubts, column, begin, stop, number
            for _ in range(width):
                words[to] = columns.fillings[column]
                to += 1
        else:
            while True:
                end = stop
                if inner != 0 and width != 1:
                    end = begin
                    while end < stop and byte(text, end) != inner:
                        end += 1
                if columns.hashed[column]:
                    words[to] = fnv1a(text, begin, end)
                else:
                    digits, small = _digits(text, begin)
                    if digits > 0 and begin + digits == end:  # as it mostly is
                        words[to] = np.int64(small)
                        if kinds[column] == FLOATS:
                            words[to] = 0
                            reals[2 * to] = np.float32(small)
                    else:
                        first = begin
                        while first < end and _blank(byte(text, first)):
                            first += 1
                        if kinds[column] == FLOATS:
                            at, real, status = _real(text, first)
                            words[to] = 0
                            reals[2 * to] = np.float32(real)
                        else:
                            at, value, status = _whole(text, first)
                            words[to] = value
                        after = at
                        while at < end and _blank(byte(text, at)):
                            at += 1
                        if at != end or status == _MALFORMED:
                            fault = NO_FLOAT if kinds[column] == FLOATS else NO_ID
                            return fault, to, doubts, column, begin, end, number
                        if status == _OUT_OF_RANGE:
                            fault = FLOAT_RANGE if kinds[column] == FLOATS else ID_RANGE
                            return fault, to, doubts, column, begin, end, number
                        if status == _DOUBTFUL:
                            if doubts == len(doubtful):
                                return FULL, to, doubts, column, begin, end, number
                            doubtful[doubts, 0], doubtful[doubts, 1], doubtful[doubts, 2] = to, first, after
                            doubts += 1
                to += 1
                number += 1
                if end == stop:
                    break
                begin = end + 1
            if width > 0 and number != width:
                return OTHER_WIDTH, to, doubts, column, begin, end, number
        if width == 0:
            words[count_at] = number
    return fault, to, doubts, column, begin, end, number


@compiled
def _parse_cells(
    text: Any,
    places: Any,
    lines: Any,
    unquoted: Any,
    delimiter: int,
    inner: int,
    begins: Any,
    ends: Any,
    columns: Any,
    words: Any,
    reals: Any,
    bounds: Any,
    doubtful: Any,
    state: Any,
) -> int:
    """Do as ``_parse_slots`` for lines whose cells were found. What has come of a line with quotes lies in
    ``unquoted``, and the begin and end of a doubtful float there are told as less than none."""
    line, row, to, doubts = state[LINE], state[ROW], state[WORD], state[DOUBTFUL]
    plain, sources, filled, fillings = columns.plain, columns.sources, columns.filled, columns.fillings
    while line < len(lines):
        last, place = lines[line, 0], lines[line - 1, 0] + 1 if line > 0 else 1
        at, stop = places[place - 1] + 1, places[last]
        doubts_before, fault = doubts, DONE
        column, begin, end, number = 0, at, stop + 0, last - place + 1
        if stop > at and byte(text, stop - 1) == _RETURN:
            end -= 1
        if end == at and number == 1:  # an empty line is no sample
            line += 1
            continue
        has_quotes = lines[line, 1] != 0
        if has_quotes:
            number = _unquoted_cells(text, at, delimiter, unquoted, begins, ends)
        places[last] = end  # until the next line begins behind it
        if number != len(begins):
            fault, has_quotes = OPEN_QUOTE if number < 0 else OTHER_CELLS, False
        elif has_quotes:
            fault, to, doubts, column, begin, end, number = _row(
                unquoted, inner, begins, ends, columns, words, reals, to, doubtful, doubts
            )
            for doubt in range(doubts_before, doubts):
                doubtful[doubt, 1], doubtful[doubt, 2] = ~doubtful[doubt, 1], ~doubtful[doubt, 2]
        else:
            column = 0
            while column < len(plain):  # as it mostly is: one value in each cell, and nothing wrong
                cell = place + sources[column]
                begin, end = places[cell - 1] + 1, places[cell]
                if begin == end:
                    if not filled[column]:
                        break
                    words[to + column] = fillings[column]
                elif plain[column] == _HASHED:
                    words[to + column] = fnv1a(text, begin, end)
                else:
                    digits, small = _digits(text, begin)
                    if digits > 0 and begin + digits == end:
                        words[to + column] = np.int64(small)
                        if plain[column] == FLOATS:
                            words[to + column] = 0
                            reals[2 * (to + column)] = np.float32(small)
                    elif plain[column] == FLOATS:
                        at, real, status = _real(text, begin)
                        if at != end or status != _GOOD:
                            break
                        words[to + column] = 0
                        reals[2 * (to + column)] = np.float32(real)
                    else:
                        at, value, status = _whole(text, begin)
                        if at != end or status != _GOOD:
                            break
                        words[to + column] = value
                column += 1
            if column > 0 and column == len(plain):
                to += column
            else:
                for cell in range(number):
                    begins[cell], ends[cell] = places[place + cell - 1] + 1, places[place + cell]
                fault, to, doubts, column, begin, end, number = _row(
                    text, inner, begins, ends, columns, words, reals, to, doubtful, doubts
                )
        places[last] = stop
        if fault != DONE:
            state[ROW], state[WORD], state[DOUBTFUL] = row, bounds[row], doubts_before
            state[COLUMN], state[BEGIN], state[END] = column, begin, end
            state[NUMBER], state[WANTED], state[UNQUOTED] = number, 0, has_quotes
            state[LINE] = line if fault == FULL else line + 1
            return fault
        line += 1
        row += 1
        bounds[row] = to
    state[LINE], state[ROW], state[WORD], state[DOUBTFUL] = line, row, to, doubts
    return DONE


# ---------------------------------------------------------------------------------------------- for both


def nearest_float32(text: str) -> np.float32:
    """Return the float32 next to a decimal number; of two that are equally near, the one whose last bit is 0."""
    exact = Fraction(Decimal(text))  # which takes any number of digits
    with np.errstate(over="ignore"):
        near = np.float32(float(exact))  # to float64 and on to float32: wrong at most by one, and only near halfway
        beyond = np.nextafter(near, np.float32(np.inf if exact > Fraction(float(near)) else -np.inf))
    if np.isfinite(beyond) and abs(exact - Fraction(float(beyond))) < abs(exact - Fraction(float(near))):
        near = beyond
    return np.float32(-0.0) if near == 0 and text.startswith("-") else near


class Parser(ABC):
    """Turns chunks of lines into rows, one after the other, in memory of its own that it uses again."""

    def __init__(self, slots: Layout) -> None:
        self._slots = slots
        self._text = np.empty(0, np.uint8)
        self._words = np.empty(0, np.int64)
        self._doubtful = np.empty((_ROOM, 3), np.int64)
        self.take(b"", 0)

    def take(self, text: bytes, lines: int) -> None:
        """Begin with a chunk of so many whole lines."""
        self._size = len(text)
        if len(self._text) < self._size + _BEHIND:
            self._text = np.empty(self._size + self._size // 4 + _BEHIND, np.uint8)
        self._text[: self._size] = np.frombuffer(text, np.uint8)
        self._text[self._size : self._size + _BEHIND] = _NEWLINE
        most = self._most_words(self._size, lines)
        if len(self._words) < most:
            self._words = np.empty(most + most // 4, np.int64)
        self._bounds = np.zeros(lines + 1, np.int64)
        self._state = np.zeros(11, np.int64)

    @abstractmethod
    def _most_words(self, size: int, lines: int) -> int:
        """Return how many words may come of so many bytes in so many lines."""

    @abstractmethod
    def _parse(self, *into: Any) -> int:
        """Go on to the next malformed line, or to where there is no room for doubtful floats."""

    def _source(self, *, is_unquoted: bool) -> npt.NDArray[np.uint8]:
        """Return where a word lies."""
        del is_unquoted
        return self._text

    def fault(self) -> int:
        """Go on to the next malformed line and say what is wrong with it; ``DONE`` if there is no further one."""
        reals, state = self._words.view(np.float32), self._state
        while True:
            fault = self._parse(self._words, reals, self._bounds, self._doubtful, state)
            if fault != FULL:
                break
            self._doubtful = np.concatenate([self._doubtful, np.empty_like(self._doubtful)])
        if fault == DONE:
            for word, begin, end in self._doubtful[: state[DOUBTFUL]].tolist():
                source = self._source(is_unquoted=begin < 0)
                text = source[~begin:~end] if begin < 0 else source[begin:end]
                reals[2 * word] = nearest_float32(text.tobytes().decode())
        return fault

    def rows(self) -> Rows:
        """Return all rows that were not malformed, in memory that the next chunk takes again."""
        return Rows(self._words, self._bounds[: self._state[ROW] + 1])

    @property
    def line(self) -> int:
        """Return the malformed line, counted from 0 where the chunk begins."""
        return int(self._state[LINE]) - 1

    @property
    def column(self) -> str:
        """Return which column is malformed; the last one, where the line is too long."""
        return self._slots.names[min(int(self._state[COLUMN]), len(self._slots.names) - 1)]

    @property
    def word(self) -> bytes:
        """Return the word at which the line goes wrong."""
        source = self._source(is_unquoted=bool(self._state[UNQUOTED]))
        return source[self._state[BEGIN] : self._state[END]].tobytes()

    @property
    def number(self) -> int:
        """Return how many values of the column were read, or how many cells there are."""
        return int(self._state[NUMBER])

    @property
    def wanted(self) -> int:
        """Return how many values the slot said it has."""
        return int(self._state[WANTED])


class SlotParser(Parser):
    """Parses MultiSlot text."""

    def _most_words(self, size: int, lines: int) -> int:
        del lines
        return size // 2 + 1  # every word has a blank or an end of line behind it

    def _parse(self, *into: Any) -> int:
        return _parse_slots(self._text, self._size, self._slots.kinds, self._slots.widths, *into)


class CellParser(Parser):
    """Parses CSV."""

    def __init__(
        self,
        columns: Sequence[Ids | Floats],
        slots: Layout,
        sources: Sequence[int],
        cells: int,
        delimiter: str,
        list_delimiter: str | None,
    ) -> None:
        """``slots`` is the layout of ``columns``, each of which is found in one of so many ``cells``."""
        self._marks = ord(delimiter), 0 if list_delimiter is None else ord(list_delimiter)
        self._unquoted = np.empty(0, np.uint8)
        self._places, self._lines = np.empty(0, np.int32), np.empty((0, 2), np.int32)
        self._begins, self._ends = np.empty(cells, np.int64), np.empty(cells, np.int64)
        hashed = np.array([isinstance(each, Ids) and each.hash for each in columns], np.bool_)
        filled = np.array([each.missing is not None for each in columns], np.bool_)
        fillings = np.zeros(len(columns), np.int64)
        for place, each in enumerate(columns):
            kind = np.int64 if isinstance(each, Ids) else np.float32
            fillings[place : place + 1].view(kind)[0] = 0 if each.missing is None else each.missing
        has_one = bool((slots.widths == 1).all())
        plain = np.where(hashed, _HASHED, slots.kinds).astype(np.int64)[: None if has_one else 0]
        places = np.array(sources, np.int64)
        self._columns = _Columns(places, slots.kinds, slots.widths, hashed, filled, fillings, plain)
        self._least = int(np.maximum(slots.widths, 1).sum())
        super().__init__(slots)

    def take(self, text: bytes, lines: int) -> None:
        super().take(text, lines)
        if len(self._places) < len(self._text):
            self._places = np.empty(len(self._text), np.int32)
            self._unquoted = np.empty(len(self._text), np.uint8)
        self._lines = np.empty((lines, 2), np.int32)
        _find_cells(self._text, self._size, self._marks[0], b'"' in text, self._places, self._lines)

    def _most_words(self, size: int, lines: int) -> int:
        # A line of so many cells has as many bytes, and one of one cell something in it.
        return size + min(lines, size // max(len(self._begins), 2)) * self._least

    def _source(self, *, is_unquoted: bool) -> npt.NDArray[np.uint8]:
        return self._unquoted if is_unquoted else self._text

    def _parse(self, *into: Any) -> int:
        found = (self._text, self._places, self._lines, self._unquoted, *self._marks, self._begins, self._ends)
        return _parse_cells(*found, self._columns, *into)
