"""Text for a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""Text with control characters, which a terminal would interpret, replaced by Python escapes.

    Example:
        >>> printable("a\x1b[31mb\n")
        'a\\x1b[31mb\\n'
        >>> printable("a\n\x07", keep="\n")
        'a\n\\x07'
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
