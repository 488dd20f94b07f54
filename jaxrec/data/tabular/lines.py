"""Lines of text: which ones are well-formed, and what is wrong with a malformed one."""

import re

import numba
import numpy as np

SPLIT = "\x1f"  # replaces a separator of several characters
NO_UTF8 = "is no UTF-8; if the file is Latin-1, as of many spreadsheets, the schema says encoding='latin-1'"


def well_formed(text: bytes, separator: bytes, columns: int, quote: bool) -> np.ndarray:
    """Return for each line whether it has `columns` fields in UTF-8, with quotes in pairs."""
    array = np.frombuffer(text, np.uint8)
    try:
        strange = not text.isascii() and not text.decode()
    except UnicodeDecodeError:
        strange = True
    ends, fields, odd = _scan(array, np.frombuffer(separator, np.uint8), text.count(b"\n"), quote, strange)
    good = (fields == columns) & (np.diff(ends, prepend=-1) > 1)
    if odd.any():
        starts = np.concatenate([[0], ends[:-1] + 1])
        for line in np.flatnonzero(odd).tolist():
            good[line] = not explain(text[starts[line] : ends[line]], separator, columns, quote)
    return good


@numba.njit(cache=True, nogil=True)
def _scan(data, separator, lines, quote, strange):
    """Return the end and the number of fields of each line, and whether it needs a second look.

    It does if quotes do not surround a field, if it has the character that replaces a long separator, or, in a text
    that is not UTF-8 (`strange`), if it is not ASCII.
    """
    ends, fields, odd = np.zeros(lines, np.int64), np.ones(lines, np.int64), np.zeros(lines, np.bool_)
    line, matched, state = 0, 0, 0  # 0 at the start of a field, 1 in it, 2 in its quotes, 3 after a quote in its quotes
    for at in range(len(data)):
        byte = data[at]
        if byte == 10:
            ends[line] = at
            odd[line] |= state == 2
            line, matched, state = line + 1, 0, 0
        elif state != 2 and byte == separator[matched]:
            matched += 1
            if matched == len(separator):
                fields[line] += 1
                matched, state = 0, 0
        elif quote and byte == 34:
            odd[line] |= state == 1
            state = 3 if state == 2 else 2
        else:
            # The characters of a separator are all alike or all different: it cannot start within a failed match.
            matched = 1 if len(separator) > 1 and byte == separator[0] else 0
            odd[line] |= state == 3 or (byte == 31 and len(separator) > 1) or (byte > 127 and strange)
            state = 2 if state == 2 else 1
    return ends, fields, odd


def explain(line: bytes, separator: bytes, columns: int, quote: bool) -> str:
    """Describe what is wrong with a line; an empty string if nothing is."""
    if not line:
        return f"the line is empty, but a row has {columns} fields"
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} {NO_UTF8}"
    if len(separator) > 1 and SPLIT.encode() in line:
        return f"a field holds the control character {SPLIT!r}, but fields are text"
    fields = line.count(separator) + 1
    if quote and b'"' in line:
        escaped = re.escape(separator)
        field = rb'(?:"(?:[^"]|"")*"|[^"' + escaped + rb"]*)"
        found = re.fullmatch(field + rb"(?:" + escaped + field + rb")*", line)
        if found is None:
            return (
                "a quote is open or stands inside of a field, but quotes surround a field, and are doubled inside of it"
                " (quote=False of the schema takes them as text"
                + (r"""; sed 's/\\"/""/g' doubles those after a backslash)""" if rb"\"" in line else ")")
            )
        fields = len(re.findall(rb"(?:^|" + escaped + rb")" + field, line))
    return "" if fields == columns else f"{fields} fields, but a row has {columns}"
