"""How objects show themselves: in one line, and as text of a notebook."""

import html
import inspect
import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 60
_SHORT.maxlist = _SHORT.maxtuple = 2
_MISSING = object()


def one_line(subject: object) -> str:
    """An object as the call that made it, in one line: what is not its default, and is kept.

    Args:
        subject: keeps its arguments under their names, with an underscore or without.

    >>> class Patient:
    ...     def __init__(self, monitor, *, patience=3, mode="min"):
    ...         self._monitor, self._patience, self._mode = monitor, patience, mode
    >>> one_line(Patient("eval/loss", patience=5))
    "Patient(monitor='eval/loss', patience=5)"
    """
    told = []
    for name, parameter in inspect.signature(type(subject).__init__).parameters.items():
        value = getattr(subject, f"_{name}", getattr(subject, name, _MISSING))
        # A method of an argument's name does not hold the argument.
        if name == "self" or value is _MISSING or inspect.ismethod(value):
            continue
        if not _is_same(value, parameter.default):
            told.append(f"{name}={short(value)}")
    return f"{type(subject).__name__}({', '.join(told)})"


def short(value: object) -> str:
    """The representation of a value in few letters and one line.

    >>> short([1, 2] * 99)
    '[1, 2, ...]'
    """
    return " ".join(_SHORT.repr(value).split())


def _is_same(value: object, default: object) -> bool:
    try:
        return bool(value == default)
    except Exception:  # tensors and arrays compare element by element
        return False


def html_text(text: str) -> str:
    r"""Lines of text for a notebook, its first as a heading.

    >>> html_text("exact\n\n  1 × 2 < 3")
    '<strong>exact</strong><pre>  1 × 2 &lt; 3</pre>'
    """
    first, _, rest = text.partition("\n")
    heading = f"<strong>{html.escape(first)}</strong>"
    rest = rest.strip("\n")
    return f"{heading}<pre>{html.escape(rest)}</pre>" if rest else heading
