"""Rewrite docstrings of dpjax's style for mkdocstrings.

`Privacy:` and `Reference:` begin paragraphs in the source, and become sections on the
site. `Example:` becomes a section of doctests. Shapes such as f[*b] become code.
"""

import re
import textwrap

import griffe

SECTION = re.compile(r"^(Privacy|Reference): *(.+(?:\n(?!\n).+)*)", re.MULTILINE)
RETURNS = re.compile(r"^(Returns|Yields):\n((?: .+(?:\n|$))+)", re.MULTILINE)
SHAPE = re.compile(r"(?<![`\w])(?:f|i|u|b|bool|i32|f32)\[[^\]`]*\]")


def rewritten(text: str) -> str:
    """Return a docstring's text in the form that the Google-style parser expects."""
    text = SECTION.sub(lambda m: f"{m[1]}:\n" + textwrap.indent(m[2], "  "), text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = RETURNS.sub(lambda m: f"{m[1]}:\n{_untyped(m[2])}", text)
    lines = text.split("\n")
    inside = False  # whether the line is in a doctest
    for i, line in enumerate(lines):
        inside = bool(line.strip()) and (inside or line.lstrip().startswith(">>>"))
        if not inside:
            lines[i] = _outside_code(line)
    return "\n".join(lines)


def _untyped(text: str) -> str:
    """Escape colons, so that the parser takes no words before a colon for a type."""
    parts = text.split("`")
    parts[::2] = [re.sub(r":(?=\s)", "&#58;", part) for part in parts[::2]]
    return "`".join(parts)


def _outside_code(line: str) -> str:
    parts = line.split("`")
    parts[::2] = [SHAPE.sub(lambda m: f"\0{m[0]}\0", part) for part in parts[::2]]
    return "`".join(parts).replace("\0", "`")


class HouseStyle(griffe.Extension):
    """Rewrites each docstring when it is found."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)
