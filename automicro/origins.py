"""Telling objects of other libraries by the name of their class, without importing any."""


def comes_from(value: object, *names: str) -> bool:
    """Whether a value is of a class, or of a subclass of one, that a library calls so.

    Args:
        value: any.
        names: of classes with the package that they are in: ``"torch.Tensor"``, wherever in it.

    >>> import fractions
    >>> comes_from(fractions.Fraction(1), "fractions.Fraction"), comes_from(1, "torch.Tensor")
    (True, False)
    """
    classes = type(value).__mro__
    homes = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in classes}
    return not homes.isdisjoint(names)
